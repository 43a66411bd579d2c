# SPDX-License-Identifier: Apache-2.0
"""EleutherAI's harness itself, in the environment that `make lm-eval-test` makes."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = [pytest.mark.lm_eval, pytest.mark.model]
POINT = "hillinfer.harness.model:HillInferLM"
TASKS = ("hillinfer_needle", "hillinfer_choice", "hillinfer_perplexity", "hillinfer_lines")
SAME = 1e-3
SIZES = json.dumps({"words": 300, "questions": 1, "lines_each": 12})


@pytest.fixture(scope="module", autouse=True)
def _harness():
    """Other environments lack the harness, where these tests are asked for by their file."""
    if find_spec("lm_eval") is None:
        missing = "lm_eval is missing: `make lm-eval-test` installs it and runs these"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)


def evaluated(tmp_path, *arguments):
    """Return what the harness reports, run as a user runs it."""
    program = "from hillinfer_command import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, "lm-eval", *map(str, arguments), "--output_path", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    (file,) = tmp_path.rglob("results_*.json")
    return json.loads(file.read_text(encoding="utf-8"))["results"]


def figures(results):
    return {
        f"{task} {name}": value
        for task, found in results.items()
        for name, value in found.items()
        if isinstance(value, float) and "stderr" not in name
    }


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory, smollm2_folder):
    """What the harness' own class for transformers finds."""
    return figures(
        evaluated(
            tmp_path_factory.mktemp("hf"),
            *("--model", "hf", "--model_args", f"pretrained={smollm2_folder},dtype=float32"),
            *("--device", "cpu", "--tasks", ",".join(TASKS), "--metadata", SIZES),
        )
    )


def own(tmp_path, cold_dir, alpha):
    arguments = f"alpha={alpha},dtype=float32,cold_dir={cold_dir}"
    return figures(
        evaluated(
            tmp_path, "--model_args", arguments, "--tasks", ",".join(TASKS), "--metadata", SIZES
        )
    )


def test_at_alpha_one_it_is_the_model_hf(ordinary, tmp_path, cold_dir):
    found = own(tmp_path, cold_dir, 1.0)
    assert found.keys() == ordinary.keys()
    assert len(found) >= 8
    assert found == pytest.approx(ordinary, rel=SAME)


def test_at_a_tenth_log_likelihoods_differ(ordinary, tmp_path, cold_dir):
    found = own(tmp_path, cold_dir, 0.1)
    for name in ("hillinfer_needle perplexity,none", "hillinfer_perplexity word_perplexity,none"):
        # Of what α 1 keeps within: a perplexity of few tokens is not far off at α 0.1 either.
        assert abs(found[name] / ordinary[name] - 1) > 3 * SAME, name


def test_a_setting_that_is_none_is_one_line(tmp_path):
    program = "from hillinfer_command import main; main()"
    arguments = ("--tasks", "hillinfer_choice", "--model_args", "alhpa=1")
    ended = subprocess.run(
        [sys.executable, "-c", program, "lm-eval", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 2
    assert "'alhpa' is no setting" in ended.stderr.splitlines()[-1]


def test_a_task_that_is_none_is_one_line():
    program = "from hillinfer_command import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, "lm-eval", "--tasks", "no_such_task"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 2
    assert "no_such_task" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_entry_point_is_the_class():
    from importlib.metadata import EntryPoint, entry_points

    from lm_eval.models.huggingface import HFLM

    points = entry_points(group="lm_eval.models", name="hillinfer")
    # An installation that is older than the checkout has none.
    point = next(iter(points), None) or EntryPoint("hillinfer", POINT, "lm_eval.models")
    assert point.value == POINT
    assert issubclass(point.load(), HFLM)
