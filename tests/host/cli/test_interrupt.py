# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C keeps the text generated so far, writes the report and ends with 130."""

import signal
import subprocess
import sys

from command import read_report

COMMAND = (sys.executable, "-c", "from hillinfer.cli.main import main; main()")


def started(*arguments, **pipes):
    return subprocess.Popen(
        [*COMMAND, *(str(argument) for argument in arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **pipes,
    )


def test_interrupt_keeps_text_and_report(tiny_folder, cold_dir, document, tmp_path):
    report = tmp_path / "run.json"
    process = started(
        *("generate", "--model", tiny_folder, "--prompt-file", document, "--cold-dir", cold_dir),
        *("--max-new-tokens", 3000, "--dram-budget", "64MiB", "--threads", 1, "--report", report),
        *("--temperature", 5),
    )
    first = process.stdout.read(2)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=120)
    assert process.returncode == 130, err.decode()
    assert b"Traceback" not in err
    assert err.decode().splitlines()[-1] == "hillinfer: interrupted"
    answer = read_report(report)["answers"][0]
    assert answer["finish"] == "interrupted"
    assert (first + rest).decode() == answer["text"] + "\n"
    assert 0 < len(answer["token_ids"]) < 3000


def test_reader_that_leaves_ends_the_command_quietly(tiny_folder, cold_dir, document):
    process = started(
        *("generate", "--model", tiny_folder, "--prompt-file", document, "--cold-dir", cold_dir),
        *("--max-new-tokens", 3000, "--dram-budget", "64MiB", "--threads", 1),
        *("--temperature", 5),
    )
    process.stdout.read(2)
    process.stdout.close()
    err = process.stderr.read()
    process.wait(timeout=120)
    process.stderr.close()
    assert process.returncode not in (0, 2)
    assert b"Traceback" not in err, err.decode()
