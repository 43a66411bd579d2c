# SPDX-License-Identifier: Apache-2.0
"""A server from its start to its end: sockets, signals, draining."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn

from hillinfer.drive.calls import DriveCalls
from hillinfer.errors import BrokenRunError, SettingsError, reason_of
from hillinfer.serve.documents import Documents
from hillinfer.serve.http.app import Routes, application, own_version
from hillinfer.serve.http.files import FileRoutes
from hillinfer.serve.http.telemetry import Figures, Log, LogHandler, Spans
from hillinfer.serve.inference import Inference, State
from hillinfer.serve.jobs import Job
from hillinfer.serve.rules import ServerRules
from hillinfer.serve.served_model import ServedModel

_LOOK_SECONDS = 0.05
_BACKLOG = 1024
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Whoever ends a process may send several signals at once, and means one end by them.
_ONE_END_SECONDS = 1.0
# Least time of connections to close.
_CLOSING_SECONDS = 1.0


class Server:
    """Answers requests until it is told to end.

    Parameters
    ----------
    rules
        What it allows.
    opening
        Opens the model, in the thread that uses it.
    log
        Gets a line for whatever happens.
    say
        Called with lines for people: where it listens, and that it ends.
    spans
        Get a trace for each request; None for none.
    calls
        How files of clients reach the drive; the operating system itself where None.

    Raises
    ------
    SettingsError
        Where the address cannot be listened at.
    """

    def __init__(
        self,
        rules: ServerRules,
        opening: Callable[[], AbstractContextManager[ServedModel]],
        log: Log | None = None,
        say: Callable[[str], None] = lambda line: None,
        spans: Spans | None = None,
        calls: DriveCalls | None = None,
    ) -> None:
        self._rules, self._say = rules, say
        self._spans = spans or Spans(None)
        self._log = log or Log()
        self._figures = Figures(own_version())
        self.inference = Inference(opening, rules, self._note_end, self._note_state)
        self._documents = Documents(self.inference, rules, calls)
        self._figures.show(self.inference, self._documents)
        self._socket = _listening(rules)
        routes = Routes(self.inference, self._documents, rules, self._figures, self._log)
        files = FileRoutes(self._documents, rules)
        self._gate = application(routes, files, rules, self._log)
        config = uvicorn.Config(
            self._gate,
            log_config=None,
            log_level="warning",
            access_log=False,
            ws="none",
            lifespan="off",
            server_header=False,
            date_header=True,
        )
        self._uvicorn = _Quiet(config)
        self._asked = threading.Event()
        self._asked_again = threading.Event()

    @property
    def url(self) -> str:
        """Where it is."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self) -> None:
        """Answer until `end` is called or SIGTERM or SIGINT comes; then let what is there go on.

        After `drain_seconds`, or a second signal, what is left is ended. A signal that this process
        was started to ignore stays so. The main thread's.

        Raises
        ------
        BaseException
            What opening the model raised, or what ended its thread.
        """
        with self._signals(), self._library_logs():
            self.serve()

    def serve(self) -> None:
        """Answer until `end` is called, in any thread; otherwise as `run`."""
        self._say(f"listening at {self.url}, the model is being loaded")
        try:
            asyncio.run(self._serve())
        finally:
            self._socket.close()
            self.inference.stop()
            self.inference.join()
        if self.inference.error is not None:
            raise self.inference.error

    def end(self) -> None:
        """Ask for the end, from any thread; asked a second time, it waits for nobody."""
        if self._asked.is_set():
            self._asked_again.set()
        self._asked.set()

    # --- inside ----------------------------------------------------------------------------

    async def _serve(self) -> None:
        self.inference.start()
        served = asyncio.ensure_future(self._uvicorn.serve([self._socket]))
        until = 0.0
        try:
            while not (self._asked.is_set() or served.done() or self.inference.has_ended):
                await asyncio.sleep(_LOOK_SECONDS)
            if not self.inference.has_ended:
                until = time.monotonic() + self._rules.drain_seconds
            await self._drained(until)
        finally:
            self.inference.stop()
            while not self.inference.has_ended:
                await asyncio.sleep(_LOOK_SECONDS)
            await self._closed(served, until)

    async def _drained(self, until: float) -> None:
        """Wait until requests that are there are answered, at most until then."""
        self.inference.drain()
        self._documents.stop()
        # An answer that the model has made may still wait for its reader.
        if self._gate.inside or not self.inference.is_idle:
            self._tell("draining: requests that are there go on; another signal ends them")
        while not (
            self.inference.is_idle
            or self.inference.has_ended
            or self._asked_again.is_set()
            or time.monotonic() > until
        ):
            await asyncio.sleep(_LOOK_SECONDS)

    async def _closed(self, served: asyncio.Future[None], until: float) -> None:
        """Close connections, each once its reader has what was sent, at most until then."""
        least = time.monotonic() + _CLOSING_SECONDS
        self._uvicorn.should_exit = True
        while not served.done() and time.monotonic() < max(least, until):
            if self._asked_again.is_set():
                until = least
            await asyncio.sleep(_LOOK_SECONDS)
        if not served.done():
            served.cancel()
        with suppress(asyncio.CancelledError):
            await served

    def _note_end(self, job: Job, error: BaseException | None) -> None:
        self._figures.note(job)
        self._spans.note(job, error)
        usage = job.usage
        facts: dict[str, Any] = {
            "work": job.number,
            "endpoint": job.endpoint,
            "finish": job.finish,
        }
        if usage is not None:
            facts |= {
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "document_form": job.form,
                "answer_tokens": usage.answer_tokens,
                "queue_seconds": round(usage.queue_seconds, 4),
                "seconds": round(usage.seconds, 4),
            }
        if error is None:
            self._log.line("answered", facts)
        else:
            self._log.failure("answer_failed", error, facts)

    def _tell(self, line: str) -> None:
        """Say it where somebody still listens: requests go on where nobody does."""
        with suppress(BrokenRunError):
            self._say(line)

    def _note_state(self) -> None:
        if self.inference.state is State.READY:
            served = self.inference.served
            self._log.line("ready", {"model": served.name, "max_model_len": served.context_tokens})
            self._tell(f"{served.name} is ready: {served.context_tokens} tokens of context")
            # Chats are rendered and texts made tokens: not in the thread that has the model.
            threading.Thread(target=self._documents.take_up, name="documents").start()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Let signals ask for the end, and put back what took them before."""
        last = -_ONE_END_SECONDS

        def ask(number: int, frame: FrameType | None) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= _ONE_END_SECONDS:
                last = now
                self.end()

        # Whoever starts it in the background of a script has it ignore Ctrl-C.
        heeded = [one for one in _SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]
        before = {number: signal.signal(number, ask) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def _library_logs(self) -> Iterator[None]:
        """Write what the server's library says as lines like ours."""
        library, handler = logging.getLogger("uvicorn"), LogHandler(self._log)
        before = library.propagate
        library.addHandler(handler)
        library.propagate = False
        try:
            yield
        finally:
            library.removeHandler(handler)
            library.propagate = before


class _Quiet(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def check_address(rules: ServerRules) -> None:
    """Refuse an address that cannot be listened at, before anything that takes time.

    Raises
    ------
    SettingsError
        Then.
    """
    _listening(rules).close()


def _listening(rules: ServerRules) -> socket.socket:
    family = socket.AF_INET6 if ":" in rules.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((rules.host.strip("[]"), rules.port))
        made.listen(_BACKLOG)
        made.settimeout(0)
    except OSError as error:
        made.close()
        raise SettingsError(
            f"cannot listen at {rules.host}:{rules.port}: {reason_of(error)}; choose another "
            "--port or --host"
        ) from error
    return made


@contextmanager
def in_background(server: Server) -> Iterator[str]:
    """Run a server in a thread of its own, and give its address once the model is ready.

    Raises
    ------
    BaseException
        What opening the model raised.
    """
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            server.serve()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=serve, name="server")
    thread.start()
    try:
        while server.inference.state is State.LOADING and thread.is_alive():
            time.sleep(_LOOK_SECONDS / 10)
        if server.inference.state is not State.READY:
            thread.join()
            raise errors[0]
        yield server.url
    finally:
        server.end()
        server.end()
        thread.join()
