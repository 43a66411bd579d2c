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
    profile: Annotated[
        str | None,
        typer.Option(
            help="Shape of a model, like llama-3.2-1b: measure and keep the rates of a plain "
            "drive, and say what a decode step takes."
        ),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens, for --profile.")] = 32768,
    dram_budget: Annotated[
        str, typer.Option(help="Memory for the cache, for --profile, like 2GiB or 25%.")
    ] = "25%",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this machine can do and what is missing, with the fix."""
    profiled: tuple[Finding, ...] = ()
    if profile is not None:
        # Only this needs torch.
        from hillinfer.cli.doctor_profile import profile_findings

        profiled = profile_findings(profile, context, dram_budget, cold_dir)
    findings = (*diagnose(cold_dir, xclbin), *profiled)
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
