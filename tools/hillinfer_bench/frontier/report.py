# SPDX-License-Identifier: Apache-2.0
"""The report of the comparison at equal quality, and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hillinfer.values import format_bytes
from hillinfer_bench.frontier.equal import EqualQuality, TimeRatio, time_ratios
from hillinfer_bench.frontier.goals import FrontierGoal, figures, frontier_goals
from hillinfer_bench.frontier.modelled import LABEL, Machine, places
from hillinfer_bench.frontier.sweep import SweptRow
from hillinfer_bench.frontier.swept import CODED, HILLINFER
from hillinfer_bench.frontier.times import TimedRow, lies_in_memory
from hillinfer_bench.systems.table import FLOOR


@dataclass(frozen=True)
class TimedModel:
    """Times of one model.

    Parameters
    ----------
    name
        Its name.
    real
        Whether it is the model of the sweep.
    rows
        Of all systems.
    machine
        What is modelled with; None where no floor was measured.
    at_kl
        Which KL its systems have; None for that of HillInfer's default.
    """

    name: str
    real: bool
    rows: Sequence[TimedRow]
    machine: Machine | None
    at_kl: float | None = None

    @property
    def title(self) -> str:
        """What tells it from others of a run, in words."""
        return self.name if self.at_kl is None else f"{self.name} at a KL of {self.at_kl:g}"


def frontier_report(
    swept: Sequence[SweptRow],
    equal: Sequence[EqualQuality],
    timed: Sequence[TimedModel],
    facts: Mapping[str, Any],
    elsewhere: Sequence[FrontierGoal] = (),
) -> dict[str, Any]:
    """Return the report.

    Parameters
    ----------
    swept
        Every setting of every system.
    equal
        All systems at the same KL, at HillInfer's own first.
    timed
        Times at any of these, the real model's first; none where none were taken.
    facts
        What a repetition needs.
    elsewhere
        Goals that other commands measure.
    """
    every, timed = timed, [one for one in timed if one.at_kl is None]
    machines = [one.machine for one in timed if one.machine is not None]
    shapes = [one for one in timed if not one.real]
    ratios = _ratios(timed, equal[0]) if equal else {}
    of_shapes = [ratio for one in shapes for ratio in ratios.get(one.name, [])]
    judged_by = of_shapes or [ratio for own in ratios.values() for ratio in own]
    if not judged_by and equal:
        names = [
            "full-drive",
            *(one for one in equal[0].crossings if one not in (CODED, HILLINFER)),
        ]
        judged_by = [TimeRatio(name, None, "no times were taken") for name in names]
    real = [row for one in timed if one.real for row in one.rows]
    found = figures(swept, real)
    goals = frontier_goals(swept, real, [one.rows for one in shapes], of_shapes, machines)
    worst = _worst(judged_by)
    return {
        "label": "measured",
        **facts,
        "kl_share_of_exact_alpha_01": found.kl_share,
        "drive_bytes_share": found.drive_bytes_share,
        "decode_speedup": found.decode_speedup,
        "equal_quality": {name: ratio.value for name, ratio in worst.items()},
        "equal_quality_from": {name: asdict(ratio) for name, ratio in worst.items()},
        "equal_quality_at": _at_other_kls(every, equal),
        "goals": [one.as_record() for one in (*goals, *elsewhere)],
        "sweep": [_swept_record(row, machines) for row in swept],
        "settings": [one.as_record(machines) for one in equal],
        "times": [
            {**row.as_record(), "at_kl": equal[0].kl if one.at_kl is None and equal else one.at_kl}
            for one in every
            for row in one.rows
        ],
        "time_ratios": {name: [asdict(one) for one in own] for name, own in ratios.items()},
        "modelled": LABEL,
    }


def _ratios(timed: Sequence[TimedModel], equal: EqualQuality) -> dict[str, list[TimeRatio]]:
    return {one.name: time_ratios(one.name, one.rows, equal, one.machine) for one in timed}


def _at_other_kls(
    timed: Sequence[TimedModel], equal: Sequence[EqualQuality]
) -> dict[str, dict[str, Any]]:
    """Return for each told KL that was timed every model's ratios, by rival."""
    made = {}
    for one in equal:
        ratios = _ratios([model for model in timed if model.at_kl == one.kl], one)
        if ratios:
            made[f"{one.kl:g}"] = {
                name: {ratio.rival: asdict(ratio) for ratio in own} for name, own in ratios.items()
            }
    return made


def _worst(ratios: Sequence[TimeRatio]) -> dict[str, TimeRatio]:
    """Return each rival's least ratio; a reason where it has none at all."""
    found: dict[str, list[TimeRatio]] = {}
    for one in ratios:
        found.setdefault(one.rival, []).append(one)
    return {
        name: min(own, key=lambda one: (one.value is None, one.value or 0.0))
        for name, own in found.items()
    }


