# SPDX-License-Identifier: Apache-2.0
"""From the first moment on, a command ends in one of its ways: while it is imported, too."""

import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def default_signals():
    # A shell that started the tests in the background made every process ignore interrupts.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def hang_up_ignored():
    default_signals()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def program(text, *arguments, python=(sys.executable,), prepare=default_signals, **variables):
    return subprocess.run(
        [*python, "-c", text, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        preexec_fn=prepare,
        env=os.environ | variables,
    )


def when(module, happens):
    """Return a program that calls the command, and does something when a module is imported."""
    return f"""
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            {happens}

sys.meta_path.insert(0, Finder())
from hillinfer_command import main
main()
"""


# One handler takes all signals, whatever is imported when they come.
@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("hillinfer", signal.SIGINT),
        ("hillinfer", signal.SIGTERM),
        ("numpy", signal.SIGHUP),
        ("typer", signal.SIGTERM),
        ("typer", signal.SIGINT),
        ("hillinfer_model.presets", signal.SIGHUP),
    ],
)
def test_a_signal_while_the_command_is_imported(module, number):
    ended = program(when(module, f"os.kill(os.getpid(), {int(number)})"), "models")
    assert (ended.returncode, ended.stdout) == (128 + number, "")
    assert ended.stderr == f"hillinfer: interrupted ({number.name})\n"


def test_a_signal_that_was_ignored_stays_so():
    text = when("numpy", f"os.kill(os.getpid(), {int(signal.SIGHUP)})")
    ended = program(text, "models", prepare=hang_up_ignored)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "smollm2" in ended.stdout


def caught(process):
    """Whether a process has come to take all signals, which Python itself does not."""
    status = Path("/proc", str(process.pid), "status").read_text(encoding="ascii")
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return all(int(mask, 16) >> (number - 1) & 1 for number in SIGNALS)


# One handler takes all signals, whatever is imported when they come.
@pytest.mark.parametrize(
    ("seconds", "number"),
    [
        (0.0, signal.SIGINT),
        (0.0, signal.SIGTERM),
        (0.1, signal.SIGINT),
        (0.2, signal.SIGTERM),
        (0.4, signal.SIGINT),
    ],
)
def test_a_signal_soon_after_the_start(number, seconds):
    # It waits for a text on standard input in the end, so it does not get further than that.
    process = subprocess.Popen(
        [sys.executable, "-c", "from hillinfer_command import main; main()", "generate"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=default_signals,
    )
    until = time.monotonic() + 60
    while not caught(process):
        assert time.monotonic() < until
        time.sleep(0.002)
    time.sleep(seconds)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + number, b"")
    assert err.decode() == f"hillinfer: interrupted ({number.name})\n"


@pytest.mark.parametrize("number", SIGNALS[:2], ids=lambda number: number.name)
def test_a_signal_while_options_are_read(warm_python, number):
    """The library that reads them has an end of its own for interrupts, which says nothing."""
    text = f"""
import os
import typer.core
from hillinfer_command import main

read = typer.core.TyperGroup.parse_args

def struck(self, *given):
    os.kill(os.getpid(), {int(number)})
    return read(self, *given)

typer.core.TyperGroup.parse_args = struck
main()
"""
    ended = program(text, "models", python=warm_python)
    assert (ended.returncode, ended.stdout) == (128 + number, "")
    assert ended.stderr == f"hillinfer: interrupted ({number.name})\n"


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_while_handlers_change(warm_python, number):
    text = f"""
import os, signal, sys
from hillinfer.cli.ending import run_to_end

change, left = signal.signal, [{int(number)}]

def changed(number, handler):
    before = change(number, handler)
    if number in left:
        left.remove(number)
        os.kill(os.getpid(), number)
    return before

before = [signal.getsignal(one) for one in (1, 2, 15)]
signal.signal = changed
status = run_to_end(lambda: 0)
assert [signal.getsignal(one) for one in (1, 2, 15)] == before
sys.exit(status)
"""
    ended = program(text, python=warm_python)
    assert ended.stderr == f"hillinfer: interrupted ({number.name})\n"
    assert ended.returncode == 128 + number


@pytest.mark.parametrize(
    ("arguments", "status", "numbers"),
    [(["models"], 0, SIGNALS[:2]), (["models", "--no"], 2, SIGNALS[2:])],
)
def test_a_signal_after_the_end_changes_nothing(warm_python, arguments, status, numbers):
    plain = program("from hillinfer_command import main; main()", *arguments, python=warm_python)
    for number in numbers:
        # The interpreter's own end is looked at once: what is called in it is the same.
        python = (sys.executable,) if number == signal.SIGINT else warm_python
        text = f"""
import atexit, os
from hillinfer_command import main

atexit.register(os.kill, os.getpid(), {int(number)})
main()
"""
        ended = program(text, *arguments, python=python)
        assert ended.returncode == plain.returncode == status
        assert (ended.stdout, ended.stderr) == (plain.stdout, plain.stderr)
        assert "interrupted" not in ended.stderr


@pytest.mark.parametrize("error", ["MemoryError()", "ImportError('no\\n\\x1b[2J file')"])
def test_a_command_that_cannot_be_loaded_is_one_line(error):
    ended = program(when("typer", f"raise {error}"), "models")
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("hillinfer: error: the command cannot be loaded: ")
    assert line.isprintable()
    assert error.partition("(")[0] in line
    shown = program(when("typer", f"raise {error}"), "models", HILLINFER_TRACEBACK="1")
    assert "Traceback" in shown.stderr
    assert shown.stderr.splitlines()[-1] == line


def test_the_script_calls_what_takes_signals_first():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"] == {"hillinfer": "hillinfer_command:main"}


@pytest.mark.parametrize("command", ["hillinfer.cli.main", "hillinfer_bench.cli.main"])
def test_a_command_says_how_threads_wait_before_torch_is_loaded(command):
    """OpenMP reads it when torch is loaded: threads that spin would be part of every figure."""
    ran = f"""
import os, sys
import {command} as own
for given in ({{}}, {{"OMP_WAIT_POLICY": "active"}}):
    os.environ.pop("OMP_WAIT_POLICY", None)
    os.environ.update(given)
    try:
        own.main(["--help"])
    except SystemExit:
        print("torch" in sys.modules, os.environ["OMP_WAIT_POLICY"])
"""
    said = program(ran).stdout.splitlines()
    assert [line for line in said if line in ("False passive", "False active")] == [
        "False passive",
        "False active",
    ]
