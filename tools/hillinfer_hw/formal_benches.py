# SPDX-License-Identifier: Apache-2.0
"""The formal benches of the FIFOs and AXI engines."""

from __future__ import annotations

from hillinfer_hw.formal_bench import FormalBench
from hillinfer_hw.formal_mutants import (
    FIFO_MUTANTS,
    QUEUE_MUTANTS,
    READ_ADDRESS_MUTANTS,
    READ_DATA_MUTANTS,
    READ_INSIDE_MUTANTS,
    WRITE_ADDRESS_MUTANTS,
    WRITE_FULL_MUTANTS,
    WRITE_INSIDE_MUTANTS,
    WRITE_MUTANTS,
)

_FOUR = {"WIDTH": 4, "DEPTH": 4}
_BYTES = {"DATA": 8, "ADDRESS": 64, "SHIFT": 6}
_FIFO_PROPERTIES = "fifo_inside.sv"
BENCHES_TABLE = (
    FormalBench("fifo", "fifo", _FOUR, 13, FIFO_MUTANTS, _FIFO_PROPERTIES, 2),
    FormalBench("queue", "queue", _FOUR, 12, QUEUE_MUTANTS, _FIFO_PROPERTIES, 2),
    # The key port's.
    FormalBench(
        "fifo at full size", "fifo", {"WIDTH": 4, "DEPTH": 512}, 6, {}, _FIFO_PROPERTIES, 2
    ),
    FormalBench(
        "axi_read, inside",
        "axi_read",
        _BYTES | {"BURST": 2, "OUTSTANDING": 2, "DEPTH": 4},
        12,
        READ_INSIDE_MUTANTS,
        "axi_read_inside.sv",
        2,
    ),
    FormalBench(
        "axi_read, inside, at full size",
        "axi_read",
        _BYTES | {"BURST": 64, "OUTSTANDING": 16, "DEPTH": 512},
        8,
        {},
        "axi_read_inside.sv",
        2,
    ),
    FormalBench(
        "axi_read, addresses at full size",
        "axi_read_formal",
        {"BURST": 64, "OUTSTANDING": 16, "DEPTH": 512, "PAGE": 4096, "ORDER": 0},
        12,
        READ_ADDRESS_MUTANTS,
    ),
    FormalBench(
        "axi_read, data",
        "axi_read_formal",
        {"BURST": 2, "DEPTH": 4, "PAGE": 128},
        12,
        READ_DATA_MUTANTS,
    ),
    FormalBench("axi_write", "axi_write_formal", {"BURST": 2, "DEPTH": 4}, 12, WRITE_MUTANTS),
    FormalBench(
        "axi_write, bursts of 4",
        "axi_write_formal",
        {"BURST": 4, "DEPTH": 8},
        12,
        WRITE_ADDRESS_MUTANTS,
    ),
    FormalBench(
        "axi_write, inside",
        "axi_write",
        _BYTES | {"BURST": 2, "OUTSTANDING": 2, "DEPTH": 4, "CLOSED": 2, "TAG": 3},
        12,
        WRITE_INSIDE_MUTANTS,
        "axi_write_inside.sv",
        2,
    ),
    # Scores leave in bursts of 4 beats, shadows in bursts of 64; the sizes are the engine's own.
    *(
        FormalBench(
            f"axi_write, inside, {name} at full size",
            "axi_write",
            _BYTES | {"BURST": burst, "OUTSTANDING": 16, "DEPTH": 128, "CLOSED": 32, "TAG": 3},
            8,
            WRITE_FULL_MUTANTS,
            "axi_write_inside.sv",
            2,
        )
        for name, burst in (("scores", 4), ("shadows", 64))
    ),
)
