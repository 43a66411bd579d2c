# SPDX-License-Identifier: Apache-2.0
"""How every command begins and ends: streams, signals, the one line and the exit status."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from types import FrameType
from typing import Any, TextIO, cast

import typer

from hillinfer.cli.console import printable
from hillinfer.errors import (
    TRACEBACK_VARIABLE,
    BrokenRunError,
    Failure,
    HillInferError,
    SettingsError,
)

# --- How a command ends ---

_RUN_MODULES = frozenset({"torch", "transformers", "safetensors", "gguf", "accelerate"})
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Whoever ends a process may send several signals at once, and means one end by them.
_ONE_END_SECONDS = 1.0
_MOST_SHOWN = 600


class ExitStatus(IntEnum):
    """What a command's exit status says; those above 128 are what a shell gives for a signal."""

    DONE = 0
    BROKEN = 1
    REFUSED = 2
    HUNG_UP = 128 + signal.SIGHUP
    INTERRUPTED = 128 + signal.SIGINT
    NO_READER = 128 + signal.SIGPIPE
    TERMINATED = 128 + signal.SIGTERM


class SignalledError(KeyboardInterrupt):
    """A signal asked for the end; its text is the signal's name."""


class OutputError(BrokenRunError):
    """Standard output takes no more."""


class NoReaderError(OutputError):
    """Whoever read standard output is gone."""


class EndedRunError(Exception):
    """A run broke in the middle and told what it could; ends the command with its cause.

    `cause` is what broke it; `addition` what the line says after the cause: where the text is.
    """

    def __init__(self, cause: BaseException, addition: str = "") -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.addition = addition


class _Carried(Exception):  # noqa: N818 - never seen outside this module
    """Takes what a command raised through typer, which has endings of its own for some."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def carried(error: BaseException) -> Exception:
    """Return what to raise inside typer so that `run_to_end` sees `error` itself."""
    return _Carried(error)


def run_to_end(command: Callable[[], object]) -> int:
    """Run a command and return its exit status, having said in one line why it ended early.

    Standard streams that are closed become `/dev/null`, so that no file of ours takes their
    number; what cannot be written to standard error is dropped; SIGINT, SIGTERM and SIGHUP are
    raised as `SignalledError`, unless whoever started this process has them ignored.
    """
    closed = _open_closed_streams()
    output, messages = _Output(sys.stdout), _Messages(sys.stderr)
    with _standard(output, messages):
        try:
            with _signals_raised() as raised:
                return _status(command, output, messages, closed, raised)
        except SignalledError as error:
            # It came in the moment in which handlers change.
            with held_signals():
                return _say_end(error)


def _status(
    command: Callable[[], object],
    output: _Output,
    messages: _Messages,
    closed: frozenset[int],
    raised: list[str],
) -> int:
    try:
        _check_output(closed)
        status = command()
        output.flush()
        if raised and status == ExitStatus.INTERRUPTED:
            # Where it is typer that was interrupted, it has this status for every signal, and says
            # nothing.
            raise SignalledError(raised[-1])
        return int(status) if isinstance(status, int) else ExitStatus.DONE
    except BaseException as error:
        with held_signals():
            return _say_end(error)
    finally:
        with held_signals():
            output.let_go()
            messages.let_go()


@contextmanager
def held_signals() -> Iterator[None]:
    """Let nobody interrupt what a run owes at its end; SIGKILL and SIGQUIT still do."""
    with _handled(lambda number, frame: None):
        yield


def _say_end(error: BaseException) -> ExitStatus:
    """Say in one line what ended the command and return its status."""
    if isinstance(error, _Carried):
        error = error.error
    addition, within = "", ExitStatus.REFUSED
    if isinstance(error, EndedRunError):
        addition, within = error.addition, ExitStatus.BROKEN
        error = error.cause
    if isinstance(error, SystemExit):
        return ExitStatus(error.code) if error.code in tuple(ExitStatus) else ExitStatus.BROKEN
    if isinstance(error, KeyboardInterrupt):
        _say(f"hillinfer: {Failure.of(error).message}{addition}")
        return _signal_status(str(error))
    if isinstance(error, typer.TyperException):
        _say(f"hillinfer: error: {error.format_message()}")
        return ExitStatus.REFUSED
    if isinstance(error, ModuleNotFoundError) and error.name in _RUN_MODULES:
        _say(f"hillinfer: error: {error.name} is not installed: pip install 'hillinfer[run]'")
        return ExitStatus.REFUSED
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exception(error)
    _say(f"hillinfer: error: {Failure.of(error).message}{addition}")
    if isinstance(error, NoReaderError):
        return ExitStatus.NO_READER
    if isinstance(error, HillInferError) and not isinstance(error, BrokenRunError):
        return within
    return ExitStatus.BROKEN


def _say(line: str) -> None:
    print(one_line(line), file=sys.stderr, flush=True)


def one_line(text: str) -> str:
    """Return a text as one line that moves no cursor: control characters become escapes.

    The middle of a very long one is left out; its beginning names what is wrong and its end the
    way out.
    """
    words = " ".join(text.split())
    if len(words) > 2 * _MOST_SHOWN:
        words = f"{words[:_MOST_SHOWN]} [...] {words[-_MOST_SHOWN:]}"
    return printable(words)


def _signal_status(name: str) -> ExitStatus:
    number = getattr(signal, name, signal.SIGINT) if name.startswith("SIG") else signal.SIGINT
    return ExitStatus(128 + number)


@contextmanager
def _signals_raised() -> Iterator[list[str]]:
    """Raise signals as errors, and give a list of the names of those that were raised."""
    last = -_ONE_END_SECONDS
    raised: list[str] = []

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        # One that came to nothing, because it was raised where Python drops exceptions, may be
        # sent again.
        if now - last >= _ONE_END_SECONDS:
            last = now
            raised.append(signal.Signals(number).name)
            raise SignalledError(raised[-1])

    with _handled(stop):
        yield raised


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let a handler take the signals that are not ignored, and put back what was there."""
    before: dict[signal.Signals, Any] = {}
    try:
        for number in _SIGNALS:
            own = signal.getsignal(number)
            if own not in (signal.SIG_IGN, None):
                # Noted first: one that comes in this moment is raised, and undoes what was done.
                before[number] = own
                try:
                    signal.signal(number, handler)
                except ValueError:
                    # Only the main thread has signals.
                    del before[number]
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)


