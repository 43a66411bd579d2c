# SPDX-License-Identifier: Apache-2.0
"""`hillinfer specs`: what a model's scoring kernel would do, before anything is built."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from hillinfer.cli.specs_view import show_specs
from hillinfer.errors import SettingsError
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.hardware_spec import block_rams, check_hardware_spec
from hillinfer_model.kernel_figures import KernelFigures, kernel_figures
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.presets import PRESETS, preset_spec

_MOST_TOKENS = 2**20


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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what a scoring kernel would do on a card: beats, cycles, rates. All of it modelled."""
    if preset not in PRESETS:
        raise SettingsError(f"no preset is named '{preset}'; there are {', '.join(PRESETS)}")
    if not 1 <= tokens <= _MOST_TOKENS:
        raise SettingsError(f"--tokens {tokens} is outside 1..{_MOST_TOKENS}")
    layers = PRESETS[preset].layers
    columns: list[tuple[KernelSpec, KernelFigures]] = []
    for mode in dict.fromkeys(key_mode or KeyMode):
        spec = preset_spec(preset, mode, rule)
        check_hardware_spec(spec)
        columns.append((spec, kernel_figures(spec, scope, layers, tokens)))
    if as_json:
        rows = [_as_json(spec, figures) for spec, figures in columns]
        label = {"preset": preset, "scope": scope.value, "tokens": tokens, "label": "modelled"}
        print(json.dumps({**label, "rows": rows}, indent=2))
        return
    console = Console(markup=False, highlight=False, emoji=False)
    show_specs(console, preset, scope, tokens, columns)


def _as_json(spec: KernelSpec, figures: KernelFigures) -> dict[str, Any]:
    identity = {
        "mode": spec.key_mode.value,
        "rule": spec.rule.value,
        "product_style": spec.product_style.value,
        "spec_hash": spec.digest().hex(),
        "block_rams": block_rams(spec),
    }
    return {**identity, **asdict(figures)}
