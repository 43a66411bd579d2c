# SPDX-License-Identifier: Apache-2.0
"""`--projections` on a tiny model, end to end."""

from contextlib import contextmanager

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook


@pytest.mark.parametrize("name", ["fused", "prepacked", "fp16", "int8"])
def test_report_names_the_projections_and_says_what_they_hold(ask_tiny, name):
    outcome, report = ask_tiny("--question", "which cat?", "--projections", name)
    assert report["settings"]["projections"] == name
    assert f"projections: {name}, " in outcome.err
    assert report["new_tokens"] > 0


@contextmanager
def linear_layers():
    """Give of each call of a linear layer which it is, its rows, and whether it is covered."""
    told = []

    def called(module, given):
        if isinstance(module, torch.nn.Linear):
            told.append((id(module), given[0].shape[-2], "forward" in vars(module)))

    hook = register_module_forward_pre_hook(called)
    try:
        yield told
    finally:
        hook.remove()


@pytest.mark.parametrize("named", [(), ("--projections", "stock")], ids=["default", "stock"])
def test_steps_alone_are_computed_otherwise_by_default(ask_tiny, named):
    with linear_layers() as told:
        outcome, report = ask_tiny("--question", "which cat?", *named, "--compare", "full")
    assert report["settings"]["projections"] == (named[1] if named else "steps")
    assert "projections" not in outcome.err
    assert report["comparison"]["texts"]
    # Prompts and the ordinary cache are the model's own.
    covered = {rows for _, rows, is_covered in told if is_covered}
    assert covered == (set() if named else {1})
    assert {(1, False), (1, True)} <= {one[1:] for one in told} or named


def test_all_answers_have_the_steps_of_the_way(ask_tiny):
    """The first one's are those of a fork."""
    with linear_layers() as told:
        _, report = ask_tiny("--question", "which cat?", "--question", "which dog?")
    # Queries are predicted besides, and the last token of an answer takes no step.
    layers = len({layer for layer, _, _ in told})
    steps = report["new_tokens"] - 2
    assert steps > 2
    assert sum(is_covered for *_, is_covered in told) >= steps * layers


@pytest.mark.parametrize("compared", [(), ("--compare", "full")], ids=["alone", "compared"])
def test_comparison_runs_with_the_same_projections(ask_tiny, compared):
    with linear_layers() as told:
        _, report = ask_tiny("--question", "which cat?", "--projections", "prepacked", *compared)
    assert bool(report["comparison"] and report["comparison"]["texts"]) == bool(compared)
    assert told
    assert all(is_covered for *_, is_covered in told)


def test_unknown_projections_are_refused(command, tiny_folder):
    outcome = command("generate", "--model", tiny_folder, "--prompt", "a", "--projections", "int9")
    assert "projections='int9' is unknown: choose one of steps, stock" in outcome.error_line()


def test_sessions_go_with_the_models_own_prompts_only(command, tiny_folder, tmp_path):
    outcome = command(
        *("generate", "--model", tiny_folder, "--prompt", "a", "--projections", "fp16"),
        *("--save-session", tmp_path / "kept"),
    )
    assert "use --projections steps with sessions" in outcome.error_line()
