# SPDX-License-Identifier: Apache-2.0
"""Synthesis estimates for UltraScale+ from open tools, and their baselines."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hillinfer_hw.build_cache import cached
from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.kernel_spec import KernelSpec, ProductStyle

KU15P_LUT = 522_720
KU15P_DSP = 1_968
CAVEATS = (
    "Estimates of Yosys (synth_xilinx -family xcup), not of Vivado: carry chains are CARRY4, no "
    "two small functions share a LUT (LUT too high), pipeline registers do not move into DSP "
    "blocks (FF too high). LUT counts logic, LUT RAM and shift registers. Shares are of the whole "
    "device, of which the shell takes a fixed part. Nothing is said about timing."
)
# How far a count may rise or fall before a baseline must be set again.
TOLERANCES = {"lut": 0.02, "ff": 0.03, "dsp": 0.0, "bram36": 0.0, "uram": 0.0}

# Shares of a KU15P's DSP blocks and LUTs that a kernel of the Llama-3.1-8B preset may take, by
# key mode and rule; make_shadow knows no rule.
GOALS = {
    (KeyMode.INT8, Rule.RAW_SUM): (0.02, 0.02),
    (KeyMode.INT8, Rule.WEIGHT_SUM): (0.07, 0.04),
    (KeyMode.INT4, Rule.RAW_SUM): (0.04, 0.03),
    (KeyMode.INT4, Rule.WEIGHT_SUM): (0.07, 0.08),
    (KeyMode.FP16, Rule.RAW_SUM): (0.02, 0.04),
    (KeyMode.FP16, Rule.WEIGHT_SUM): (0.04, 0.05),
    (KeyMode.INT8, "-"): (0.0, 0.03),
    (KeyMode.INT4, "-"): (0.0, 0.03),
}
GOALS_PRESET = "llama-3.1-8b"
# Of a kernel whose passes score four queries: no share of the DSP blocks is asked of it.
FOUR_QUERIES_GOAL = (1.0, 0.2)

# LUTs that one cell stands for.
_LUTS = {f"LUT{inputs}": 1 for inputs in range(1, 7)} | {
    "SRL16E": 1,
    "SRLC16E": 1,
    "SRLC32E": 1,
    "RAM32X1S": 1,
    "RAM64X1S": 1,
    "RAM32X1D": 2,
    "RAM64X1D": 2,
    "RAM128X1S": 2,
    "RAM128X1D": 4,
    "RAM256X1S": 4,
    "RAM256X1D": 8,
    "RAM32M": 4,
    "RAM64M": 4,
    "RAM32M16": 8,
    "RAM64M8": 8,
}
_FLIP_FLOPS = ("FDRE", "FDSE", "FDCE", "FDPE", "LDCE", "LDPE")
# Cells that take none of what is counted.
_FREE = (
    "$scopeinfo",
    "CARRY4",
    "CARRY8",
    "MUXF7",
    "MUXF8",
    "MUXF9",
    "INV",
    "BUFG",
    "IBUF",
    "OBUF",
    "VCC",
    "GND",
)
# Modules that a kernel has many of: kept apart, each is mapped once instead of once per instance.
KEPT = (
    "dot_planes",
    "dot_pairs",
    "align_unit",
    "weight_unit",
    "score_code",
    "centre_lane",
    "round_lane",
)


# In a process of its own: it ends where Yosys finds an error.
_RUN = (
    "import sys; from pyosys import libyosys as yosys; yosys.run_pass(sys.argv[1], yosys.Design())"
)


@dataclass(frozen=True)
class Area:
    """What a design takes of a device.

    Parameters
    ----------
    lut
        LUTs for logic, memory and shift registers.
    ff
        Flip-flops.
    dsp
        DSP48E2 blocks.
    bram36
        Block RAMs of 36 Kbit; a half one counts 0.5.
    uram
        UltraRAM blocks.
    """

    lut: int
    ff: int
    dsp: int
    bram36: float
    uram: int

    @property
    def lut_share(self) -> float:
        """Share of a KU15P's LUTs."""
        return self.lut / KU15P_LUT

    @property
    def dsp_share(self) -> float:
        """Share of a KU15P's DSP blocks."""
        return self.dsp / KU15P_DSP


def count_cells(cells: Mapping[str, int]) -> Area:
    """Add up the cells of a mapped design.

    Raises
    ------
    ValueError
        Where a cell is of a kind that has no count here; it would be left out silently.
    """
    counted = (*_LUTS, *_FLIP_FLOPS, *_FREE, "DSP48E2", "RAMB36E2", "RAMB18E2", "URAM288")
    unknown = sorted(name for name in cells if name not in counted)
    if unknown:
        raise ValueError(f"cells of kinds that are not counted: {', '.join(unknown)}")
    return Area(
        sum(_LUTS.get(name, 0) * number for name, number in cells.items()),
        sum(cells.get(name, 0) for name in _FLIP_FLOPS),
        cells.get("DSP48E2", 0),
        cells.get("RAMB36E2", 0) + cells.get("RAMB18E2", 0) / 2,
        cells.get("URAM288", 0),
    )


def yosys_installed() -> bool:
    """Return whether Yosys' own package for Python is there."""
    return importlib.util.find_spec("pyosys") is not None


