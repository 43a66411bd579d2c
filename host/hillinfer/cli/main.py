# SPDX-License-Identifier: Apache-2.0
"""The `hillinfer` command: its subcommands."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hillinfer.cli.console import error_console, quiet_transformers
from hillinfer.cli.forms.documents import DOCUMENT_COMMANDS
from hillinfer.cli.forms.measuring import CATALOGUE_COMMANDS
from hillinfer.cli.generate import SHOWN, generate
from hillinfer.cli.parsing import STORE_VARIABLE, Brief, CommandGroup, PassingOn, Program
from hillinfer.cli.prune import prune_profile
from hillinfer.cli.serving.chat import chat
from hillinfer.cli.serving.serve import SHOWN as SHOWN_OF_SERVE
from hillinfer.cli.serving.serve import serve
from hillinfer.cli.store import COMMANDS
from hillinfer.doctor.diagnosis import diagnose
from hillinfer.doctor.finding import Finding, Verdict
from hillinfer.errors import HillInferError, SettingsError
from hillinfer.models.registry_model import DEFAULT_MODEL, REGISTRY_MODELS, registry_model
from hillinfer.models.sources import found_models
from hillinfer.native.library import native_library
from hillinfer.settings import AUTO, Settings
from hillinfer.values import ByteSize, format_bytes
from hillinfer_model.card_figures import CardFigures, LaunchCosts, card_figures
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.cycle_count import CLOCK_HERTZ, CycleCount
from hillinfer_model.hardware_spec import KU15P_BLOCK_RAMS, block_rams, check_hardware_spec
from hillinfer_model.kernel_figures import (
    CARD_BYTES,
    DDR_ROOF,
    P2P_ROOF,
    KernelFigures,
    kernel_figures,
)
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec
from hillinfer_model.presets import PRESETS, preset_spec
from hillinfer_model.step_need import StepNeed, step_need

# --- `hillinfer fetch` ---


def fetch(
    name: Annotated[str, typer.Argument(help="Name of a registry model.")] = DEFAULT_MODEL,
) -> None:
    """Fetch a registry model, convert it once and print its folder."""
    print(registry_model(name).fetch(error_console().print, quiet_transformers))


# --- `hillinfer models` ---


def models() -> None:
    """List the models that are on this machine, by the names that --model takes."""
    for model in REGISTRY_MODELS.values():
        place = model.folder if model.present else f"missing: hillinfer fetch {model.name}"
        print(f"{model.name}: {model.description}; {model.license}; {place}")
    for found in found_models(Path(), os.environ):
        print(f"{found.name}: {found.family}, {format_bytes(found.byte_count)}; {found.where}")


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
            "drive and how long layers compute, and say what a decode step takes."
        ),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens, for --profile.")] = 32768,
    dram_budget: Annotated[
        str, typer.Option(help="Memory for the cache, for --profile, like 2GiB or 25%.")
    ] = "25%",
    alpha: Annotated[str, typer.Option(help="Importance rate, for --profile, or auto.")] = AUTO,
    exact: Annotated[
        str, typer.Option(help="Share of exact tokens, for --profile, or auto; 1 codes nothing.")
    ] = AUTO,
    store: Annotated[
        Path | None,
        typer.Option(envvar=STORE_VARIABLE, help="Directory of the store that runs would use."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this machine can do and what is missing, with the fix."""
    profiled: tuple[Finding, ...] = ()
    if profile is not None:
        # Only this needs torch.
        from hillinfer.doctor.profile import profile_findings

        profiled = profile_findings(profile, context, dram_budget, cold_dir, alpha, exact)
    findings = (*diagnose(cold_dir, xclbin, store=store), *profiled)
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


# --- `hillinfer lm-eval` ---

_MODEL_NAME = "hillinfer"
_MODEL_TARGET = "hillinfer.harness.model:HillInferLM"
_TASKS = Path(__file__).parents[1] / "harness" / "tasks"
# Words of the harness' command; without one of them it runs.
_RUN, _WORDS = "run", ("run", "ls", "validate")


