# SPDX-License-Identifier: Apache-2.0
"""`hillinfer doctor`: what this machine can do and what is missing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hillinfer.machine.diagnosis import diagnose
from hillinfer.machine.finding import Finding, Verdict


def doctor(
    *,
    cold_dir: Annotated[Path | None, typer.Option(help="Directory of the cold pool.")] = None,
    xclbin: Annotated[
        Path | None,
        typer.Option(help="Image of a card's kernels: checked, loaded, and reads timed."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this machine can do and what is missing, with the fix."""
    findings = diagnose(cold_dir, xclbin)
    ready = all(finding.verdict is not Verdict.MISSING for finding in findings)
    if as_json:
        listed = [asdict(finding) for finding in findings]
        print(json.dumps({"ready": ready, "findings": listed}, indent=2))
        return
    for finding in findings:
        print(_line(finding))
    print(
        "ready: hillinfer generate can run here"
        if ready
        else "not ready: see the lines marked 'missing'"
    )


def _line(finding: Finding) -> str:
    fix = f" -> {finding.fix}" if finding.fix else ""
    return f"{finding.verdict.value:>9}  {finding.name}: {finding.found}{fix}"
