# SPDX-License-Identifier: Apache-2.0
"""Faults in where forms of documents are placed."""

from __future__ import annotations

from mutants.mutant import Mutant

_ROOM = "host/hillinfer/placement"
_TESTS = "tests/host/placement"

PLACEMENT = (
    Mutant(
        "hull-of-all-points",
        "A hull keeps points below the line between others.",
        f"{_ROOM}/steps.py",
        "while hull and _slope(_before(hull, base), hull[-1]) <= _slope(hull[-1], point):",
        "while False:",
        (f"{_TESTS}/test_steps.py",),
    ),
    Mutant(
        "steps-without-weights",
        "Steps are merged by gain per byte whoever is asked for.",
        f"{_ROOM}/steps.py",
        "self.weight * (upper.value - lower.value)",
        "(upper.value - lower.value)",
        (f"{_TESTS}/test_steps.py",),
    ),
    Mutant(
        "no-hysteresis",
        "Two documents of about equal use take turns.",
        f"{_ROOM}/steps.py",
        "loss *= 1 + self.hysteresis if level < member.settled else 1",
        "loss *= 1",
        (f"{_TESTS}/test_steps.py", f"{_TESTS}/test_placing.py"),
    ),
    Mutant(
        "filler-not-counted",
        "An option beside the hull takes no bytes of the budget.",
        f"{_ROOM}/steps.py",
        "                self.used += point.byte_count - at.byte_count\n",
        "",
        (f"{_TESTS}/test_placing.py",),
    ),
    Mutant(
        "growth-first",
        "Changes that take more come before those that give back.",
        f"{_ROOM}/stock.py",
        "key=lambda name: self._growth(name, waiting[name])",
        "key=lambda name: -self._growth(name, waiting[name])",
        (f"{_TESTS}/test_stock.py",),
    ),
    Mutant(
        "plans-are-not-checked",
        "A plan that passes a budget is begun.",
        f"{_ROOM}/stock.py",
        "        self._check(plan)\n",
        "",
        (f"{_TESTS}/test_stock.py",),
    ),
    Mutant(
        "papers-drop-per-byte",
        "The paper's greedy chooses by the drop per byte.",
        f"{_ROOM}/policies.py",
        "        return drop\n",
        "        return drop / saved\n",
        (f"{_TESTS}/test_placement_policies.py",),
    ),
    Mutant(
        "pins-are-not-counted",
        "Pinned documents take nothing of what others share.",
        f"{_ROOM}/stock.py",
        "self._pinned[option.tier] += sign * option.byte_count",
        "self._pinned[option.tier] += 0",
        (f"{_TESTS}/test_placing.py",),
    ),
    Mutant(
        "weights-never-begin-anew",
        "Weights of faded uses grow without end.",
        f"{_ROOM}/placing.py",
        "if since > self._uses.longest:",
        "if False:",
        (f"{_TESTS}/test_placement_policies.py",),
    ),
)