def lm_eval(context: typer.Context) -> None:
    """Evaluate with EleutherAI's harness: takes the options of its command lm-eval.

    The model is `hillinfer` where --model names no other. Tasks of this project are found too:
    hillinfer_needle, hillinfer_lines, hillinfer_choice, hillinfer_perplexity, or all: hillinfer.
    """
    if find_spec("lm_eval") is None:
        raise SettingsError("lm_eval is not installed: pip install 'hillinfer[run,lm-eval]'")
    native_library()
    quiet_transformers()
    # The registry asks for the harness' own models only while it is empty.
    importlib.import_module("lm_eval.models")
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    # Later versions of the harness read entry points, and know the model already.
    if _MODEL_NAME not in model_registry:
        model_registry.register(_MODEL_NAME, target=_MODEL_TARGET)
    before = sys.argv
    sys.argv = ["hillinfer lm-eval", *completed(context.args)]
    try:
        cli_evaluate()
    except HillInferError:
        raise
    except (ValueError, KeyError) as error:
        # So the harness tells of arguments and tasks that are none.
        raise SettingsError(f"lm-eval: {error}") from error
    finally:
        sys.argv = before


def completed(given: list[str]) -> list[str]:
    """Return arguments for the harness, with the model and the tasks of this project."""
    if not given:
        return ["--help"]
    word, rest = (given[0], given[1:]) if given[0] in _WORDS else (_RUN, given)
    if any(one in ("-h", "--help") for one in rest):
        return [word, *rest]
    added: list[str] = []
    if word == _RUN and not _names(rest, "--model", "-M", "--config", "-C"):
        added += ["--model", _MODEL_NAME]
    if not _names(rest, "--include_path"):
        added += ["--include_path", str(_TASKS)]
    return [word, *rest, *added]


def _names(arguments: list[str], *options: str) -> bool:
    return any(one == name or one.startswith(f"{name}=") for one in arguments for name in options)


# --- `hillinfer specs` ---

Column = tuple[KernelSpec, KernelFigures, StepNeed, CardFigures]
# A table in a file or a pipe is as wide as it needs to be.
_FILE_WIDTH = 120


def _show_specs(
    console: Console,
    preset: str,
    scope: Scope,
    tokens: int,
    budget: ByteSize | None,
    columns: Sequence[Column],
) -> None:
    """Print one table."""
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    spec = columns[0][0]
    console.print(
        f"{preset}: head_dim {spec.head_dim}, {spec.kv_heads} KV heads of {spec.group_size} query "
        f"heads, rule {spec.rule.value}, scope {scope.value}; modelled, not measured"
    )
    table = Table(title_justify="left")
    table.add_column("")
    for spec, *_ in columns:
        table.add_column(spec.key_mode.value, justify="right")
    lines = [
        [
            *_card_lines(tokens, card),
            *_specs_lines(tokens, spec, figures),
            *_step_lines(tokens, need, budget),
        ]
        for spec, figures, need, card in columns
    ]
    for row in zip(*lines, strict=True):
        table.add_row(row[0][0], *(value for _, value in row))
    console.print(table)
    console.print(
        f"Clock {CLOCK_HERTZ / 1e6:.0f} MHz; DDR roof {DDR_ROOF / 1e9:.1f} GB/s, P2P roof "
        f"{P2P_ROOF / 1e9:.1f} GB/s; card of {CARD_BYTES / 1e9:.0f} GB. Cycles: ideal memory, and "
        "realistic memory with 100..200 cycles of read latency, one data bus and refresh."
    )
    console.print(_where_a_card_pays(columns))
    console.print(
        "Several queries a pass are those of joined batches. Llama-3.1-8B in INT4, scope layer: "
        "3.82 times the token scores of one query in simulated RTL (docs/results/kernels.md)."
    )
    if any(need.coded_tokens for _, _, need, _ in columns):
        console.print(
            "A step's bytes are computed. Tables and buffers come on top: hillinfer doctor "
            "--profile says of them what a budget holds."
        )


