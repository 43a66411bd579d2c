# SPDX-License-Identifier: Apache-2.0
"""Reads Vivado's reports of a linked design: cells used, and slack."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

from hillinfer_hw.hls_report import ReportError

# Rows of `report_utilization` on UltraScale+ devices.
_ROWS = {
    "CLB LUTs": "lut",
    "CLB Registers": "ff",
    "DSPs": "dsp",
    "Block RAM Tile": "bram",
    "URAM": "uram",
}
_KERNEL_CELL = re.compile(r"^\s*([\d.]+)\s*\[\s*([\d.]+)%\s*\]\s*$")
_KERNEL_COLUMNS = {"LUT": "lut", "REG": "ff", "DSP": "dsp", "BRAM": "bram", "URAM": "uram"}
_NOT_MET = "Timing constraints are not met"
_MET = "All user specified timing constraints are met"
_CLOCK_COUNT, _CLOCK = struct.Struct("<h"), struct.Struct("<HB5x128s")
_DATA_CLOCK = 1


@dataclass(frozen=True)
class Cells:
    """How much of one resource is used.

    Parameters
    ----------
    used, available
        Cells; block RAM counts in tiles of 36 kbit, halves included.
    line
        The report's own line.
    """

    used: float
    available: float
    line: str

    @property
    def share(self) -> float:
        """Used over available, 1 being all."""
        return self.used / self.available if self.available else 0.0


@dataclass(frozen=True)
class Timing:
    """Worst slacks of a routed design, in ns; negative where a path is too slow.

    Parameters
    ----------
    setup_ns, hold_ns
        WNS and WHS.
    verdict
        The report's own sentence.
    """

    setup_ns: float
    hold_ns: float
    verdict: str

    @property
    def met(self) -> bool:
        """Whether every path is fast enough."""
        return self.setup_ns >= 0 and self.hold_ns >= 0 and _NOT_MET not in self.verdict


def find_report(folder: Path, *patterns: str) -> Path:
    """Return the first report below the link's folders, in order of the patterns.

    Raises
    ------
    ReportError
        Where there is none.
    """
    for pattern in patterns:
        for place in ("reports/link", "temp/link"):
            found = sorted((folder / place).rglob(pattern))
            if found:
                return found[0]
    raise ReportError(f"there is no {' or '.join(patterns)} below {folder}/reports/link or temp")


def read_utilisation(path: Path) -> dict[str, Cells]:
    """Read `report_utilization` of the whole design, the platform's shell included.

    Raises
    ------
    ReportError
        Where a resource is missing.
    """
    found: dict[str, Cells] = {}
    columns: list[str] = []
    for line in _lines(path):
        fields = _fields(line)
        if "Site Type" in fields:
            columns = fields
            continue
        # A star behind a name points to a footnote.
        name = _ROWS.get(fields[0].rstrip("*").strip()) if fields else None
        if name is None or name in found or not {"Used", "Available"} <= set(columns):
            continue
        row = dict(zip(columns, fields, strict=False))
        try:
            found[name] = Cells(float(row["Used"]), float(row["Available"]), line.strip())
        except (KeyError, ValueError):
            continue
    absent = [row for row, name in _ROWS.items() if name not in found]
    if absent:
        raise ReportError(f"{path} has no row {absent[0]!r}")
    return found


def read_kernel_utilisation(path: Path) -> dict[str, dict[str, float]]:
    """Read v++'s report of cells per kernel, without the shell; rows by name, indented ones too."""
    found: dict[str, dict[str, float]] = {}
    columns: list[str] = []
    for line in _lines(path):
        fields = _fields(line)
        if fields and fields[0] == "Name":
            columns = fields
        elif columns and len(fields) == len(columns):
            cells = {}
            for column, field in zip(columns, fields, strict=True):
                match = _KERNEL_CELL.match(field)
                if match and column in _KERNEL_COLUMNS:
                    cells[_KERNEL_COLUMNS[column]] = float(match.group(1))
            if cells:
                found[fields[0]] = cells
    return found


def read_timing(path: Path) -> Timing:
    """Read the design's slacks from `report_timing_summary`.

    Raises
    ------
    ReportError
        Where the table or the verdict is not there.
    """
    lines = _lines(path)
    verdict = next((line.strip() for line in lines if _NOT_MET in line or _MET in line), None)
    for index, line in enumerate(lines):
        columns = line.split()
        if columns[:1] == ["WNS(ns)"] and "WHS(ns)" in line:
            # Names of columns have spaces; the slacks stand in the first and the fifth of them.
            values = lines[index + 2].split() if index + 2 < len(lines) else []
            if len(values) >= 5 and verdict is not None:
                try:
                    return Timing(float(values[0]), float(values[4]), verdict)
                except ValueError:
                    break
    raise ReportError(f"{path} is no timing summary of a routed design")


def data_clock_mhz(clocks: bytes) -> int | None:
    """Return the kernels' clock in an xclbin's CLOCK_FREQ_TOPOLOGY, or None without one."""
    if len(clocks) < _CLOCK_COUNT.size:
        return None
    count = _CLOCK_COUNT.unpack_from(clocks)[0]
    for index in range(count):
        offset = _CLOCK_COUNT.size + index * _CLOCK.size
        if offset + _CLOCK.size > len(clocks):
            return None
        megahertz, kind, _ = _CLOCK.unpack_from(clocks, offset)
        if kind == _DATA_CLOCK:
            return int(megahertz)
    return None


def _fields(line: str) -> list[str]:
    if not line.startswith("|"):
        return []
    return [field.strip() for field in line.strip().strip("|").split("|")]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}") from error
