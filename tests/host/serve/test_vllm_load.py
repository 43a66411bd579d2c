# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve` as load, where vLLM is installed: CI and `make vllm-load` install the part."""

import json
import os
import subprocess
from pathlib import Path

import pytest

# Where `make vllm-load` installs that part and `make peers` all of it; the variable names another.
_BUILD = Path(__file__).parents[3] / "build"
_INSTALLED = (_BUILD / "vllm-load-env/bin/python", _BUILD / "peers/vllm/bin/python")
_VARIABLE = "HILLINFER_VLLM_PYTHON"
# What the command `vllm bench serve` calls: the command itself asks for the name of a package that
# its builds for processors do not have.
_BENCH_SERVE = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
_PROMPTS, _INPUT, _OUTPUT, _AT_ONCE = 8, 20, 6, 4


@pytest.fixture
def vllm():
    """The interpreter that has vLLM."""
    named = os.environ.get(_VARIABLE)
    if named:
        # Whoever names one wants the test to run.
        assert Path(named).is_file(), f"{_VARIABLE}={named} is no file"
        return Path(named)
    for one in _INSTALLED:
        if one.is_file():
            return one
    pytest.skip(f"vLLM is not installed: `make vllm-load` (or {_VARIABLE}=.../python)")


def test_vllm_bench_serve_has_every_request_answered(tiny_server, vllm, endless_folder, tmp_path):
    answered = len(tiny_server.logged("answered"))
    ended = subprocess.run(
        [
            *(vllm, "-c", _BENCH_SERVE, "--backend", "openai-chat"),
            *("--base-url", tiny_server.url, "--endpoint", "/v1/chat/completions"),
            *("--model", "tiny", "--tokenizer", endless_folder, "--dataset-name", "random"),
            *("--random-input-len", str(_INPUT), "--random-output-len", str(_OUTPUT)),
            *("--num-prompts", str(_PROMPTS), "--max-concurrency", str(_AT_ONCE), "--ignore-eos"),
            *("--save-result", "--result-dir", tmp_path, "--result-filename", "load.json"),
        ],
        # It asks nobody else.
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    told = json.loads((tmp_path / "load.json").read_text())
    assert (told["completed"], told["failed"]) == (_PROMPTS, 0)
    assert told["total_output_tokens"] == _PROMPTS * _OUTPUT
    # One more looks whether the server is there.
    assert len(tiny_server.logged("answered")) - answered >= _PROMPTS
