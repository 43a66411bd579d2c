# SPDX-License-Identifier: Apache-2.0
"""Times of systems that decode in turns, each at the setting that has the wanted KL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Any

from hillinfer.errors import HillInferError
from hillinfer.projections.step_products import StepProducts
from hillinfer_bench.decode.measuring import Bed, blank_row, measure_case
from hillinfer_bench.decode.rates import RateSource
from hillinfer_bench.decode.run import attached
from hillinfer_bench.frontier.curve import Crossing
from hillinfer_bench.frontier.swept import (
    CODED,
    FOUR_BIT,
    HILLINFER,
    default_alpha,
)
from hillinfer_bench.report.rows import BenchRow
from hillinfer_bench.systems.case import MODELLED, REAL, BenchSetting, Selections
from hillinfer_bench.systems.hillinfer_system import HillInferSystem
from hillinfer_bench.systems.system import BenchError, Needs, OpenSystem, System
from hillinfer_bench.systems.table import CODED_IN_MEMORY, FLOOR, make_system

TODAY, IN_MEMORY = "hillinfer-today", CODED_IN_MEMORY
TODAY_ALPHA = 0.1
FULL = ("full-drive", "full-memory")
RIVALS = ("h2o-all-keys", "infinigen", "leoam", "quest", "h2o-drop")
# A cache of few bits with the product's own kernels: every token is coded or exact.
ALL_CODED = "hillinfer-all-coded-in-memory"
DRIVE, MEMORY = "drive", "memory"
_IN_MEMORY = "in memory"
# Rivals of a part on the drive: files and buffers of all of them would not fit there at once.
_TOGETHER = 2
_FEW_BITS = {4: "four-bit", 5: "five-bit"}
# At a quality of its own, which nobody chose.
FOUR_BIT_IN_MEMORY = f"{_FEW_BITS[4]}-{MEMORY}"

Select = Callable[[str, float], Selections | None]


def few_bits(bits: float, place: str) -> str | None:
    """Return the system that has codes of so many bits; None where there is none.

    Parameters
    ----------
    bits
        Of a code.
    place
        `drive` or `memory`.
    """
    name = _FEW_BITS.get(int(bits))
    return name and f"{name}-{place}"


class AtSetting(System):
    """A system with an importance rate of its own in a case of several.

    Parameters
    ----------
    name
        In this comparison.
    system
        What it is.
    alpha
        Its importance rate.
    select
        Returns what a system of a name is made to select at a rate; None where it chooses.
    words
        Which setting of the real model it stands for, `{told}` for what `measure_times` is told.
    """

    def __init__(
        self, name: str, system: System, alpha: float, select: Select, words: str = ""
    ) -> None:
        super().__init__(name)
        self.alpha = alpha
        self.words = words or f"α {alpha:.3g}: {{told}}"
        self._system = system
        self._select = select

    @property
    def bounded(self) -> bool:
        """As the system's own; see `System`."""
        return self._system.bounded

    @property
    def holds_all(self) -> bool:
        """As the system's own; see `System`."""
        return self._system.holds_all

    def needs(self, setting: BenchSetting) -> Needs:
        """As the system's own; see `System`."""
        return self._system.needs(setting)

    def open(self, setting: BenchSetting) -> OpenSystem:
        """Return the system at its own rate; see `System`."""
        case = replace(setting.case, alpha=self.alpha)
        selections = self._select(self.name, self.alpha)
        return self._system.open(replace(setting, case=case, selections=selections))