def synthesise(top: str, files: Iterable[Path], parameters: Mapping[str, int]) -> Area:
    """Map a design to UltraScale+ cells and count them, or find the counts of the same sources.

    Parameters
    ----------
    top
        Name of the top module.
    files
        SystemVerilog sources.
    parameters
        The top module's.

    Raises
    ------
    FileNotFoundError
        Where Yosys is not installed.
    subprocess.CalledProcessError
        Where it refuses the sources.
    """
    sources = [(path.name, path.read_text()) for path in files]
    settings = "".join(f" -chparam {name} {value}" for name, value in sorted(parameters.items()))
    kept = " ".join(f"*{name}*" for name in KEPT)
    script = (
        f"read_verilog -sv {' '.join(name for name, _ in sources)}; hierarchy -top {top}{settings};"
        f" setattr -mod -set keep_hierarchy 1 {kept};"
        " synth_xilinx -family xcup -flatten -noiopad; tee -q -o area.json stat -json"
    )

    report = json.loads((run_yosys(script, sources) / "area.json").read_text())
    cells = report["design"]["num_cells_by_type"]
    # A module that was kept is counted as a cell, too, beside the cells inside it.
    modules = {name.lstrip("\\") for name in report["modules"]}
    return count_cells({name: number for name, number in cells.items() if name not in modules})


def run_yosys(script: str, sources: Sequence[tuple[str, str]]) -> Path:
    """Run a script over sources, or find what it left of the same ones.

    Parameters
    ----------
    script
        Yosys commands, in a folder that holds the sources.
    sources
        Name and text of each.

    Returns
    -------
    The folder, without the sources.

    Raises
    ------
    FileNotFoundError
        Where Yosys is not installed.
    subprocess.CalledProcessError
        Where it refuses the sources.
    """
    if not yosys_installed():
        raise FileNotFoundError("yosys is not installed: pip install pyosys")

    def run(folder: Path) -> None:
        for name, text in sources:
            (folder / name).write_text(text)
        command = [sys.executable, "-P", "-c", _RUN, script]
        # What it says of each pass is much, and of no use to anybody; of errors it says why.
        subprocess.run(
            command,
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, _ in sources:
            (folder / name).unlink()

    # Another yosys may map the same sources otherwise.
    own = importlib.metadata.version("pyosys").encode()
    content = [own, script.encode(), *(f"{name}\n{text}".encode() for name, text in sources)]
    return cached("synth", content, run)


def core_parameters(spec: KernelSpec, kernel: str) -> dict[str, int]:
    """Return the parameters of the core inside a kernel (`score_core`, `shadow_core`)."""
    shape = {
        "HEAD_DIM": spec.padded_head_dim,
        "KV": spec.kv_heads,
        "CODE_BITS": spec.key_mode.code_bits,
    }
    if kernel == "make_shadow":
        return shape
    return shape | {
        "G": spec.scored_heads // spec.kv_heads,
        "MODE": int(spec.key_mode is KeyMode.FP16),
        "RULE": int(spec.rule is Rule.WEIGHT_SUM),
        "STYLE": int(spec.product_style is ProductStyle.LUT),
    }


def expected_dsp(spec: KernelSpec, kernel: str) -> int:
    """Return the DSP blocks a kernel takes: two products share one (contract, section 5).

    A beat of a shadow holds T tokens of 16 channels, times the G heads scored per KV head; token
    pairs share. A beat of FP16 rows holds 32 channels of one token; head pairs share. Bit planes
    and the casts take none. Every query of a pass has its own.
    """
    if kernel == "make_shadow" or spec.product_style is not ProductStyle.DSP:
        return 0
    heads = spec.scored_heads // spec.kv_heads
    if spec.key_mode is KeyMode.FP16:
        return spec.queries * 32 * -(-heads // 2)
    return spec.queries * spec.tile_tokens // 2 * 16 * heads


@dataclass(frozen=True)
class SynthRow:
    """One line of the report.

    Parameters
    ----------
    preset, mode, rule
        What was built; the rule of `make_shadow` is `-`.
    part
        `score_tokens`, `make_shadow`, or the core inside one.
    area
        Its counts.
    queries
        That a pass over the keys scores.
    """

    preset: str
    mode: str
    rule: str
    part: str
    area: Area
    queries: int = 1

    @property
    def name(self) -> str:
        """Name of the row in the baselines."""
        several = f" {self.queries} queries" if self.queries > 1 else ""
        return f"{self.part} {self.preset} {self.mode} {self.rule}{several}"

    def report(self) -> dict[str, str | float]:
        """Return the row as the report holds it."""
        return {
            "preset": self.preset,
            "mode": self.mode,
            "rule": self.rule,
            "part": self.part,
            "queries": self.queries,
            "execution": "rtl",
            "simulator": "yosys",
            "memory": "-",
            **asdict(self.area),
            "lut_share": round(self.area.lut_share, 5),
            "dsp_share": round(self.area.dsp_share, 5),
        }


def compare(rows: Iterable[SynthRow], baselines: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return what differs from the baselines by more than the tolerances; empty if nothing does.

    A row without a baseline is named, too.
    """
    found = []
    for row in rows:
        baseline = baselines.get(row.name)
        if baseline is None:
            found.append(f"{row.name}: no baseline")
            continue
        for field, tolerance in TOLERANCES.items():
            now, before = float(getattr(row.area, field)), float(baseline[field])
            if abs(now - before) > tolerance * before:
                found.append(f"{row.name}: {field} {now:g}, baseline {before:g}")
    return found


def above_goals(rows: Iterable[SynthRow]) -> list[str]:
    """Return the rows that take a larger share than `GOALS` allow; empty if none does."""
    found = []
    for row in rows:
        goal = GOALS.get((KeyMode(row.mode), row.rule)) if row.preset == GOALS_PRESET else None
        if goal is not None and row.queries > 1:
            goal = FOUR_QUERIES_GOAL
        if goal is None:
            continue
        for name, share, most in zip(
            ("DSP", "LUT"), (row.area.dsp_share, row.area.lut_share), goal, strict=True
        ):
            if share > most:
                found.append(f"{row.name}: {share:.2%} of the {name}s, the goal is {most:.0%}")
    return found
