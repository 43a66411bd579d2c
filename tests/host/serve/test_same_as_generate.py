# SPDX-License-Identifier: Apache-2.0
"""`hillinfer serve --parallel 1` answers as `hillinfer generate`, token for token."""

import json
import re
import signal
import subprocess

import openai
import pytest

PROGRAM = "from hillinfer_command import main; main()"


@pytest.fixture
def start(warm_python):
    """Start `hillinfer serve` as a process, and return it with its address."""
    begun = []

    def started(*arguments):
        process = subprocess.Popen(
            [
                *(*warm_python, "-c", PROGRAM, "serve", "--port", "0"),
                *(str(argument) for argument in arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun.append(process)
        first, ready = process.stdout.readline(), process.stdout.readline()
        assert "is ready" in ready, process.stderr.read()
        return process, re.search(r"http://\S+\d", first).group()

    yield started
    for process in begun:
        process.kill()
        process.communicate()


def generated(warm_python, file, *arguments):
    done = subprocess.run(
        [*warm_python, "-c", PROGRAM, "generate", "--report", file, *map(str, arguments)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (answer,) = json.loads(file.read_text())["answers"]
    return answer


def compare(start, warm_python, tmp_path, folder, cold_dir, prompt, tokens, sampling, more=()):
    same = ("--model", folder, "--cold-dir", cold_dir, "--threads", 1, "--prefill-chunk", 64)
    same += ("--shadow", "int4", *more)
    process, url = start(*same, "--parallel", 1, "--alias", "m")
    options = [part for name, value in sampling.items() for part in (f"--{name}", value)]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=tokens,
            logprobs=True,
            **({"temperature": 0} | sampling),
        )
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    lines = [line for line in errors.splitlines() if line.startswith("{")]
    assert prompt[:12] not in errors
    assert {json.loads(line)["event"] for line in lines} == {"ready", "answered", "request"}
    expected = generated(
        *(warm_python, tmp_path / "run.json", *same, "--prompt", prompt),
        *("--max-new-tokens", tokens, *options),
    )
    choice = answer.choices[0]
    return choice.message.content, answer.usage.completion_tokens, expected


@pytest.mark.parametrize(
    ("sampling", "coded"),
    [
        ({}, ("--alpha", 0.9, "--exact", 0.1, "--exact-floor", 40)),
        ({"temperature": 0.9, "seed": 7}, ()),
    ],
)
def test_a_tiny_model(start, warm_python, tmp_path, endless_folder, cold_dir, sampling, coded):
    prompt = "the cat sat on the mat and so on. " * 9
    found, count, expected = compare(
        start, warm_python, tmp_path, endless_folder, cold_dir, prompt, 40, sampling, coded
    )
    assert found == expected["text"]
    assert count == len(expected["token_ids"]) == 40
    assert len(found) > 20


def test_a_floor_of_exact_tokens_is_checked(command):
    line = command("serve", "--exact-floor", "-1").error_line()
    assert "exact_floor=-1 must be 0 or more tokens" in line


@pytest.mark.model
def test_the_real_model(start, warm_python, tmp_path, smollm2_folder, cold_dir):
    prompt = "Which planet is the largest of the solar system? Answer in one sentence."
    found, count, expected = compare(
        start, warm_python, tmp_path, smollm2_folder, cold_dir, prompt, 16, {}
    )
    assert found == expected["text"]
    assert count == len(expected["token_ids"])
    assert "Jupiter" in found