class _Unreached(System):
    """A system that no setting brings to the wanted KL: it is not timed, and its row says so."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name)
        self._why = why

    def needs(self, setting: BenchSetting) -> Needs:
        """Return nothing; see `System`."""
        return Needs(0, 0)

    def open(self, setting: BenchSetting) -> OpenSystem:
        """Refuse; see `System`."""
        raise BenchError(self._why)


def _chooses(system: str, alpha: float) -> None:
    """Return nothing: a system chooses by itself, or attends to everything."""


def timed_systems(
    crossings: Mapping[str, Crossing], select: Select, *beside: str
) -> dict[str, System]:
    """Return every timed system at its setting, by the name that rows have.

    Parameters
    ----------
    crossings
        Where each swept system has the wanted KL.
    select
        As in `AtSetting`.
    beside
        Of `WHATEVER_KL`, what is timed at another KL.
    """
    plain = {"exact": 1.0}
    own = crossings.get(CODED, Crossing(0.0, default_alpha(), None))

    def at(name: str, system: System, crossing: Crossing) -> System:
        if crossing.value is None:
            return _Unreached(name, crossing.why)
        return AtSetting(name, system, crossing.value, select)

    made: dict[str, System] = {CODED: at(CODED, make_system(CODED), own)}
    # Which tokens it are takes no other time where all of them lie in memory.
    made[IN_MEMORY] = (
        _Unreached(IN_MEMORY, own.why)
        if own.value is None
        else AtSetting(
            IN_MEMORY,
            make_system(IN_MEMORY),
            own.value,
            _chooses,
            f"α {own.value:.3g}, chosen by itself with the true query",
        )
    )
    others = {
        TODAY: AtSetting(
            TODAY,
            HillInferSystem(TODAY, plain),
            TODAY_ALPHA,
            select,
            f"α {TODAY_ALPHA:g}, all exact, whatever its KL",
        ),
        ALL_CODED: AtSetting(
            ALL_CODED,
            make_system(IN_MEMORY),
            1.0,
            _chooses,
            "α 1, every token coded or exact, whatever its KL",
        ),
        FOUR_BIT_IN_MEMORY: _of_few_bits(FOUR_BIT_IN_MEMORY, "4 bits, whatever its KL"),
    }
    made |= {name: others[name] for name in beside}
    for name in FULL:
        made[name] = AtSetting(name, make_system(name), 1.0, _chooses, "the full cache")
    inner = {HILLINFER: HillInferSystem(HILLINFER, plain)} | {
        name: make_system(name) for name in RIVALS
    }
    made |= {
        name: at(name, system, crossings[name])
        for name, system in inner.items()
        if name in crossings
    }
    return made | _few_bits_at(crossings.get(FOUR_BIT))


# Timed beside those of HillInfer's own KL.
WHATEVER_KL = (TODAY, ALL_CODED, FOUR_BIT_IN_MEMORY)


def _of_few_bits(name: str, words: str) -> System:
    return AtSetting(name, make_system(name), 1.0, _chooses, words)


def _few_bits_at(crossing: Crossing | None) -> dict[str, System]:
    """Return a cache of the bits of a KL, in both places."""
    if crossing is None:
        return {}
    if crossing.value is None:
        return {FOUR_BIT: _Unreached(FOUR_BIT, crossing.why)}
    names = [few_bits(crossing.value, place) for place in (DRIVE, MEMORY)]
    why = f"no cache of {crossing.value:g} bits can be timed: {min(_FEW_BITS)} and {max(_FEW_BITS)}"
    words = f"{crossing.value:g} bits: {{told}}"
    return {
        name or FOUR_BIT: _of_few_bits(name, words) if name else _Unreached(FOUR_BIT, why)
        for name in names
    }


def parts_of(systems: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the parts of a comparison that have turns of their own, and the systems of each.

    Not all have room beside each other: rivals on the drive take turns with HillInfer two at a
    time. What lies in memory is compared with the like. What goals are about stands beside
    HillInfer.
    """
    goals = (IN_MEMORY, FOUR_BIT_IN_MEMORY, FULL[1])
    first = (CODED, TODAY, HILLINFER, FULL[0])
    parts: dict[str, tuple[str, ...]] = {}
    rivals: list[str] = []
    for name in systems:
        if name in first:
            part = ""
        elif not name.endswith(f"-{MEMORY}"):
            rivals.append(name)
            continue
        else:
            part = _IN_MEMORY if name in goals else f"{_IN_MEMORY}, coded"
        parts[part] = (*parts.get(part, ()), name)
    on_drive = {"": parts.pop("")} if "" in parts else {}
    for number in range(0, len(rivals), _TOGETHER):
        own = rivals[number : number + _TOGETHER]
        on_drive[f"beside {' and '.join(own)}"] = (CODED, *own)
    return on_drive | parts


def lies_in_memory(part: str) -> bool:
    """Say whether systems of a part have everything in memory."""
    return part.startswith(_IN_MEMORY)


