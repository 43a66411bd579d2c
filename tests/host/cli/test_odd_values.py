# SPDX-License-Identifier: Apache-2.0
"""Odd values of options and odd places for texts end in one line or work; none hangs or breaks."""

import inspect
import os

import pytest
from command import PLAIN

from hillinfer.cli.ending import one_line
from hillinfer.cli.generate import generate
from hillinfer.cli.main import doctor, specs
from hillinfer.generate.prompt import MOST_BYTES
from hillinfer_bench.cli.main import decode, pools, quality

ODD = {
    "empty": "",
    "space": " ",
    "negative": "-1",
    "zero": "0",
    "endless": "1e400",
    "huge": "1" + 30 * "0",
    "nan": "nan",
    "infinite": "-inf",
    "control": "\x1b[31m\x07\r\n",
    "half": "\udcff",
    "digit": "\u0663",
    "long": "x" * 5000,
}
PATHS = {"pool_timeline", "trace", "cold_dir", "xclbin", "pynq_python", "report", "out"}
PATHS |= {"save_session", "session", "prompt_file", "texts"}
# What makes another option's value matter.
ALSO = {
    "top_p": ("--temperature", "1"),
    "top_k": ("--temperature", "1"),
    "seed": ("--temperature", "1"),
    "xclbin": ("--device", "xrt"),
    "dram_budget": ("--profile", "no-shape"),
    "context": ("--profile", "no-shape"),
}


def options(function, leave_out=()):
    names = inspect.signature(function).parameters
    flags = {"interactive", "sparse_question", "as_json", *leave_out}
    return [name for name in names if name not in flags]


def check(outcome):
    """Accept success, or one line and exit status 2; nothing that moves a cursor either way."""
    assert "Traceback" not in outcome.err
    assert "\x1b" not in outcome.err
    assert "defect" not in outcome.err
    if outcome.code != 0:
        assert len(outcome.error_line()) < 3000
        assert outcome.out == ""


def given(name, value):
    return f"--{name.replace('_', '-')}={value}"


