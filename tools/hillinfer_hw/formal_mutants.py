# SPDX-License-Identifier: Apache-2.0
"""Mutants of the RTL, each with the one property that must fail of it."""

from __future__ import annotations

from dataclasses import replace

from hillinfer_hw.formal_bench import Mutant

FIFO = "fifo.sv"
QUEUE = "queue.sv"
READ = "axi_read.sv"
WRITE = "axi_write.sv"

FIFO_MUTANTS = {
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
    "counts one too many": Mutant(FIFO, "FULL = DEPTH;", "FULL = DEPTH + 1;", "invariant_count"),
    "counts a word twice": Mutant(
        FIFO,
        "if (take) taken <= taken + 1'b1;",
        "if (take && in_valid) taken <= taken + 1'b1;",
        "invariant_numbers",
    ),
    "reads the place that is written": Mutant(
        FIFO, "<= memory[taken[BITS-1:0]];", "<= memory[written[BITS-1:0]];", "invariant_place"
    ),
}
QUEUE_MUTANTS = {
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
    "counts one too many": Mutant(QUEUE, "FULL = DEPTH;", "FULL = DEPTH + 1;", "invariant_count"),
    "counts what was not there": Mutant(
        QUEUE,
        "if (out_valid && out_ready) taken <= taken + 1'b1;",
        "if (out_ready) taken <= taken + 1'b1;",
        "invariant_numbers",
    ),
    "writes where it reads": Mutant(
        QUEUE,
        "memory[written[BITS-1:0]] <= in_data;",
        "memory[taken[BITS-1:0]] <= in_data;",
        "invariant_place",
    ),
}
READ_ADDRESS_MUTANTS = {
    "address withdrawn": Mutant(
        READ, "if (arready) arvalid <= 1'b0;", "arvalid <= 1'b0;", "ar_stays"
    ),
    "address changes while it waits": Mutant(READ, "&& (!arvalid || arready)", "", "ar_stays"),
    "crosses 4 KiB": Mutant(
        READ, "BURST[STEP:0] - {1'b0, offset}", "BURST[STEP:0]", "no_page_crossed"
    ),
    "a beat too many": Mutant(READ, "length} - 8'd1;", "length};", "no_long_burst"),
    "starts a burst after stop": Mutant(
        READ, "active && !fresh && !stop &&", "active && !fresh &&", "no_burst_after_stop"
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
READ_INSIDE_MUTANTS = {
    "address withdrawn": Mutant(
        READ, "if (arready) arvalid <= 1'b0;", "arvalid <= 1'b0;", "ar_stays"
    ),
    "crosses 4 KiB": Mutant(
        READ, "BURST[STEP:0] - {1'b0, offset}", "BURST[STEP:0]", "no_page_crossed"
    ),
    "a beat too many": Mutant(READ, "length} - 8'd1;", "length};", "no_long_burst"),
    "goes on after stop": Mutant(
        READ, "active && !fresh && !stop &&", "active && !fresh &&", "no_burst_after_stop"
    ),
    "idle while bursts are open": Mutant(
        READ,
        "assign idle = !arvalid && (bursts == 0);",
        "assign idle = !arvalid && !active;",
        "idle_is_idle",
    ),
    "room of beats that come is not kept": Mutant(
        READ,
        "free <= free + {{ROOM{1'b0}}, pop}",
        "free <= free + closes",
        "room_for_every_beat",
    ),
    "refuses a beat": Mutant(
        READ, "assign rready = 1'b1;", "assign rready = !stop;", "always_ready"
    ),
    "limit forgotten": Mutant(READ, "&& (bursts != OUTSTANDING[COUNT:0])", "", "not_too_many_open"),
    "bursts counted when taken": Mutant(
        READ,
        "bursts <= bursts + {{COUNT{1'b0}}, issue}",
        "bursts <= bursts + (arvalid && arready)",
        "invariant_bursts",
    ),
    "rows end late": Mutant(
        READ,
        "issue && row_ends && rows == 17'd1",
        "issue && row_ends && rows == 17'd0",
        "invariant_left",
    ),
    "a first burst as long as any": Mutant(
        READ, "whole[STEP:0] : to_boundary;", "whole[STEP:0] : BURST[STEP:0];", "invariant_length"
    ),
    "a last burst that is whole goes on": Mutant(
        READ, "row_ends <= (rest <= BURST);", "row_ends <= (rest < BURST);", "invariant_rest"
    ),
    "room given back too early": Mutant(
        READ,
        "free <= free + {{ROOM{1'b0}}, pop}",
        "free <= free + closes",
        "invariant_room",
    ),
}
READ_DATA_MUTANTS = {
    "asks for more than fits": Mutant(
        READ, "length} <= free);", "length} <= free + BURST);", "fifo_never_overflows"
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
WRITE_ADDRESS_MUTANTS = {
    "address changes while it waits": Mutant(
        WRITE, "(!awvalid || awready) && (!sending", "(!sending", "aw_stays"
    ),
    "page border forgotten": Mutant(
        WRITE, "in_flush || (&in_beat[STEP-1:0])", "in_flush", "no_page_crossed"
    ),
    "every other page border": Mutant(
        WRITE, "(&in_beat[STEP-1:0])", "(&in_beat[STEP:0])", "no_page_crossed"
    ),
}
# The same, where the queue of closed bursts is assumed to give what was put in.
WRITE_BORDER_MUTANTS = {
    "address changes while it waits": WRITE_ADDRESS_MUTANTS["address changes while it waits"],
    **{
        name: replace(WRITE_ADDRESS_MUTANTS[name], caught_by="closed_bursts_fit")
        for name in ("page border forgotten", "every other page border")
    },
    "starts a beat late": Mutant(
        WRITE, "awaddr <= {burst_start,", "awaddr <= {burst_start + 1'b1,", "no_page_crossed"
    ),
}
# An open burst of two beats needs more than two in a page.
WRITE_FULL_MUTANTS = WRITE_BORDER_MUTANTS | {
    "a long burst told as a single beat": Mutant(
        WRITE, "single <= !joins;", "single <= 1'b1;", "invariant_single"
    ),
}
WRITE_INSIDE_MUTANTS = WRITE_BORDER_MUTANTS | {
    "a beat too many": Mutant(
        WRITE,
        "burst_length};\n            left",
        "burst_length} + 8'd1;\n            left",
        "no_long_burst",
    ),
    "data without its burst": Mutant(
        WRITE, "if (wvalid && wready && wlast) sending", "if (wlast) sending", "w_stays"
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
    "too many bursts": Mutant(
        WRITE, "&& (bursts != OUTSTANDING[COUNT:0])", "", "not_too_many_open"
    ),
    "refuses a response": Mutant(
        WRITE, "assign bready = 1'b1;", "assign bready = !awvalid;", "always_ready"
    ),
    "says too early that all is answered": Mutant(
        WRITE, "held || open || (total != 0);", "held || open;", "all_answered"
    ),
    "a burst not counted": Mutant(
        WRITE,
        "total <= total + {{(TOTAL - 1){1'b0}}, push}",
        "total <= total + (push && !at_once)",
        "invariant_total",
    ),
    "bursts counted when taken": Mutant(
        WRITE,
        "if (sends != done_valid)",
        "if ((awvalid && awready) != done_valid)",
        "invariant_bursts",
    ),
    "ends with its first beat": Mutant(
        WRITE,
        "if (wvalid && wready && wlast) sending",
        "if (wvalid && wready) sending",
        "invariant_finished",
    ),
    "beats counted while they wait": Mutant(
        WRITE,
        "end else if (wvalid && wready) begin",
        "end else if (wvalid) begin",
        "invariant_left",
    ),
    "the last beat told a beat late": Mutant(
        WRITE, "wlast <= left == 1;", "wlast <= left == 0;", "invariant_wlast"
    ),
    "follows itself": Mutant(
        WRITE, "beat[STEP-1:0] + 1'b1}", "beat[STEP-1:0]}", "invariant_follows"
    ),
    "a mark does not end": Mutant(
        WRITE,
        "in_flush || (&in_beat[STEP-1:0])",
        "(&in_beat[STEP-1:0])",
        "invariant_not_ended",
    ),
    "a burst longer than a page": Mutant(
        WRITE, "(&in_beat[STEP-1:0])", "(&in_beat[STEP:0])", "invariant_open"
    ),
    "a page does not end": Mutant(
        WRITE, "in_flush || (&in_beat[STEP-1:0])", "in_flush", "invariant_last"
    ),
    "closes nothing": Mutant(WRITE, "beat_last && !at_once;", "beat_last;", "invariant_closing"),
    "takes words without room": Mutant(
        WRITE, "word_room <= free_words > 1;", "word_room <= 1'b1;", "room_for_every_word"
    ),
    "room of a burst told too late": Mutant(
        WRITE,
        "burst_room <= free_bursts > 1;",
        "burst_room <= free_bursts > 0;",
        "room_for_every_burst",
    ),
    "a word that leaves gives no room": Mutant(
        WRITE, "if (take != word_leaves)", "if (take || word_leaves)", "invariant_words"
    ),
    "a burst that leaves gives no room": Mutant(
        WRITE,
        "if (burst_waits != burst_leaves)",
        "if (burst_waits || burst_leaves)",
        "invariant_waiting",
    ),
}
WRITE_MUTANTS = WRITE_ADDRESS_MUTANTS | {
    "joins what does not follow": Mutant(
        WRITE, "open && !closing && follows", "open && !closing", "beat_at_its_address"
    ),
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
        "if (take) taken <= taken + 1'b1 + (in_valid && held == 2);",
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
    "mark forgotten": Mutant(
        WRITE, "{burst_marked, burst_tag}", "{1'b0, burst_tag}", "response_has_its_tag"
    ),
    "too many bursts": Mutant(
        WRITE, "&& (bursts != OUTSTANDING[COUNT:0])", "", "not_too_many_open"
    ),
    "refuses a response": Mutant(
        WRITE, "assign bready = 1'b1;", "assign bready = !awvalid;", "always_ready"
    ),
    "says too early that all is answered": Mutant(
        WRITE, "held || open || (total != 0);", "held || open;", "all_answered"
    ),
}
