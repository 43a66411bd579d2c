# SPDX-License-Identifier: Apache-2.0
"""The `hillinfer` command: its subcommands."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hillinfer.cli.console import error_console, quiet_transformers
from hillinfer.cli.ending import CommandGroup, Program
from hillinfer.cli.generate import generate
from hillinfer.cli.specs import specs
from hillinfer.cli.store import COMMANDS
from hillinfer.doctor.diagnosis import diagnose
from hillinfer.doctor.finding import Finding, Verdict
from hillinfer.models.registry_model import DEFAULT_MODEL, REGISTRY_MODELS, registry_model

# --- `hillinfer fetch` ---


def fetch(
    name: Annotated[str, typer.Argument(help="Name of a registry model.")] = DEFAULT_MODEL,
) -> None:
    """Fetch a registry model, convert it once and print its folder."""
    model = registry_model(name)
    if not model.present:
        quiet_transformers()
    print(model.fetch(error_console().print))


# --- `hillinfer models` ---


def models() -> None:
    """List the registry models, their licences and whether they are on this machine."""
    for model in REGISTRY_MODELS.values():
        place = model.folder if model.present else f"missing: hillinfer fetch {model.name}"
        print(f"{model.name}: {model.description}; {model.license}; {place}")


# --- `hillinfer doctor` ---


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
        from hillinfer.doctor.profile import profile_findings

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


# --- `hillinfer` ---

main = Program(
    "hillinfer",
    "Long-context LLM inference with the KV cache on a drive.",
    (
        generate,
        doctor,
        fetch,
        models,
        specs,
        CommandGroup("store", "Keep what was read, for other runs, processes and days.", COMMANDS),
    ),
)
