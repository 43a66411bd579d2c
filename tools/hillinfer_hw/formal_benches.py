# SPDX-License-Identifier: Apache-2.0
"""The formal benches, and for each property a mutant of its own that it must catch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mutant:
    """One line of one source changed, and the property that is meant to see it.

    Parameters
    ----------
    file, old, new
        What is replaced, once.
    caught_by
        Label of the only assertion that is left in when the mutant is checked.
    """

    file: str
    old: str
    new: str
    caught_by: str


@dataclass(frozen=True)
class FormalBench:
    """A proof over every input sequence: bounded, by induction, or both.

    Parameters
    ----------
    name, top
        Of the row; of the bench module.
    parameters
        Of the bench module.
    depth
        Cycles from reset of the bounded proof.
    mutants
        By name.
    induction
        Steps of the induction; 0 where the proof is only bounded.
    """

    name: str
    top: str
    parameters: Mapping[str, int]
    depth: int
    mutants: Mapping[str, Mutant] = field(default_factory=dict)
    induction: int = 0


FIFO = "fifo.sv"
QUEUE = "queue.sv"
READ = "axi_read.sv"
WRITE = "axi_write.sv"

_FIFO_MUTANTS = {
    "takes more than it holds": Mutant(
        FIFO, "FULL = DEPTH;", "FULL = DEPTH + 1;", "never_overflows"
    ),
    "two places never used": Mutant(
        FIFO, "FULL = DEPTH;", "FULL = DEPTH - 2;", "takes_while_there_is_room"
    ),
    "overwrites a word that waits": Mutant(
        FIFO, "(held != 0) && (!out_valid || out_ready)", "(held != 0)", "valid_stays"
    ),
    "reads where it writes": Mutant(
        FIFO, "<= memory[taken[BITS-1:0]];", "<= memory[written[BITS-1:0]];", "no_word_changed"
    ),
    "gives a word twice": Mutant(
        FIFO,
        "if (take) taken <= taken + 1'b1;",
        "if (take && in_valid) taken <= taken + 1'b1;",
        "nothing_comes_from_nowhere",
    ),
}
_QUEUE_MUTANTS = {
    "takes more than it holds": Mutant(
        QUEUE, "FULL = DEPTH;", "FULL = DEPTH + 1;", "never_overflows"
    ),
    "one place never used": Mutant(
        QUEUE, "FULL = DEPTH;", "FULL = DEPTH - 1;", "takes_while_there_is_room"
    ),
    "withdraws a word": Mutant(
        QUEUE, "assign out_valid = held != 0;", "assign out_valid = held > in_valid;", "valid_stays"
    ),
    "reads where it writes": Mutant(
        QUEUE, "= memory[taken[BITS-1:0]];", "= memory[written[BITS-1:0]];", "no_word_changed"
    ),
    "takes from an empty queue": Mutant(
        QUEUE,
        "if (out_valid && out_ready) taken <= taken + 1'b1;",
        "if (out_ready) taken <= taken + 1'b1;",
        "nothing_comes_from_nowhere",
    ),
}
_READ_ADDRESS_MUTANTS = {
    "address withdrawn": Mutant(
        READ, "if (arready) arvalid <= 1'b0;", "arvalid <= 1'b0;", "ar_stays"
    ),
    "address changes while it waits": Mutant(READ, "&& (!arvalid || arready)", "", "ar_stays"),
    "crosses 4 KiB": Mutant(
        READ, "BURST[STEP:0] - {1'b0, beat[STEP-1:0]}", "BURST[STEP:0]", "no_page_crossed"
    ),
    "a beat too many": Mutant(READ, "length} - 8'd1;", "length};", "no_long_burst"),
    "starts a burst after stop": Mutant(
        READ, "active && !stop &&", "active &&", "no_burst_after_stop"
    ),
    "idle while bursts are open": Mutant(
        READ,
        "assign idle = !arvalid && (bursts == 0);",
        "assign idle = !arvalid && !active;",
        "idle_is_idle",
    ),
    "refuses a beat": Mutant(
        READ, "assign rready = 1'b1;", "assign rready = !stop;", "always_ready"
    ),
}
_READ_DATA_MUTANTS = {
    "asks for more than fits": Mutant(
        READ, "<= DEPTH[ROOM+1:0])", "<= DEPTH[ROOM+1:0] + BURST)", "fifo_never_overflows"
    ),
    "forgets the stride": Mutant(
        READ, "beat <= row + stride;", "beat <= beat + length;", "no_beat_lost_or_out_of_order"
    ),
    "too many bursts": Mutant(READ, "&& (bursts != OUTSTANDING[COUNT:0])", "", "not_too_many_open"),
    "a beat twice": Mutant(
        FIFO,
        "if (take) taken <= taken + 1'b1;",
        "if (take && in_valid) taken <= taken + 1'b1;",
        "no_beat_from_nowhere",
    ),
}
# What holds at any size is refuted at any size: these run with the sizes of the kernels, too.
_WRITE_ADDRESS_MUTANTS = {
    "address changes while it waits": Mutant(
        WRITE, "(!awvalid || awready) && (!sending", "(!sending", "aw_stays"
    ),
    "page border forgotten": Mutant(
        WRITE, "in_flush || (&in_beat[STEP-1:0])", "in_flush", "no_page_crossed"
    ),
    "every other page border": Mutant(
        WRITE, "(&in_beat[STEP-1:0])", "(&in_beat[STEP:0])", "no_page_crossed"
    ),
    "joins what does not follow": Mutant(
        WRITE, "open && (in_beat == follows)", "open", "beat_at_its_address"
    ),
}
_WRITE_MUTANTS = _WRITE_ADDRESS_MUTANTS | {
    "a beat too many": Mutant(
        WRITE,
        "burst_length};\n            left",
        "burst_length} + 8'd1;\n            left",
        "no_long_burst",
    ),
    "data changes while it waits": Mutant(
        FIFO, "(held != 0) && (!out_valid || out_ready)", "(held != 0)", "w_stays"
    ),
    "a beat lost": Mutant(
        FIFO,
        "if (take) taken <= taken + 1'b1;",
        "if (take) taken <= taken + 1'b1 + (in_valid && held == 3);",
        "no_beat_lost_or_out_of_order",
    ),
    "every beat is the last": Mutant(
        WRITE, "left <= burst_length;", "left <= {STEP{1'b0}};", "wlast_ends_the_burst"
    ),
    "joins behind a marked beat": Mutant(
        WRITE,
        "in_flush || (&in_beat[STEP-1:0])",
        "(&in_beat[STEP-1:0])",
        "marked_beat_ends_its_burst",
    ),
    "mark forgotten": Mutant(WRITE, "in_flush, in_tag}", "1'b0, in_tag}", "response_has_its_tag"),
    "too many bursts": Mutant(
        WRITE, "&& (bursts != OUTSTANDING[COUNT:0])", "", "not_too_many_open"
    ),
    "refuses a response": Mutant(
        WRITE, "assign bready = 1'b1;", "assign bready = !awvalid;", "always_ready"
    ),
    "says too early that all is answered": Mutant(
        WRITE, "assign busy = open || (total != 0);", "assign busy = open;", "all_answered"
    ),
}
BENCHES_TABLE = (
    FormalBench("fifo", "fifo_formal", {"DEPTH": 4, "SHORT": 0}, 13, _FIFO_MUTANTS),
    FormalBench("queue", "fifo_formal", {"DEPTH": 4, "SHORT": 1}, 12, _QUEUE_MUTANTS),
    FormalBench(
        "axi_read, addresses at full size",
        "axi_read_formal",
        {"BURST": 64, "OUTSTANDING": 16, "DEPTH": 512, "PAGE": 4096, "ORDER": 0},
        12,
        _READ_ADDRESS_MUTANTS,
    ),
    FormalBench(
        "axi_read, data",
        "axi_read_formal",
        {"BURST": 2, "DEPTH": 4, "PAGE": 128},
        12,
        _READ_DATA_MUTANTS,
    ),
    FormalBench("axi_write", "axi_write_formal", {"BURST": 2, "DEPTH": 4}, 12, _WRITE_MUTANTS),
    # Scores leave in bursts of 4 beats, shadows in bursts of 64; the sizes are the engine's own.
    FormalBench(
        "axi_write, bursts of scores at full size",
        "axi_write_formal",
        {"BURST": 4, "OUTSTANDING": 16, "DEPTH": 128, "CLOSED": 32},
        12,
        _WRITE_ADDRESS_MUTANTS,
    ),
    FormalBench(
        "axi_write, bursts of shadows at full size",
        "axi_write_formal",
        {"BURST": 64, "OUTSTANDING": 16, "DEPTH": 128, "CLOSED": 32},
        10,
        _WRITE_ADDRESS_MUTANTS,
    ),
)