@dataclass(frozen=True)
class TimedRow:
    """A row of the decode benchmark, and which setting of the real model it stands for.

    Parameters
    ----------
    row
        What was measured.
    stands_for
        In words.
    """

    row: BenchRow
    stands_for: str

    def as_record(self) -> dict[str, Any]:
        """Return what the report says of it."""
        left_out = {"step_ms"}
        own = {
            one.name: getattr(self.row, one.name)
            for one in fields(self.row)
            if one.name not in left_out
        }
        label = self.row.selection if self.row.selection == MODELLED else "measured"
        return {
            "label": label,
            "stands_for": self.stands_for,
            **own,
            "flags": list(self.row.flags),
        }


def measure_times(
    bed: Bed,
    systems: Mapping[str, System],
    rates: RateSource,
    stage: Callable[[str, int], AbstractContextManager[Callable[[int], None]]],
    told: str,
) -> list[TimedRow]:
    """Let systems decode in turns and return a row for each, the loop's floor among them.

    All have the product's own linear layers: what differs is what each does with the KV.

    Parameters
    ----------
    bed
        Model, context and settings; its case names the systems.
    systems
        By the names of the case.
    rates
        For the limits.
    stage
        Shows progress.
    told
        What rows of selecting systems stand for, in words, their α left open.
    """
    case, model = bed.setting.case, bed.setting.model
    total = (len(case.systems) + 1) * case.all_steps

    def make(name: str) -> System:
        return systems[name] if name in systems else make_system(name)

    try:
        with attached(model), StepProducts(model), stage(case.model, total) as advance:
            rows = measure_case(bed, rates, advance, make=make)
    except HillInferError as error:
        dtype = str(model.dtype).removeprefix("torch.")
        blank = [
            blank_row(case, name, dtype, bed.setting.shape.layers, bed.all_layers)
            for name in case.systems
        ]
        rows = [replace(row, skipped=str(error)) for row in blank]
    kind = MODELLED if bed.next_ids is None else REAL
    rows = [
        replace(row, selection=REAL if row.system in (IN_MEMORY, ALL_CODED) else kind)
        for row in rows
    ]
    return [_timed(row, systems.get(row.system), told) for row in rows]


def _timed(row: BenchRow, system: System | None, told: str) -> TimedRow:
    if not isinstance(system, AtSetting):
        return TimedRow(row, "the model alone" if row.system == FLOOR else told)
    return TimedRow(replace(row, alpha=system.alpha), system.words.replace("{told}", told))


@dataclass(frozen=True)
class Allowed:
    """How many times as fast as another a system is where both are as fast as their limits.

    Parameters
    ----------
    by_rates
        By bytes and rates alone.
    with_loop
        By `BenchRow.limit_over`, the loop of each row's own turns included.
    by_middle
        By the middle rates between the turns, which are no bound; None where they are not known.
    """

    by_rates: float
    with_loop: float
    by_middle: float | None = None

    @classmethod
    def of(cls, rows: Sequence[TimedRow], slower: BenchRow, faster: BenchRow) -> Allowed | None:
        """Return it of two rows of a model; None where one has no limit.

        Parameters
        ----------
        rows
            All of the model, the loop's floors among them where they were measured.
        slower, faster
            Two of them.
        """
        theirs, own = (row.limit_over(floor_of(rows, row)) for row in (slower, faster))
        if not slower.limit_ms or not faster.limit_ms or not theirs or not own:
            return None
        middle = None
        if slower.middle_limit_ms and faster.middle_limit_ms:
            middle = slower.middle_limit_ms / faster.middle_limit_ms
        return cls(slower.limit_ms / faster.limit_ms, theirs / own, middle)


def floor_of(rows: Sequence[TimedRow], row: BenchRow) -> BenchRow | None:
    """Return the loop alone of a row's own turns: what lies in memory takes turns of its own."""
    own = (one.row for one in rows if one.row.system == FLOOR and one.row.part == row.part)
    return next(own, None)


def first_rows(rows: Sequence[TimedRow]) -> dict[str, BenchRow]:
    """Return a row of each system, by name: the first, where it took turns in several parts."""
    found: dict[str, BenchRow] = {}
    for one in rows:
        found.setdefault(one.row.system, one.row)
    return found


def own_beside(rows: Sequence[TimedRow], row: BenchRow) -> BenchRow | None:
    """Return HillInfer's row of the same turns as another system's; else its first one."""
    own = (one.row for one in rows if one.row.system == CODED and one.row.part == row.part)
    return next(own, None) or first_rows(rows).get(CODED)
