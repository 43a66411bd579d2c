# SPDX-License-Identifier: Apache-2.0
"""Runs the real command, in this process or as one of its own."""

import io
import json
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest

from hillinfer_bench.cli.programs import main_of

# A chat template is rendered by processes of its own, which take longer than all else that a tiny
# model does: runs go without one where it is not what is looked at. The last of an option counts.
PLAIN, CHAT = ("--prompt-style", "plain"), ("--prompt-style", "auto")


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    def error_line(self):
        """Return the one line of an error that a user can act on; fail on anything else."""
        assert self.code == 2, self
        lines = [line for line in self.err.splitlines() if line.startswith("hillinfer: error: ")]
        assert len(lines) == 1, self.err
        assert self.err.splitlines()[-1] == lines[0], self.err
        assert "Traceback" not in self.err
        return lines[0]


class Command:
    """Calls `main` with arguments and gives back what a shell would see."""

    def __init__(self, monkeypatch, capfd):
        self._monkeypatch = monkeypatch
        self._capfd = capfd

    def __call__(self, *arguments, stdin="", around=None):
        data = stdin if isinstance(stdin, bytes) else stdin.encode()
        with self._monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
            self._capfd.readouterr()
            with pytest.raises(SystemExit) as ended:
                main_of(arguments)([str(argument) for argument in arguments], around)
        out, err = self._capfd.readouterr()
        return Outcome(ended.value.code or 0, out, err)


class Started:
    """Starts the command as a process, with `subprocess`' own object to hold it."""

    def __init__(self, python):
        self._python = python

    def __call__(self, *arguments, stdin=None, stderr=subprocess.PIPE, prepare=None):
        program = "from hillinfer_command import main; main()"
        return subprocess.Popen(
            [*self._python, "-c", program, *(str(argument) for argument in arguments)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            preexec_fn=prepare or default_interrupts,
        )


def default_interrupts():
    # A shell that started the tests in the background made every process ignore interrupts.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def files_of_one_page():
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def files_of_320_rows():
    resource.setrlimit(resource.RLIMIT_FSIZE, (320 * 128, 320 * 128))


def read_report(file):
    return json.loads(file.read_text(encoding="utf-8"))
