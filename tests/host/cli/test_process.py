# SPDX-License-Identifier: Apache-2.0
"""The command as a process of its own: interrupts, readers that leave, shared outputs."""

import os
import signal
import subprocess

from command import PLAIN, files_of_320_rows, files_of_one_page, read_report


def test_interrupt_keeps_text_and_report(started, tiny_folder, cold_dir, document, tmp_path):
    report = tmp_path / "run.json"
    process = started(
        *("generate", "--model", tiny_folder, "--prompt-file", document, "--cold-dir", cold_dir),
        *PLAIN,
        *("--max-new-tokens", 3000, "--dram-budget", "64MiB", "--threads", 1, "--report", report),
        *("--temperature", 5),
    )
    # Nothing but these: `communicate` does not look at what else a buffer would have taken.
    first = os.read(process.stdout.fileno(), 2)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=120)
    assert process.returncode == 130, err.decode()
    assert b"Traceback" not in err
    assert err.decode().splitlines()[-1].startswith("hillinfer: interrupted (SIGINT)")
    answer = read_report(report)["answers"][0]
    assert answer["finish"] == "interrupted"
    assert (first + rest).decode() == answer["text"] + "\n"
    assert 0 < len(answer["token_ids"]) < 3000


def test_reader_that_leaves_ends_the_command_quietly(started, tiny_folder, cold_dir, document):
    process = started(
        *("generate", "--model", tiny_folder, "--prompt-file", document, "--cold-dir", cold_dir),
        *PLAIN,
        *("--max-new-tokens", 3000, "--dram-budget", "64MiB", "--threads", 1),
        *("--temperature", 5),
    )
    process.stdout.read(2)
    process.stdout.close()
    err = process.stderr.read()
    process.wait(timeout=120)
    process.stderr.close()
    assert process.returncode == 141
    assert b"Traceback" not in err, err.decode()
    assert b"Exception ignored" not in err, err.decode()
    assert err.decode().splitlines()[-1].startswith("hillinfer: error: nobody reads")


def test_interrupt_while_reading_ends_in_one_line(started, tiny_folder, cold_dir, tmp_path):
    document = tmp_path / "long.txt"
    document.write_text("a cat sat on a mat. " * 200)
    process = started(
        *("generate", "--model", tiny_folder, "--prompt-file", document, "--cold-dir", cold_dir),
        *PLAIN,
        # A token at a time takes long enough to be interrupted.
        *("--threads", 1, "--prefill-chunk", 1, "--max-new-tokens", 2),
    )
    for line in process.stderr:
        if line.startswith(b"prefill: "):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err.decode()
    assert out == b""
    assert b"Traceback" not in err
    assert err.decode().splitlines()[-1].startswith("hillinfer: interrupted (SIGINT)")


def test_progress_does_not_cut_the_text_where_both_go_to_one_place(
    started, tiny_folder, cold_dir, document, tmp_path
):
    arguments = (
        *("generate", "--model", tiny_folder, "--prompt-file", document, "--cold-dir", cold_dir),
        *PLAIN,
        *("--threads", 1, "--max-new-tokens", 12),
    )
    apart = started(*arguments)
    text, err = apart.communicate(timeout=120)
    assert b"decode: " in err
    together, _ = started(*arguments, stderr=subprocess.STDOUT).communicate(timeout=120)
    assert b"decode: " not in together
    assert text in together


def test_a_drive_that_takes_no_more_ends_in_one_line(
    started, tiny_folder, cold_dir, document, tmp_path
):
    report = tmp_path / "run.json"
    process = started(
        *("generate", "--model", tiny_folder, "--prompt-file", document, "--cold-dir", cold_dir),
        *PLAIN,
        *("--threads", 1, "--max-new-tokens", 3, "--dram-budget", "64MiB"),
        *("--prefill-chunk", 50, "--report", report),
        prepare=files_of_one_page,
    )
    out, err = process.communicate(timeout=120)
    last = err.decode().splitlines()[-1]
    # The run broke in the middle: 1, and 2 only for what could be refused before.
    assert process.returncode == 1, err.decode()
    assert b"Traceback" not in err
    assert out == b""
    assert last.startswith("hillinfer: error: could not write")
    assert "rows of layer" in last
    assert "--cold-dir" in last
    # One page is what the limit lets any file have, the report too.
    assert "cannot write the report" in last or read_report(report)["finish"] == "failed"


def test_a_drive_that_fills_up_while_answering_costs_no_text(
    started, tiny_folder, cold_dir, document, tmp_path
):
    report = tmp_path / "run.json"
    arguments = (
        *("generate", "--model", tiny_folder, "--prompt-file", document, "--cold-dir", cold_dir),
        *PLAIN,
        *("--threads", 1, "--max-new-tokens", 160, "--dram-budget", "64MiB", "--report", report),
        *("--temperature", 5, "--question", "who sat? ", "--question", "where? "),
    )
    process = started(*arguments, prepare=files_of_320_rows)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, err.decode()
    assert b"Traceback" not in err
    last = err.decode().splitlines()[-1]
    assert last.startswith("hillinfer: error: could not write")
    assert "File too large" in last
    told = read_report(report)
    assert told["finish"] == "failed"
    assert last.startswith(f"hillinfer: error: {told['error']}; the text so far is")
    # The second question is not asked any more.
    (answer,) = told["answers"]
    assert answer["finish"] == "failed"
    assert answer["error"] == told["error"]
    assert out.decode() == answer["text"] + "\n"
    assert 50 < len(answer["token_ids"]) < 160
    rows = told["document_tokens"] + answer["question_tokens"] + len(answer["token_ids"])
    assert rows >= 384
    # On a drive with room the same tokens come, and more.
    process = started(*arguments)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err.decode()
    whole = read_report(report)
    assert (whole["finish"], whole["error"]) == ("stop", None)
    ids = whole["answers"][0]["token_ids"]
    assert len(whole["answers"]) == 2
    assert ids[: len(answer["token_ids"])] == answer["token_ids"]
    assert len(ids) > len(answer["token_ids"])
    assert list(cold_dir.iterdir()) == []


def test_a_report_that_cannot_be_written_shows_before_anything_is_read(
    started, tiny_folder, cold_dir, document
):
    process = started(
        *("generate", "--model", tiny_folder, "--prompt-file", document, "--cold-dir", cold_dir),
        *PLAIN,
        *("--max-new-tokens", 3, "--report", document / "run.json"),
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert out == b""
    assert err.decode().splitlines() == [err.decode().strip()]
    assert "choose another --report" in err.decode()