def _swept_record(row: SweptRow, machines: Sequence[Machine]) -> dict[str, Any]:
    system = row.setting.system
    modelled = {
        f"{machine.model}, {place.value}": machine.milliseconds(system, row.share, place)
        for machine in machines
        for place in places(system)
    }
    return {**row.as_record(), "modelled_ms": modelled}


def report_text(report: Mapping[str, Any]) -> str:
    """Return the tables as Markdown: every setting, equal quality, times and goals."""
    lines = [
        "| system | setting | KL | text by text | agreement | bytes |",
        "|---|---|---:|---|---:|---:|",
    ]
    for row in report["sweep"]:
        texts = ", ".join(f"{kl:.4f}".removeprefix("0") for kl in row["kl_of_texts"])
        lines.append(
            f"| {row['system']} | {row['setting']} | {row['kl_divergence']:.4f} | {texts} "
            f"| {row['agreement']:.3f} | {row['row_byte_share']:.4f} |"
        )
    for equal in report["settings"]:
        lines += ["", *_equal_lines(equal)]
    for kl in dict.fromkeys(row["at_kl"] for row in report["times"]):
        own = [row for row in report["times"] if row["at_kl"] == kl]
        told = "" if kl is None else f" at a KL of {kl:.2g}"
        lines += ["", f"Times{told}:", "", *_time_lines(own)]
    lines += ["", *map(_goal_line, report["goals"])]
    return "\n".join(lines)


def _equal_lines(equal: Mapping[str, Any]) -> list[str]:
    lines = [
        f"At a KL of {equal['kl']:.2g}, {equal['name']}:",
        "",
        "| system | setting | bytes | of HillInfer's |",
        "|---|---|---:|---:|",
    ]
    for name, one in equal["systems"].items():
        if one["value"] is None:
            lines.append(f"| {name} | {one['why']} | | |")
            continue
        ratio = one["bytes_of_hillinfer"]
        told = "" if ratio is None else f"{ratio:.2f}"
        why = f" ({one['why']})" if one["why"] else ""
        setting = f"{one['knob']} {one['value']:.3g}{why}"
        lines.append(f"| {name} | {setting} | {one['share']:.4f} | {told} |")
    return lines


def _time_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| model | system | stands for | ms | spread | drive per step | M0 | counted | beyond M0 "
        "| agrees |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        part = f", {row['part']}" if row["part"] else ""
        start = f"| {row['model'].rstrip('/').split('/')[-1]} | {row['system']}{part} "
        if row["median_ms"] is None:
            lines.append(f"{start}| {row['skipped']} | | | | | | | |")
            continue
        mark = "!" if row["flags"] else ""
        agreement = "" if row["agreement"] is None else f"{row['agreement']:.3f}"
        lines.append(
            f"{start}| {row['stands_for']} | {row['median_ms']:.1f}{mark} | {row['spread']:.0%} "
            f"| {row['drive_read_bytes'] / 2**20:.1f} MiB | {_memory_cells(row)} | {agreement} |"
        )
    return lines


def _memory_cells(row: Mapping[str, Any]) -> str:
    """Return M0, what the system counted at most, and by how much more the process grew.

    What has no drive is not bound by M0, and its growth is its own.
    """
    counted = format_bytes(row["held_bytes"])
    if lies_in_memory(row["part"]) or row["system"] == FLOOR:
        return f" | {counted} | {format_bytes(row['rss_bytes'])} in all"
    budget = row["budget_bytes"]
    beyond = format_bytes(max(0, row["rss_bytes"] - budget))
    return f"{format_bytes(budget)} | {counted} | {beyond}"


def _goal_line(goal: Mapping[str, Any]) -> str:
    reached = goal["row"] if goal["reached"] is None else f"{goal['reached']:g} ({goal['row']})"
    limit = "; no limit is known"
    if goal["allowed"] is not None:
        forbidden = ", which forbids the goal" if goal["forbidden"] else ""
        limit = (
            f"; bytes and rates allow {goal['allowed']:g}{forbidden}, and "
            f"{goal['share_of_allowed']:.0%} of it is reached"
        )
        if goal["allowed_with_loop"] is not None:
            limit += f"; with the model's loop {goal['allowed_with_loop']:g} are left"
        if goal["share_with_loop"] is not None:
            limit += f", and {goal['share_with_loop']:.0%} of that is reached"
        if goal["allowed_by_middle"] is not None:
            limit += (
                f"; the middle rates between the turns allow {goal['allowed_by_middle']:g}, and "
                f"{goal['share_by_middle']:.0%} of that is reached"
            )
    flagged = ", flagged" if goal["flagged"] else ""
    return f"- {goal['verdict']}{flagged}: {goal['goal']}: {reached}{limit}"
