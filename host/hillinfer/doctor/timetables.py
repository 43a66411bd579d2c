# SPDX-License-Identifier: Apache-2.0
"""What `hillinfer doctor --profile` says of a pass behind a stored prefix: its timetable."""

from __future__ import annotations

from hillinfer.doctor.finding import Finding, Verdict
from hillinfer.drive.read_turns import QUANTUM_BYTES
from hillinfer.schedule.drive_rates import DriveRates
from hillinfer.schedule.timetable import LayerWork, Timetable
from hillinfer.values import format_bytes

# Reads of several of a store's objects, joined.
_READ_BYTES = 4 << 20


def stored_prefix_finding(
    new_tokens: int,
    prefix_tokens: int,
    layers: int,
    row_bytes: int,
    window_seconds: float,
    drive: DriveRates,
) -> Finding:
    """Return when a pass over rows that stream by is through, and what is left for writes.

    Rows come layer by layer to their places in a cache in memory, as `load_into` brings them, so as
    many layers may be there before they are wanted as the model has.

    Parameters
    ----------
    new_tokens, prefix_tokens
        Of the pass, and of the prefix that is stored.
    layers, row_bytes
        Of the model, and of a token's row in one layer.
    window_seconds
        C: how long one layer computes over rows in memory.
    drive
        What the drive gives.
    """
    read = drive.read_seconds(prefix_tokens * row_bytes, _READ_BYTES)
    table = Timetable.of([LayerWork(0.0, window_seconds, 0.0, read)] * layers, layers)
    written = sum(
        table.write_bytes(layer, drive.write, drive.mixing_loss, QUANTUM_BYTES)
        for layer in range(layers)
    )
    left = f"leaves room to write {format_bytes(written)}" if written else "leaves no time to write"
    return Finding(
        "stored prefix",
        Verdict.OK,
        f"{new_tokens} tokens behind {prefix_tokens} stored ones take {table.seconds:.3f} s, "
        f"{1e3 * table.bubble_seconds:.2f} ms of it waiting for rows, which {left} in slack "
        f"(modelled from {1e3 * window_seconds:.2f} ms of computing and {1e3 * read:.2f} ms of "
        "reading a layer)",
    )
