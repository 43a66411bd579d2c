# SPDX-License-Identifier: Apache-2.0
"""What people see: answers, lines on standard error, progress, messages of native libraries."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hillinfer.errors import HillInferWarning, SetupWarning, without_python_names
from hillinfer.generate.stages import AnswerProgress

# --- Lines for people ---

_FILE_COLUMNS = 100


def printable(text: str) -> str:
    """Return a text that moves no cursor: control characters become escapes."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


class _Lines(Console):
    """A console whose lines stay lines, whatever names they hold."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as `Console` does, control characters of texts as escapes."""
        shown = (printable(one) if isinstance(one, str) else one for one in objects)
        super().print(*shown, **options)


def error_console() -> Console:
    """Return a console on standard error as it is now."""
    console = _Lines(file=sys.stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _FILE_COLUMNS
    return console


def show_text(piece: str) -> None:
    """Write a piece of an answer to standard output, at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()


@contextmanager
def shown_warnings() -> Iterator[None]:
    """Show each of HillInfer's own warnings once, as a line, for the time of a command."""
    shown = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, HillInferWarning):
            error_console().print(f"hillinfer: warning: {without_python_names(str(message))}")
        else:
            shown(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.simplefilter("default", HillInferWarning)
        warnings.showwarning = show
        yield


@contextmanager
def setup_warnings_shown() -> Iterator[None]:
    """Keep warnings about drive and budget quiet, because the checks of a run showed them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SetupWarning)
        yield


def quiet_transformers() -> None:
    """Keep transformers' advice off standard error, and its bars where nobody watches them.

    To be called before transformers is imported for the first time.
    """
    watched = sys.stderr.isatty()
    if not watched:
        os.environ.setdefault("TQDM_DISABLE", "1")
    with _uncollected():
        # What models are loaded with: some of it is only imported when it is asked for.
        from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache  # noqa: F401
        from transformers.utils import logging

    logging.set_verbosity_error()
    if not watched:
        logging.disable_progress_bar()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Import modules without garbage collections, which look through all that stays for nothing.

    They would be a fifth of the time in which a command starts.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if collects:
            gc.enable()


# --- Messages of native libraries ---

_STANDARD_ERROR = 2


@contextmanager
def panics_unsaid() -> Iterator[None]:
    """Leave out what native libraries write to standard error in a block that raises.

    A library in Rust that panics, as a tokenizer does over a hostile pattern, writes where in its
    sources that was and then raises what the command makes its one line of. What is written in a
    block that succeeds comes after it.
    """
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    with ExitStack() as opened:
        try:
            kept = opened.enter_context(tempfile.TemporaryFile())
            own = os.dup(_STANDARD_ERROR)
        except OSError:
            # It is closed, or there is no room: whatever is written goes where it goes.
            yield
            return
        opened.callback(os.close, own)
        os.dup2(kept.fileno(), _STANDARD_ERROR)
        try:
            yield
        finally:
            os.dup2(own, _STANDARD_ERROR)
        kept.seek(0)
        with suppress(OSError):
            os.write(_STANDARD_ERROR, kept.read())


# --- Progress ---

_LINE_SHARE = 0.1
_REDRAW_SECONDS = 0.1

Advance = Callable[[int], None]


class ProgressView(Protocol):
    """Shows how far something of known length has come."""

    def stage(self, name: str, total: int, begun: int = 0) -> AbstractContextManager[Advance]:
        """Show a stage; the function it gives takes the tokens done so far.

        `begun` of them are there when it begins, and no part of its rate.
        """
        ...


class BarProgress:
    """A bar that redraws itself and vanishes at the end, for a terminal."""

    def __init__(self, console: Console, unit: str = "tokens") -> None:
        self._console, self._unit = console, unit

    @contextmanager
    def stage(self, name: str, total: int, begun: int = 0) -> Iterator[Advance]:
        """Show a bar; see `ProgressView`."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(f"{self._unit}, {{task.fields[rate]:.0f}} {self._unit}/s"),
            TimeRemainingColumn(),
        )
        started = drawn = time.perf_counter()
        # The bar draws itself in this thread: where no thread can be started a run goes on. It
        # leaves standard output alone, which the text goes to.
        bars = Progress(
            *columns,
            console=self._console,
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with bars:
            task = bars.add_task(name, total=total, rate=0.0)
            bars.refresh()

            def advance(done: int) -> None:
                nonlocal drawn
                now = time.perf_counter()
                bars.update(task, completed=done, rate=_rate(done - begun, started))
                if now - drawn >= _REDRAW_SECONDS:
                    drawn = now
                    bars.refresh()

            yield advance


class LineProgress:
    """A line for each tenth, for files and pipes."""

    def __init__(self, console: Console, unit: str = "tokens") -> None:
        self._console, self._unit = console, unit

    @contextmanager
    def stage(self, name: str, total: int, begun: int = 0) -> Iterator[Advance]:
        """Write lines; see `ProgressView`."""
        started, shown = time.perf_counter(), 0.0

        def advance(done: int) -> None:
            nonlocal shown
            if done < total and done < (shown + _LINE_SHARE) * total:
                return
            shown = done / total
            self._console.print(
                f"{name}: {done}/{total} {self._unit}, "
                f"{_rate(done - begun, started):.1f} {self._unit}/s",
                highlight=False,
                soft_wrap=True,
            )

        yield advance


class NoProgress:
    """Nothing, where the text goes to the same place and shows the progress itself."""

    @contextmanager
    def stage(self, name: str, total: int, begun: int = 0) -> Iterator[Advance]:
        """Show nothing; see `ProgressView`."""
        yield lambda done: None


class ShownProgress(AnswerProgress):
    """Shows one stage after another; a context manager that ends the last one.

    `reads` are tokens of the document that are to be read, `decodes` the most that are to be new.
    """

    def __init__(self, console: Console, reads: int = 0, decodes: int = 0) -> None:
        self._console, self._reads, self._decodes = console, reads, decodes
        self._shown = ExitStack()
        self._read: Advance = _unseen
        self._deeper: Advance = _unseen
        self._decoded: Advance = _unseen

    def __enter__(self) -> ShownProgress:
        if self._reads:
            self._read = self._begin(reading_view(self._console), "prefill", self._reads)
        return self

    def __exit__(self, *error: object) -> None:
        self._shown.close()

    def read(self, done: int) -> None:
        """Show how much of the document is read."""
        self._read(done)

    def deeper(self, layers: range, done: int, tokens: int) -> None:
        """Show how far deeper layers are, as a stage of their own."""
        if not done:
            name = f"layers {layers[0]} to {layers[-1]}"
            self._deeper = self._begin(reading_view(self._console), name, tokens)
        self._deeper(done)

    def decoded(self, done: int) -> None:
        """Show decoding, from where reading is over."""
        if not done:
            # The first token comes out of reading.
            view = answering_view(self._console)
            self._decoded = self._begin(view, "decode", self._decodes, 1)
        self._decoded(done)

    def _begin(self, view: ProgressView, name: str, total: int, begun: int = 0) -> Advance:
        """End the stage that is shown, and begin another."""
        self._shown.close()
        return self._shown.enter_context(view.stage(name, total, begun))


def reading_view(console: Console, unit: str = "tokens") -> ProgressView:
    """Return the view for reading a prompt, or for other work that is counted in some unit."""
    view = BarProgress if console.is_terminal else LineProgress
    return view(console, unit)


def answering_view(console: Console) -> ProgressView:
    """Return the view for decoding, while the text goes to standard output."""
    if _one_place():
        return NoProgress()
    return BarProgress(console) if console.is_terminal else LineProgress(console)


def _one_place() -> bool:
    """Whether standard output and standard error end in the same terminal, file or pipe."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):
        return False


def _unseen(done: int) -> None:
    """Show nothing."""


def _rate(done: int, started: float) -> float:
    return max(done, 0) / max(time.perf_counter() - started, 1e-9)
