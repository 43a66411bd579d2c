# SPDX-License-Identifier: Apache-2.0
"""Collects what a build's reports say, and refuses a design that is too slow or too large."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hillinfer.devices.xrt.xclbin import SectionKind, Xclbin
from hillinfer_hw.csim_build import HLS
from hillinfer_hw.hls_report import (
    HlsReport,
    ReportError,
    find_hls_reports,
    intended_intervals,
    interval_warnings,
    read_hls_reports,
)
from hillinfer_hw.vitis_build import KernelSource, Target, VitisBuild
from hillinfer_hw.vitis_failures import Failure
from hillinfer_hw.vitis_flow import packaged_xclbin
from hillinfer_hw.vitis_reports import (
    Cells,
    Timing,
    data_clock_mhz,
    find_report,
    read_kernel_utilisation,
    read_timing,
    read_utilisation,
)
from hillinfer_hw.vitis_run import BuildFailedError

# Physical optimisation after routing makes the later of the two; v++ scales clocks by it.
_TIMING_REPORTS = ("*timing_summary_postroute_physopted.rpt", "*timing_summary_routed.rpt")
_CELL_REPORTS = ("*full_util_routed.rpt",)
_KERNEL_REPORTS = ("*kernel_util_routed.rpt",)


@dataclass(frozen=True)
class Evidence:
    """What is known about a finished build.

    Parameters
    ----------
    hls
        Report of each kernel; empty for RTL kernels.
    timing, clock_mhz
        Slacks of the routed design, and the clock that the card will be given; None in emulation.
    cells
        Of the whole design, the platform's shell included; empty in emulation.
    kernel_cells
        Per kernel, without the shell; empty where v++ left no such report.
    warnings
        What does not make the xclbin useless, and should be known.
    """

    hls: Mapping[str, HlsReport]
    timing: Timing | None
    clock_mhz: int | None
    cells: Mapping[str, Cells]
    kernel_cells: Mapping[str, Mapping[str, float]]
    warnings: tuple[str, ...]


def collect_evidence(build: VitisBuild) -> Evidence:
    """Read a build's reports after its last step.

    Raises
    ------
    BuildFailedError
        Where the design is too large or too slow, or where a report that shows that it is not is
        missing.
    """
    warnings: list[str] = []
    hls = _hls_reports(build, warnings) if build.source is KernelSource.HLS else {}
    if build.target is Target.HW_EMU:
        return Evidence(hls, None, None, {}, {}, tuple(warnings))
    try:
        cells_report = find_report(build.folder, *_CELL_REPORTS)
        cells = read_utilisation(cells_report)
        timing_report = find_report(build.folder, *_TIMING_REPORTS)
        timing = read_timing(timing_report)
    except ReportError as error:
        raise BuildFailedError(
            f"link: the xclbin was made, and nothing shows that it works: {error}"
        ) from error
    for own in cells.values():
        if own.used > own.available:
            raise BuildFailedError(
                f"link: {Failure.OVERFLOW}:\n  {own.line}\n(report: {cells_report})"
            )
    if not timing.met:
        raise BuildFailedError(
            f"link: {Failure.TIMING}:\n  {timing.verdict} (WNS {timing.setup_ns} ns, WHS "
            f"{timing.hold_ns} ns)\n(report: {timing_report})"
        )
    clock = _clock(build, warnings)
    try:
        kernel_cells = read_kernel_utilisation(find_report(build.folder, *_KERNEL_REPORTS))
    except ReportError as error:
        kernel_cells = {}
        warnings.append(str(error))
    return Evidence(hls, timing, clock, cells, kernel_cells, tuple(warnings))


def _hls_reports(build: VitisBuild, warnings: list[str]) -> dict[str, HlsReport]:
    found = {}
    intended = intended_intervals(HLS)
    for instance in build.instances:
        kernel = instance.kernel
        try:
            report = read_hls_reports(find_hls_reports(build.folder, kernel), kernel)
        except ReportError as error:
            warnings.append(str(error))
            continue
        found[kernel] = report
        warnings += interval_warnings(report, intended, kernel)
    return found


def _clock(build: VitisBuild, warnings: list[str]) -> int | None:
    """Return the clock in the xclbin; refuse one below what was asked for."""
    xclbin = Xclbin.read(build.folder / packaged_xclbin(build))
    clock = data_clock_mhz(xclbin.sections.get(SectionKind.CLOCK_FREQ_TOPOLOGY, b""))
    if clock is None:
        warnings.append("the xclbin does not say which clock its kernels get")
    elif clock < build.frequency:
        raise BuildFailedError(
            f"link: {Failure.TIMING}:\n  the xclbin gives its kernels {clock} MHz, "
            f"{build.frequency} MHz were asked for"
        )
    return clock
