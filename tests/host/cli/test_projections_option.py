# SPDX-License-Identifier: Apache-2.0
"""`--projections` on a tiny model, end to end."""

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook


@pytest.mark.parametrize("name", ["fused", "prepacked", "fp16", "int8"])
def test_report_names_the_projections_and_says_what_they_hold(ask_tiny, name):
    outcome, report = ask_tiny("--question", "which cat?", "--projections", name)
    assert report["settings"]["projections"] == name
    assert f"projections: {name}, " in outcome.err
    assert report["new_tokens"] > 0


def test_stock_is_the_default_and_says_nothing(ask_tiny):
    outcome, report = ask_tiny("--question", "which cat?")
    assert report["settings"]["projections"] == "stock"
    assert "projections" not in outcome.err


@pytest.mark.parametrize("compared", [(), ("--compare", "full")], ids=["alone", "compared"])
def test_comparison_runs_with_the_same_projections(ask_tiny, compared):
    covered = []

    def called(module, given):
        if isinstance(module, torch.nn.Linear):
            covered.append("forward" in vars(module))

    hook = register_module_forward_pre_hook(called)
    try:
        _, report = ask_tiny("--question", "which cat?", "--projections", "prepacked", *compared)
    finally:
        hook.remove()
    assert bool(report["comparison"] and report["comparison"]["texts"]) == bool(compared)
    assert covered
    assert all(covered)


def test_unknown_projections_are_refused(command, tiny_folder):
    outcome = command("generate", "--model", tiny_folder, "--prompt", "a", "--projections", "int9")
    assert "projections='int9' is unknown: choose one of stock, fused" in outcome.error_line()


def test_sessions_go_with_stock_projections_only(command, tiny_folder, tmp_path):
    outcome = command(
        *("generate", "--model", tiny_folder, "--prompt", "a", "--projections", "fp16"),
        *("--save-session", tmp_path / "kept"),
    )
    assert "use --projections stock with sessions" in outcome.error_line()
