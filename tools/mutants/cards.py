# SPDX-License-Identifier: Apache-2.0
"""Faults around the kernels: what a card is called, what it is worth, what the simulation sees."""

from __future__ import annotations

from mutants.mutant import Mutant

_SPECS = "tests/host/cli/test_specs.py"
_FIGURES = "sw_model/hillinfer_model/card_figures.py"
_LEVELS = "tests/hw/test_logic_levels.py"
_SKEW = "tests/hw/test_skew.py"

CARDS: tuple[Mutant, ...] = (
    Mutant(
        "shell-names-refused",
        "PYNQ takes a card only where it is called as the platform of the xclbin.",
        "plugins/hillinfer_pynq/hillinfer_pynq/front.py",
        "if self.device.name not in platforms:",
        "if self.device.name != platforms[0]:",
        ("tests/hw/test_pynq.py::test_a_card_that_names_its_shell_is_worked_with",),
    ),
    Mutant(
        "any-shell-accepted",
        "PYNQ takes a card with another version of the shell.",
        "plugins/hillinfer_pynq/hillinfer_pynq/front.py",
        "if self.device.name not in platforms:",
        "if self.device.name[:12] not in (name[:12] for name in platforms):",
        ("tests/hw/test_pynq.py::test_a_card_that_names_its_shell_is_worked_with",),
    ),
    Mutant(
        "a-citation-of-no-section",
        "A comment cites a section that the page does not have.",
        "hw/hls/split.h",
        "(scoring contract, section 9)",
        "(scoring contract, section 19)",
        ("tests/test_citations.py::test_every_citation_names_what_it_is_about",),
    ),
    Mutant(
        "polls-in-no-time",
        "The end of a launch is seen at once, however seldom the host looks.",
        _FIGURES,
        "beside = costs.start + copies + costs.poll / 2",
        "beside = costs.start + copies",
        (f"{_SPECS}::test_a_launch_costs_what_its_parts_do",),
    ),
    Mutant(
        "scores-of-one-head",
        "In scope kv_head the scores of one head come back.",
        _FIGURES,
        "sets = spec.kv_heads if scope is Scope.KV_HEAD else 1",
        "sets = 1",
        (f"{_SPECS}::test_a_kernel_takes_what_the_bytes_leave_of_the_bus",),
    ),
    Mutant(
        "levels-through-registers",
        "The longest path is counted through registers.",
        "tools/hillinfer_hw/logic_levels.py",
        "if not (lut or carry or read or _MUX.fullmatch(kind)):",
        'if not (lut or carry or read or _MUX.fullmatch(kind) or kind == "FDRE"):',
        (f"{_LEVELS}::test_what_has_a_clock_ends_a_path[FDRE]",),
    ),
    Mutant(
        "no-skew",
        "What a pipelined loop writes leaves in the round that writes it.",
        "hw/testbench/threads/pipelines.h",
        "const int64_t due = round + skew;",
        "const int64_t due = round + skew * 0;",
        (f"{_SKEW}::test_an_exponent_may_come_as_late_as_a_delay_can_be[int4]",),
    ),
    Mutant(
        "distances-not-watched",
        "Reads nearer than a DEPENDENCE pragma says are not told.",
        "hw/testbench/threads/pipelines.h",
        "if (rounds < DISTANCE) {",
        "if (rounds < 0 * DISTANCE) {",
        (f"{_SKEW}::test_a_distance_that_is_not_kept_is_told",),
    ),
)