def _card_lines(tokens: int, card: CardFigures) -> list[tuple[str, str]]:
    """Return what a launch does as the host sees it, beside one host thread."""
    host = card.host_seconds
    return [
        ("tokens/s of a layer, launches from the host", _million(tokens / card.launch_seconds)),
        ("  one host thread, shadow in its DRAM", _million(tokens / host) if host else "-"),
        ("  the card's rate in host threads", f"{card.speedup:.2f}" if host else "-"),
        ("  keys on the drive, by P2P", _million(tokens / card.p2p_seconds)),
        ("    cycles, loads beside scoring", f"{card.beside_cycles:,}"),
        ("    cycles, loads and scoring in turn", f"{card.in_turn_cycles:,}"),
        ("microseconds of a launch", f"{card.launch_seconds * 1e6:.0f}"),
        ("  of them in the kernel", f"{card.kernel_seconds * 1e6:.0f}"),
        ("  of a host thread, which a card leaves free", f"{host * 1e6:.0f}" if host else "-"),
        ("beats per cycle, refresh and turnaround", f"{card.beats_per_cycle:.3f}"),
        ("  what bytes and refresh leave of the bus", f"{card.bus_limit:.3f}"),
        ("bytes of keys that do not cross the link", f"{card.key_bytes:,}"),
        ("  bytes of scores that do", f"{card.score_bytes:,}"),
    ]


def _where_a_card_pays(columns: Sequence[Column]) -> str:
    """Return one paragraph: what the lines above say about having a card."""
    rates = [
        f"{spec.key_mode.value} {card.speedup:.2f}"
        for spec, _, _, card in columns
        if card.host_seconds
    ]
    beside = f" In rates of one host thread a card is worth: {', '.join(rates)}." if rates else ""
    return (
        "Where a card pays: shadows that the host's DRAM has no room for, a thread that is free "
        "for other work, keys on the drive that do not cross its link. It does not pay for rate "
        f"where shadows fit into DRAM and it is worth less than one thread.{beside} Times of "
        "start, copies and polling are assumed; --launch-us and the options beside it set them. "
        "A host thread's rate was measured once (docs/results/scorer.md); --host-rate sets it."
    )


def _specs_lines(tokens: int, spec: KernelSpec, figures: KernelFigures) -> list[tuple[str, str]]:
    """Return one key mode's figures as pairs of a name and what is to be said."""
    rate = _rate(figures.launch)
    plane, rows = figures.p2p_bytes_per_token
    row_launch, row_realistic = figures.rows, figures.rows_realistic
    passes = figures.passes
    return [
        ("key codes per beat (lanes)", f"{figures.key_codes_per_beat}"),
        ("query heads per key code", f"{figures.heads_per_code}"),
        ("code beats per token", f"{figures.code_beats_per_token:g}"),
        ("exponent beats per token", f"{figures.exponent_beats_per_token:g}"),
        ("cycles per 1,024 tokens", f"{figures.thousand.cycles:,}"),
        (f"cycles per launch of {tokens:,} tokens", f"{figures.launch.cycles:,}"),
        ("  with realistic memory", f"{figures.realistic.cycles:,}"),
        ("beats per cycle", f"{figures.launch.beats_per_cycle:.3f}"),
        ("  with realistic memory", f"{figures.realistic.beats_per_cycle:.3f}"),
        ("key bytes read, GB/s", f"{rate / 1e9:.2f}"),
        ("  share of the DDR roof", f"{rate / DDR_ROOF:.1%}"),
        ("  share of the P2P roof", f"{rate / P2P_ROOF:.0%}"),
        ("tokens/s of a layer, from DDR", _million(rate / plane)),
        ("tokens/s of a layer, by P2P", _million(min(P2P_ROOF, rate) / plane)),
        ("  rows K‖V: cycles of the launch", f"{row_launch.cycles:,}" if row_launch else "-"),
        ("    with realistic memory", f"{row_realistic.cycles:,}" if row_realistic else "-"),
        ("    key GB/s from DDR", f"{_rate(row_launch) / 1e9:.2f}" if row_launch else "-"),
        ("    share of the DDR roof", f"{_rate(row_launch) / DDR_ROOF:.1%}" if row_launch else "-"),
        ("    share of the P2P roof", f"{_rate(row_launch) / P2P_ROOF:.0%}" if row_launch else "-"),
        ("    tokens/s of a layer, by P2P", _million(P2P_ROOF / rows) if rows else "-"),
        ("shadow (fp16: key-only plane) bytes per token", f"{figures.shadow_bytes_per_token:,}"),
        ("tokens of all layers on a card", f"{figures.card_tokens:,}"),
        ("  rows K‖V there (--shadow fp16)", f"{figures.card_row_tokens:,}" if rows else "-"),
        ("queries that a pass over the keys may score", f"{passes.queries}"),
        ("  cycles of the launch, realistic memory", f"{passes.cycles:,}"),
        ("  token scores a cycle, over one query's", f"{passes.gain:.2f}"),
        ("    what bytes leave", f"{passes.limit:.2f}"),
        (f"block RAMs of a KU15P's {KU15P_BLOCK_RAMS}", f"{block_rams(spec):g}"),
    ]