def _open_closed_streams() -> frozenset[int]:
    """Open `/dev/null` for the standard streams that are closed and return their numbers."""
    closed: list[int] = []
    while True:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor > 2:
            os.close(descriptor)
            break
        os.set_inheritable(descriptor, True)  # noqa: FBT003
        closed.append(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if number in closed or getattr(sys, name) is None:
            # Python sets a stream that was closed at its start to None.
            mode = "r" if number == 0 else "w"
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
    return frozenset(closed)


def _check_output(closed: frozenset[int]) -> None:
    """Refuse a standard output that takes nothing before anything is done for it."""
    if 1 in closed:
        raise SettingsError(
            "standard output is closed: leave it open, or send it to a file or to /dev/null"
        )
    try:
        number = sys.stdout.fileno()
        watched = select.poll()
        watched.register(number, 0)
        if any(event & select.POLLERR for _, event in watched.poll(0)):
            raise NoReaderError(_NO_READER)
        # Writing nothing asks a device whether it takes something.
        os.write(number, b"")
    except BrokenPipeError as error:
        raise NoReaderError(_NO_READER) from error
    except ValueError:
        # A stream without a number, of a caller in Python.
        return
    except OSError as error:
        raise SettingsError(
            f"cannot write to standard output: {error.strerror}; send it elsewhere"
        ) from error


_NO_READER = "nobody reads standard output any more (broken pipe)"


@contextmanager
def _standard(output: _Output, messages: _Messages) -> Iterator[None]:
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = cast(TextIO, output), cast(TextIO, messages)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@dataclass(eq=False)
class _Guarded:
    """A text stream whose failures are noticed here, and only once."""

    stream: TextIO
    lost: BaseException | None = field(default=None, init=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write, as a text stream does."""
        return int(self._tried(lambda: self.stream.write(text), len(text)))

    def flush(self) -> None:
        """Flush, as a text stream does."""
        self._tried(self.stream.flush, None)

    def let_go(self) -> None:
        """Leave nothing that the interpreter could fail to write when it ends."""
        with suppress(Exception):
            self.flush()

    def _tried(self, action: Callable[[], Any], otherwise: Any) -> Any:
        if self.lost is not None:
            return self._failed(self.lost, otherwise)
        try:
            try:
                return action()
            except UnicodeEncodeError:
                # The terminal's character set lacks something; an escape stands for it.
                self.stream.reconfigure(errors="backslashreplace")  # type: ignore[attr-defined]
                return action()
        except (OSError, ValueError) as error:
            self.lost = error
            self._drop_the_rest()
            return self._failed(error, otherwise)

    def _failed(self, error: BaseException, otherwise: Any) -> Any:
        raise NotImplementedError

    def _drop_the_rest(self) -> None:
        """Send what waits in the stream's buffer nowhere: Python would try again at its end."""
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(null, self.stream.fileno())
            finally:
                os.close(null)
            self.stream.flush()


class _Output(_Guarded):
    """Standard output: where it takes no more, the command ends."""

    def _failed(self, error: BaseException, otherwise: Any) -> Any:
        if isinstance(error, BrokenPipeError):
            raise NoReaderError(_NO_READER) from error
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OutputError(f"cannot write to standard output: {reason}; send it elsewhere")


class _Messages(_Guarded):
    """Standard error: what it does not take is dropped, and the command goes on."""

    def _failed(self, error: BaseException, otherwise: Any) -> Any:
        return otherwise
