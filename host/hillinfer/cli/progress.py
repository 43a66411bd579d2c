# SPDX-License-Identifier: Apache-2.0
"""Progress of prefill and decode on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LINE_SHARE = 0.1
_REDRAW_SECONDS = 0.1

Advance = Callable[[int], None]


class ProgressView(Protocol):
    """Shows how far something of known length has come."""

    def stage(self, name: str, total: int) -> AbstractContextManager[Advance]:
        """Show a stage; the function it gives takes the tokens done so far."""
        ...


class BarProgress:
    """A bar that redraws itself and vanishes at the end, for a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Advance]:
        """Show a bar; see `ProgressView`."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens, {task.fields[rate]:.0f} tokens/s"),
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
                bars.update(task, completed=done, rate=_rate(done, started))
                if now - drawn >= _REDRAW_SECONDS:
                    drawn = now
                    bars.refresh()

            yield advance


class LineProgress:
    """A line for each tenth, for files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Advance]:
        """Write lines; see `ProgressView`."""
        started, shown = time.perf_counter(), 0.0

        def advance(done: int) -> None:
            nonlocal shown
            if done < total and done < (shown + _LINE_SHARE) * total:
                return
            shown = done / total
            self._console.print(
                f"{name}: {done}/{total} tokens, {_rate(done, started):.1f} tokens/s",
                highlight=False,
                soft_wrap=True,
            )

        yield advance


class NoProgress:
    """Nothing, where the text goes to the same place and shows the progress itself."""

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Advance]:
        """Show nothing; see `ProgressView`."""
        yield lambda done: None


def reading_view(console: Console) -> ProgressView:
    """Return the view for reading a prompt."""
    return BarProgress(console) if console.is_terminal else LineProgress(console)


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


def _rate(done: int, started: float) -> float:
    return done / max(time.perf_counter() - started, 1e-9)
