# SPDX-License-Identifier: Apache-2.0
"""Models a pass over a streamed prefix: when rows arrive, layers attend, and writes fit in.

The recurrence of the store's design: reads come layer by layer into D buffers while the layers
before compute; a layer's rows are needed only once its own queries, keys and values are made.

    r[l] = max(r[l-1], f[l-D]) + R[l]      rows are there
    a[l] = max(f[l-1] + pre[l], r[l])      attention begins
    f[l] = a[l] + attend[l] + post[l]      the layer is through
    bubble[l] = a[l] - f[l-1] - pre[l]     attention waits for rows
    slack[l] = max(0, C[l] - R[l] - ε)     the drive has nothing to read

With no buffer ahead, reading begins when attention wants the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hillinfer.doctor.finding import Finding, Verdict
from hillinfer.drive.read_turns import QUANTUM_BYTES
from hillinfer.schedule.drive_rates import DriveRates
from hillinfer.values import format_bytes

# --- The recurrence ---


@dataclass(frozen=True)
class LayerWork:
    """What a layer takes, in seconds.

    Parameters
    ----------
    pre, attend, post
        Computing: before its rows are needed, attention over them, and what follows.
    read
        Reading its rows.
    """

    pre: float
    attend: float
    post: float
    read: float

    @property
    def compute(self) -> float:
        """C: everything but reading."""
        return self.pre + self.attend + self.post


@dataclass(frozen=True)
class LayerTimes:
    """When a layer does what, in seconds since the pass began.

    Parameters
    ----------
    rows, attends, through
        r, a and f of the recurrence.
    bubble
        How long attention waits for rows.
    slack
        How long the drive has nothing to read while the layer computes.
    """

    rows: float
    attends: float
    through: float
    bubble: float
    slack: float


@dataclass(frozen=True)
class Timetable:
    """A pass, layer by layer.

    Parameters
    ----------
    layers
        In order.
    """

    layers: tuple[LayerTimes, ...]

    @classmethod
    def of(cls, work: Sequence[LayerWork], buffers: int, margin: float = 0.0) -> Timetable:
        """Return when each layer does what.

        Parameters
        ----------
        work
            Of each layer.
        buffers
            D: layers whose rows may lie in memory before the layer that computes is through with
            its own; 0 reads them when attention wants them.
        margin
            ε: seconds of a window that are not counted on.
        """
        found: list[LayerTimes] = []
        for layer, own in enumerate(work):
            before = found[-1] if found else LayerTimes(0, 0, 0, 0, 0)
            wanted = before.through + own.pre
            if buffers:
                room = found[layer - buffers].through if layer >= buffers else 0.0
            else:
                room = wanted
            rows = max(before.rows, room) + own.read
            attends = max(wanted, rows)
            slack = max(0.0, own.compute - own.read - margin)
            found.append(
                LayerTimes(rows, attends, attends + own.attend + own.post, attends - wanted, slack)
            )
        return cls(tuple(found))

    @property
    def seconds(self) -> float:
        """When the pass is through."""
        return self.layers[-1].through if self.layers else 0.0

    @property
    def bubble_seconds(self) -> float:
        """How long attention waits in all."""
        return sum(one.bubble for one in self.layers)

    def write_bytes(self, layer: int, rate: float, mixing_loss: float, quantum: int) -> int:
        """Return how many bytes can be written in a layer's slack, in whole quanta.

        None before the last read where reading limits the pass: Tutti's second rule follows from a
        slack of 0.

        Parameters
        ----------
        layer
            Which.
        rate
            Bytes per second of writing alone.
        mixing_loss
            μ, from 0 to 1.
        quantum
            Bytes of a write.
        """
        return int(rate * self.layers[layer].slack * (1 - mixing_loss) / quantum) * quantum


# --- What is said of it ---

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
