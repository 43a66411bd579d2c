# SPDX-License-Identifier: Apache-2.0
"""Listening for a router or an agent: an address, a key, and the end by a signal."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from hillinfer.errors import reason_of
from hillinfer.serve.rules import is_local
from hillinfer_hosts.directory import HostsError

_LEAST_KEY = 16
_BACKLOG = 1024
_START_SECONDS = 10.0


def read_key(file: Path | None, host: str, user: int | None = None) -> str:
    """Return the key that hosts share; empty where none is named.

    Parameters
    ----------
    file
        That has it on its first line.
    host
        The address that is listened at.
    user
        Who reads it; whose process this is where None.

    Raises
    ------
    HostsError
        Where it cannot be read, others may read it or it is short, or other machines could come
        without one.
    """
    if file is None:
        if not is_local(host):
            raise HostsError(
                f"--host {host} lets other machines in, and hosts share no key: name a file that "
                "has one with --key-file"
            )
        return ""
    try:
        with file.open() as opened:
            status = os.fstat(opened.fileno())
            key = opened.readline().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else "it is not text"
        raise HostsError(f"cannot read the hosts' key in {file}: {reason}") from error
    is_own = status.st_uid == (os.geteuid() if user is None else user)
    # Of another owner's file, as Kubernetes gives one, a service can have but its group's part.
    if status.st_mode & (0o077 if is_own else 0o037):
        mode = "600" if is_own else "640"
        raise HostsError(f"{file} may be read by others than its owner: chmod {mode} {file}")
    if len(key) < _LEAST_KEY or not key.isascii() or not key.isprintable():
        raise HostsError(
            f"the hosts' key in {file} has fewer than {_LEAST_KEY} characters, or others than "
            "ASCII: make one, for example with openssl rand -hex 32"
        )
    return key


class Listening:
    """Answers at an address until it is told to end.

    Parameters
    ----------
    app
        Made once the address is known, which it is given.
    host, port
        Where; port 0 takes a free one.

    Raises
    ------
    HostsError
        Where nobody can listen there.
    """

    def __init__(self, app: Callable[[str], Starlette], host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host.strip("[]"), port))
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self._socket.close()
            raise HostsError(f"cannot listen at {host}:{port}: {reason_of(error)}") from error
        config = uvicorn.Config(
            app(self.url),
            log_config=None,
            log_level="warning",
            access_log=False,
            ws="none",
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)

    @property
    def url(self) -> str:
        """Where it is."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self) -> None:
        """Answer until SIGTERM or SIGINT comes, or `end` is called."""
        try:
            self._server.run([self._socket])
        finally:
            self._socket.close()

    def end(self) -> None:
        """Ask for the end, from any thread."""
        self._server.should_exit = True

    @property
    def has_begun(self) -> bool:
        """Whether it answers."""
        return bool(self._server.started)


@contextmanager
def in_background(app: Callable[[str], Starlette]) -> Iterator[str]:
    """Answer at a free port of this machine in a thread; give its URL."""
    listening = Listening(app, "127.0.0.1", 0)
    thread = threading.Thread(target=listening.run, name="hillinfer-hosts")
    thread.start()
    try:
        begun = threading.Event()
        for _ in range(int(_START_SECONDS * 100)):
            if listening.has_begun or not thread.is_alive():
                break
            begun.wait(0.01)
        yield listening.url
    finally:
        listening.end()
        thread.join()