def _step_lines(tokens: int, need: StepNeed, budget: ByteSize | None) -> list[tuple[str, str]]:
    """Return what a decode step of all layers needs, likewise."""
    lines = [
        (f"a step of all layers behind {tokens:,}: exact tokens", f"{need.exact_tokens:,}"),
        ("  coded tokens", f"{need.coded_tokens:,}"),
        ("  rows of exact tokens", format_bytes(need.exact_row_bytes)),
        ("  codes of values", _bytes_or_none(need.value_code_bytes)),
        ("  keys that are ranked", format_bytes(need.key_shadow_bytes)),
        ("codes of all values in DRAM", _bytes_or_none(need.all_code_bytes)),
        ("  with all ranked keys, of the KV", _with_keys(need)),
    ]
    if budget is None:
        return lines
    held = budget.resolve(need.kv_bytes)
    fits = "yes" if need.codes_and_shadow_bytes <= held else "no"
    return [*lines, (f"  fit {budget}", fits if need.all_code_bytes else "-")]


def _with_keys(need: StepNeed) -> str:
    return f"{need.codes_and_shadow_bytes / need.kv_bytes:.1%}" if need.all_code_bytes else "-"


def _bytes_or_none(count: int) -> str:
    return format_bytes(count) if count else "-"


def _rate(launch: CycleCount) -> float:
    """Bytes of keys per second of a launch."""
    return launch.beats * BEAT_BYTES / launch.seconds


def _million(rate: float) -> str:
    return f"{rate / 1e6:.2f} M"


_MOST_TOKENS = 2**20
_COSTS = LaunchCosts()