@pytest.fixture
def inside(tmp_path, monkeypatch):
    """A folder for what odd names make."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.mark.parametrize("odd", ODD)
def test_every_option_of_generate_with_a_model(
    command, inside, tiny_folder, cold_dir, document, odd
):
    # A run each: every option gets what overflows and a quarter of the others here, and all of
    # them below.
    turn = list(ODD).index(odd)
    for name in options(generate) if odd == "huge" else options(generate)[turn % 4 :: 4]:
        base = {
            "model": ("--model", tiny_folder),
            "prompt_file": ("--prompt-file", document),
            "cold_dir": ("--cold-dir", cold_dir),
            "max_new_tokens": ("--max-new-tokens", 2),
            "dram_budget": ("--dram-budget", "64MiB"),
            "prompt_style": PLAIN,
        }
        base.pop(name, None)
        if name == "prompt":
            base.pop("prompt_file")
        also = ALSO.get(name, ()) if name != "dram_budget" else ()
        words = [word for pair in base.values() for word in pair]
        check(command("generate", *words, *also, given(name, ODD[odd])))


@pytest.mark.parametrize(
    "function", [generate, quality, pools, decode, doctor, specs], ids=lambda f: f.__name__
)
def test_every_option_without_a_model(command, inside, function):
    # No model is there, so nothing that is right runs for long.
    for odd, value in ODD.items():
        for name in options(function, ("preset",)):
            base = ("--model=/no/model",) if function not in (doctor, specs) else ()
            base = () if name == "model" else base
            base += ("--prompt=text",) if function is generate and "prompt" not in name else ()
            profile = ("--profile", "no-shape") if function is doctor and name != "profile" else ()
            preset = ("smollm2-135m",) if function is specs else ()
            # What is modelled of few tokens in one format takes a hundredth of a second.
            few = {"tokens": ("--tokens", 64), "key_mode": ("--key-mode", "int4")}
            few.pop(name, None)
            preset += tuple(word for pair in few.values() for word in pair) if preset else ()
            if function is specs and odd in ("zero", "digit") and name == "tokens":
                continue
            check(command(function.__name__, *preset, *base, *profile, given(name, value)))


def fifo(folder):
    os.mkfifo(folder / "fifo")
    return folder / "fifo", "is empty"


def sparse(folder):
    with (folder / "sparse").open("wb") as file:
        file.truncate(10 << 30)
    return folder / "sparse", "10.0 GiB or more, and no text longer than 256.0 MiB is read"


def endless(folder):
    return "/dev/zero", "no text longer than 256.0 MiB is read"


def nothing(folder):
    return "/dev/null", "is empty"


def folder_itself(folder):
    return folder, "Is a directory"


def memory(folder):
    return "/proc/self/mem", "cannot read the"


def too_long(folder):
    return folder / ("x" * 300), "File name too long"


def loop(folder):
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop", "Too many levels of symbolic links"


TEXTS = (fifo, sparse, endless, nothing, folder_itself, memory, too_long, loop)


@pytest.mark.parametrize("place", TEXTS, ids=lambda place: place.__name__)
def test_a_prompt_file_that_is_none(command, tmp_path, place):
    file, said = place(tmp_path)
    line = command("generate", "--model", "/no/model", "--prompt-file", file).error_line()
    assert said in line


def test_a_pipe_with_a_writer_is_read(command, tiny_folder, cold_dir, document, tmp_path):
    # As a shell's <(...) gives it; the writer is there before the reader.
    reading, writing = os.pipe()
    os.write(writing, document.read_bytes())
    os.close(writing)
    arguments = ("generate", "--model", tiny_folder, "--cold-dir", cold_dir, "--max-new-tokens", 4)
    piped = command(*arguments, "--prompt-file", f"/proc/self/fd/{reading}")
    os.close(reading)
    assert piped.code == 0, piped.err
    assert piped.out == command(*arguments, "--prompt-file", document).out


def test_a_text_that_no_model_holds_is_refused_before_it_is_made_tokens(
    command, tiny_folder, cold_dir, tmp_path
):
    file = tmp_path / "long.txt"
    file.write_text("a cat " * (5 << 20))
    assert file.stat().st_size < MOST_BYTES
    arguments = ("generate", "--model", tiny_folder, "--cold-dir", cold_dir)
    line = command(*arguments, "--prompt-file", file).error_line()
    assert "a prompt of 31457280 characters is more than the model's 4096 positions hold" in line
    question = ("--prompt", "text", "--question", "why " * (5 << 19))
    assert "a prompt of 10485760 characters" in command(*arguments, *question).error_line()


def test_bytes_that_are_no_text_are_named(command):
    for option in ("--prompt", "--question"):
        words = ("--prompt", "text", "--question", "who?", option, "caf\udce9")
        words = words[2:] if option == "--prompt" else words
        line = command("generate", "--model", "/no/model", *words).error_line()
        assert f"the text after {option} is not UTF-8 (character 3)" in line
    for words in (
        *(("generate", "--prompt", "text"), ("serve", "--port", "0")),
        *(("store", "forget"), ("store", "export", "a", "b"), ("store", "put", "--prompt", "text")),
    ):
        line = command(*words, "--store", "/no/store", "--salt", "caf\udce9").error_line()
        assert "the text after --salt is not UTF-8 (character 3)" in line


def test_interactive_goes_on_after_a_line_that_is_no_text(command, tiny_folder, cold_dir, document):
    arguments = (
        *("generate", "--model", tiny_folder, "--prompt-file", document, "--interactive"),
        *("--cold-dir", cold_dir, "--max-new-tokens", 8, "--dram-budget", "64MiB"),
    )
    expected = command(*arguments, stdin="where?\n")
    odd = b"wh\xffo?\n" + b"x" * (3 << 20) + b"\nwhere?\n"
    outcome = command(*arguments, stdin=odd)
    assert (outcome.code, outcome.out) == (0, expected.out)
    assert "hillinfer: this question is not UTF-8 text (byte 2): ask it again" in outcome.err
    assert "longer than 1048576 bytes: ask a shorter one" in outcome.err


def test_a_line_stays_a_line():
    assert one_line("a\nb\x1b[31m\u202e c") == "a b\\x1b[31m\\u202e c"
    long = one_line("begin" + "x" * 10**6 + "end")
    assert len(long) < 2000
    assert (long[:5], long[-3:]) == ("begin", "end")


def test_a_temperature_that_no_logit_can_be_divided_by_is_named(command, tiny_folder, cold_dir):
    arguments = ("generate", "--model", tiny_folder, "--cold-dir", cold_dir, "--prompt", "a cat")
    arguments += (*PLAIN, "--max-new-tokens", 3, "--dram-budget", "64MiB", "--temperature")
    line = command(*arguments, "1e-40").error_line()
    assert "temperature=1e-40" in line
    assert "use 0" in line
    # The least there is takes the likeliest tokens.
    least, greedy = (command(*arguments, one) for one in ("1e-30", "0"))
    assert least.code == greedy.code == 0
    assert least.out == greedy.out
