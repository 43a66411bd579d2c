# SPDX-License-Identifier: Apache-2.0
"""What the harness is called with, and what is said where it is not there."""

import sys

import pytest

from hillinfer.cli.main import completed


def test_model_and_tasks_of_the_project_are_added():
    word, *rest = completed(["--tasks", "hillinfer_choice"])
    assert word == "run"
    assert rest[:4] == ["--tasks", "hillinfer_choice", "--model", "hillinfer"]
    assert rest[4] == "--include_path"
    assert rest[5].endswith("harness/tasks")


@pytest.mark.parametrize("model", [("--model", "hf"), ("--model=hf",), ("-M", "hf")])
def test_what_is_named_stays(model):
    given = [*model, "--include_path", "mine"]
    assert completed(given) == ["run", *given]


def test_settings_from_a_file_name_the_model():
    assert "--model" not in completed(["--config", "mine.yaml"])


@pytest.mark.parametrize("word", ["ls", "validate"])
def test_other_words_get_the_tasks_alone(word):
    assert completed([word, "tasks"])[:3] == [word, "tasks", "--include_path"]


def test_help_is_the_harness_own():
    assert completed(["--help"]) == ["run", "--help"]
    assert completed([]) == ["--help"]


def test_without_the_extra_one_line_says_how_to_get_it(command, monkeypatch):
    # Python finds no module whose name stands for none.
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    line = command("lm-eval", "--tasks", "x").error_line()
    assert line.endswith("pip install 'hillinfer[run,lm-eval]'")
    assert command("lm-eval", "--help").error_line() == line