def specs(
    preset: Annotated[str, typer.Argument(help=f"One of {', '.join(PRESETS)}.")],
    key_mode: Annotated[
        list[KeyMode] | None,
        typer.Option(help="Where keys come from; give it again for more. By default all."),
    ] = None,
    *,
    rule: Annotated[Rule, typer.Option(help="How a token's score is made.")] = Rule.WEIGHT_SUM,
    scope: Annotated[Scope, typer.Option(help="What shares one selected set.")] = Scope.LAYER,
    tokens: Annotated[int, typer.Option(help="Tokens of the launch.")] = 4096,
    alpha: Annotated[str, typer.Option(help="Importance rate of a decode step, or auto.")] = AUTO,
    exact: Annotated[
        str, typer.Option(help="Share of exact tokens in a decode step, or auto; 1 codes nothing.")
    ] = AUTO,
    exact_floor: Annotated[int, typer.Option(help="Tokens that are exact at least.")] = 128,
    dram_budget: Annotated[
        str | None,
        typer.Option(help="Memory, like 2GiB or 25%: say whether all codes and keys fit it."),
    ] = None,
    launch_us: Annotated[
        float, typer.Option(help="Microseconds from the host's call to the kernel's start.")
    ] = _COSTS.start * 1e6,
    copy_us: Annotated[
        float, typer.Option(help="Microseconds before the first byte of a copy, to or from a card.")
    ] = _COSTS.copy * 1e6,
    copy_rate: Annotated[float, typer.Option(help="GB/s of such copies.")] = _COSTS.copy_rate / 1e9,
    poll_us: Annotated[
        float, typer.Option(help="Microseconds between two looks at the status.")
    ] = _COSTS.poll * 1e6,
    host_rate: Annotated[
        float | None,
        typer.Option(help="GB/s of shadow that one host thread scores; by default as measured."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what a scoring kernel would do on a card, and what a decode step needs: modelled."""
    if preset not in PRESETS:
        raise SettingsError(f"no preset is named '{preset}'; there are {', '.join(PRESETS)}")
    if not 1 <= tokens <= _MOST_TOKENS:
        raise SettingsError(f"--tokens {tokens} is outside 1..{_MOST_TOKENS}")
    if host_rate is not None and not 0 < host_rate < math.inf:
        raise SettingsError(f"--host-rate {host_rate:g} must be above 0 and finite")
    try:
        costs = LaunchCosts(launch_us / 1e6, copy_us / 1e6, copy_rate * 1e9, poll_us / 1e6)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    layers = PRESETS[preset].layers
    budget = None if dram_budget is None else ByteSize.parse(dram_budget)
    settings = Settings().changed(alpha=alpha, exact=exact, exact_floor=exact_floor)
    columns: list[Column] = []
    for mode in dict.fromkeys(key_mode or KeyMode):
        spec = preset_spec(preset, mode, rule)
        check_hardware_spec(spec)
        need = step_need(spec, scope, layers, tokens, settings.step_share)
        card = card_figures(spec, scope, tokens, costs, host_rate and host_rate * 1e9)
        columns.append((spec, kernel_figures(spec, scope, layers, tokens), need, card))
    if as_json:
        rows = [_as_json(*column, budget) for column in columns]
        label = {"preset": preset, "scope": scope.value, "tokens": tokens, "label": "modelled"}
        print(json.dumps({**label, "costs": asdict(costs), "rows": rows}, indent=2))
        return
    console = Console(markup=False, highlight=False, emoji=False)
    _show_specs(console, preset, scope, tokens, budget, columns)


def _as_json(
    spec: KernelSpec,
    figures: KernelFigures,
    need: StepNeed,
    card: CardFigures,
    budget: ByteSize | None,
) -> dict[str, Any]:
    identity = {
        "mode": spec.key_mode.value,
        "rule": spec.rule.value,
        "product_style": spec.product_style.value,
        "spec_hash": spec.digest().hex(),
        "block_rams": block_rams(spec),
    }
    held = None if budget is None else budget.resolve(need.kv_bytes)
    fits = None if held is None or not need.all_code_bytes else need.codes_and_shadow_bytes <= held
    step = {**asdict(need), "budget_bytes": held, "all_codes_fit": fits}
    beside = {**asdict(card), "host_threads": card.speedup}
    return {**identity, **asdict(figures), "step": step, "card": beside}


# --- `hillinfer` ---

_BEGINNING = """\
HillInfer answers from long texts with the KV cache on a drive. Three things to do:

  hillinfer chat book.txt
      talk about a text in this terminal
  hillinfer generate --prompt-file book.txt --question "Who is Mr Collins?"
      answer once, for scripts
  hillinfer serve
      be a server for OpenAI's clients, with a page for a browser

hillinfer doctor says what this machine can do, hillinfer models which models it has.
hillinfer --help lists all commands."""

main = Program(
    "hillinfer",
    "Long-context LLM inference with the KV cache on a drive.",
    (
        Brief(generate, SHOWN),
        chat,
        Brief(serve, SHOWN_OF_SERVE),
        PassingOn(lm_eval),
        doctor,
        fetch,
        models,
        specs,
        prune_profile,
        CommandGroup(
            "store",
            "Keep what was read, for other runs, processes and days.",
            (*COMMANDS, *DOCUMENT_COMMANDS),
        ),
        CommandGroup(
            "documents",
            "Forms of stored documents: what each loses, and which had better lie where.",
            CATALOGUE_COMMANDS,
        ),
    ),
    _BEGINNING,
)
