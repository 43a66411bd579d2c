# SPDX-License-Identifier: Apache-2.0
"""Every system at the same KL: its setting, its bytes and its time beside HillInfer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hillinfer_bench.frontier.curve import Crossing, Curve
from hillinfer_bench.frontier.modelled import Machine, Place, places
from hillinfer_bench.frontier.sweep import SweptRow
from hillinfer_bench.frontier.swept import CODED, FOUR_BIT, SWEPT, default_alpha
from hillinfer_bench.frontier.times import (
    DRIVE,
    FULL,
    RIVALS,
    Allowed,
    TimedRow,
    few_bits,
    first_rows,
    own_beside,
)

# Beside HillInfer's own.
TOLD_KLS = (0.010, 0.003)


@dataclass(frozen=True)
class EqualQuality:
    """All swept systems at one KL.

    Parameters
    ----------
    name
        What the KL is, in words.
    kl
        In nats.
    crossings
        By system.
    """

    name: str
    kl: float
    crossings: Mapping[str, Crossing]

    def as_record(self, machines: Sequence[Machine]) -> dict[str, Any]:
        """Return what the report says of it; times are modelled for each machine."""
        own = self.crossings.get(CODED)
        systems = {}
        for name, crossing in self.crossings.items():
            record: dict[str, Any] = asdict(crossing)
            del record["kl"]
            record["knob"] = SWEPT[name].knob
            record["bytes_of_hillinfer"] = None
            if crossing.share is not None and own is not None and own.share is not None:
                record["bytes_of_hillinfer"] = crossing.share / own.share
            record["modelled_ms"] = modelled_ms(name, crossing, machines)
            systems[name] = record
        return {"name": self.name, "kl": self.kl, "systems": systems}


def modelled_ms(name: str, crossing: Crossing, machines: Sequence[Machine]) -> dict[str, float]:
    """Return the modelled time of a system at a crossing, by place and machine."""
    if crossing.share is None:
        return {}
    system = SWEPT[name]
    return {
        f"{machine.model}, {place.value}": machine.milliseconds(system, crossing.share, place)
        for machine in machines
        for place in places(system)
    }


def default_row(rows: Sequence[SweptRow]) -> SweptRow | None:
    """Return the row of the product's default, exact and coded; None where it was not swept."""
    return next(
        (
            row
            for row in rows
            if row.setting.system.name == CODED and row.setting.value == default_alpha()
        ),
        None,
    )


def equal_qualities(
    own: SweptRow | None, found: Mapping[str, Curve], kls: Sequence[float] = TOLD_KLS
) -> list[EqualQuality]:
    """Return all systems at HillInfer's own KL, where it is known, and at others."""
    wanted = [(f"KL {kl:g}", kl) for kl in kls]
    if own is not None:
        wanted.insert(0, (f"HillInfer's own ({own.setting.key[1]})", own.kl))
    made = []
    for name, kl in wanted:
        crossings = {system: curve.at(kl) for system, curve in found.items()}
        if own is not None and kl == own.kl:
            # What was measured, and not what a curve makes of it and its neighbours.
            crossings[CODED] = Crossing(kl, own.setting.value, own.share)
        made.append(EqualQuality(name, kl, crossings))
    return made


@dataclass(frozen=True)
class TimeRatio:
    """A rival's time over HillInfer's at the same KL.

    Parameters
    ----------
    rival
        Its name.
    value
        The ratio; None where there is none.
    source
        Measured or modelled and of which rows, or why there is none.
    allowed, allowed_with_loop, allowed_by_middle
        What limits allow, as in `Allowed`; modelled, None where not known.
    flagged
        Whether a row behind it is.
    """

    rival: str
    value: float | None
    source: str
    allowed: float | None = None
    allowed_with_loop: float | None = None
    allowed_by_middle: float | None = None
    flagged: bool = False


def time_ratios(
    model: str, rows: Sequence[TimedRow], equal: EqualQuality, machine: Machine | None
) -> list[TimeRatio]:
    """Return the ratios of one model: measured where both were, else modelled.

    Parameters
    ----------
    model
        Its name.
    rows
        Timed ones of this model; none where no times were taken.
    equal
        All systems at the KL that was timed.
    machine
        For what is modelled; None where no rates were measured.
    """
    by_name = first_rows(rows)
    made = []
    for rival in (*FULL, *RIVALS, FOUR_BIT):
        if rival == FULL[1]:
            # In memory it is compared with what is in memory.
            continue
        crossing = equal.crossings.get(rival)
        if rival not in FULL and crossing is None:
            continue
        if crossing is not None and crossing.value is None:
            made.append(TimeRatio(rival, None, crossing.why))
            continue
        row = rival
        if rival == FOUR_BIT and crossing is not None and crossing.value is not None:
            row = few_bits(crossing.value, DRIVE) or rival
        other = by_name.get(row)
        own = None if other is None else own_beside(rows, other)
        theirs, ours = (None if one is None else one.median_ms for one in (other, own))
        if own is not None and other is not None and theirs is not None and ours is not None:
            source = f"{rows[0].row.selection}, {model}"
            allowed = Allowed.of(rows, other, own)
            assert allowed is not None
            limits = allowed.by_rates, allowed.with_loop, allowed.by_middle
            flagged = own.flagged or other.flagged
            made.append(TimeRatio(rival, theirs / ours, source, *limits, flagged))
            continue
        made.append(_modelled_ratio(rival, model, equal, machine))
    return made


def _modelled_ratio(
    rival: str, model: str, equal: EqualQuality, machine: Machine | None
) -> TimeRatio:
    own, other = equal.crossings.get(CODED), equal.crossings.get(rival)
    if machine is None:
        return TimeRatio(rival, None, "no rates were measured: take times")
    if own is None or own.share is None:
        return TimeRatio(rival, None, "HillInfer's own setting was not swept")
    ours = machine.milliseconds(SWEPT[CODED], own.share, Place.DRIVE)
    if rival in FULL:
        drive = (1 - machine.budget) * machine.kv_bytes / machine.drive
        theirs = machine.floor_ms + 1e3 * max(drive, machine.kv_bytes / machine.memory)
    else:
        assert other is not None
        assert other.share is not None
        theirs = machine.milliseconds(SWEPT[rival], other.share, Place.DRIVE)
    return TimeRatio(rival, theirs / ours, f"modelled, {model}")
