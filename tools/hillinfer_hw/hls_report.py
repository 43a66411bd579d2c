# SPDX-License-Identifier: Apache-2.0
"""Reads what Vitis HLS reports about a kernel (csynth.xml and its parts)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from hillinfer_hw.hls_loops import loop_table, plain_headers

_RESOURCES = {"lut": "LUT", "ff": "FF", "dsp": "DSP", "bram_18k": "BRAM_18K", "uram": "URAM"}


class ReportError(ValueError):
    """A report that cannot be read; the message names the file."""


@dataclass(frozen=True, order=True)
class LoopInterval:
    """The initiation interval of one pipelined loop, in cycles."""

    module: str
    loop: str
    interval: int


@dataclass(frozen=True)
class HlsReport:
    """What Vitis HLS says about one kernel.

    Parameters
    ----------
    target_clock_ns, estimated_clock_ns
        Period asked for and expected; None where the report does not say.
    latency_cycles
        Best and worst case; None where it depends on data, as in these kernels.
    resources
        Estimated cells by name.
    loops
        Every pipelined loop, once.
    """

    target_clock_ns: float | None
    estimated_clock_ns: float | None
    latency_cycles: tuple[int | None, int | None]
    resources: Mapping[str, int]
    loops: tuple[LoopInterval, ...]


def find_hls_reports(folder: Path, kernel: str) -> list[Path]:
    """Return the XML reports of a kernel's compilation, the one about the whole kernel first.

    Parameters
    ----------
    folder
        The build folder; v++ leaves them below the temporary or the report folder of the step.
    kernel
        Its name.
    """
    found: dict[str, Path] = {}
    for place in ("temp", "reports"):
        for path in sorted((folder / place / f"compile_{kernel}").rglob("*csynth.xml")):
            found.setdefault(path.name, path)
    first = (f"{kernel}_csynth.xml", "csynth.xml")
    return sorted(found.values(), key=lambda path: (path.name not in first, path.name))


def read_hls_reports(paths: Sequence[Path], kernel: str) -> HlsReport:
    """Read the reports of one kernel.

    Parameters
    ----------
    paths
        Of `find_hls_reports`; the first is about the whole kernel.
    kernel
        Its name, which the first report must have as its top.

    Raises
    ------
    ReportError
        Where a file is no such report or is about another kernel.
    """
    roots = [(path, _root(path)) for path in paths]
    if not roots:
        raise ReportError(f"there is no csynth.xml of {kernel}")
    path, top = roots[0]
    name = top.findtext("UserAssignments/TopModelName")
    if name != kernel:
        raise ReportError(f"{path} is about {name}, not about {kernel}")
    performance = top.find("PerformanceEstimates")
    if performance is None:
        raise ReportError(f"{path} has no PerformanceEstimates")
    latency = performance.find("SummaryOfOverallLatency")
    resources = top.find("AreaEstimates/Resources")
    loops = {loop for _, root in roots for loop in _loops(root)}
    return HlsReport(
        _number(top.findtext("UserAssignments/TargetClockPeriod")),
        _number(performance.findtext("SummaryOfTimingAnalysis/EstimatedClockPeriod")),
        (_cycles(latency, "Best-caseLatency"), _cycles(latency, "Worst-caseLatency")),
        {} if resources is None else _counts(resources),
        tuple(sorted(loops)),
    )


def intended_intervals(headers: Path) -> dict[str, int]:
    """Return the initiation interval that the source asks for, by the loop's label."""
    table = loop_table(plain_headers(headers))
    return {loop.label: loop.interval for _, loop in table if loop.interval is not None}


def interval_warnings(report: HlsReport, intended: Mapping[str, int], kernel: str) -> list[str]:
    """Return a line for every loop that is slower than its source intends.

    Parameters
    ----------
    report
        Of the kernel.
    intended
        Of `intended_intervals`.
    kernel
        Its name.
    """
    lines = [
        f"{kernel}: loop {own.loop} in {own.module} has II={own.interval}, the source intends "
        f"II={intended[own.loop]}"
        for own in report.loops
        if own.interval > intended.get(own.loop, own.interval)
    ]
    if not any(own.loop in intended for own in report.loops):
        lines.append(f"{kernel}: the HLS report names none of the source's pipelined loops")
    return lines


def _root(path: Path) -> ElementTree.Element:
    try:
        return ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise ReportError(f"{path} cannot be read: {error}") from error


def _loops(root: ElementTree.Element) -> list[LoopInterval]:
    """Return the pipelined loops of a report of one module, or of one with a list of modules."""
    parts = [(root.findtext("UserAssignments/TopModelName") or "", root)]
    parts += [(own.findtext("Name") or "", own) for own in root.iter("Module")]
    found = []
    for module, part in parts:
        for summary in part.findall("PerformanceEstimates/SummaryOfLoopLatency"):
            for own in summary.iter():
                interval = _number(own.findtext("PipelineII"))
                if interval is not None:
                    name = own.findtext("Name") or own.tag
                    found.append(LoopInterval(module, name, int(interval)))
    return found


def _counts(resources: ElementTree.Element) -> dict[str, int]:
    numbers = {name: _number(resources.findtext(tag)) for name, tag in _RESOURCES.items()}
    return {name: int(number) for name, number in numbers.items() if number is not None}


def _cycles(latency: ElementTree.Element | None, tag: str) -> int | None:
    number = None if latency is None else _number(latency.findtext(tag))
    return None if number is None else int(number)


def _number(text: str | None) -> float | None:
    """Return a number; None for nothing, and for words such as `undef`."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
