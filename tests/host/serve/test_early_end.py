# SPDX-License-Identifier: Apache-2.0
"""How a server ends: before it has a model, with answers under way, with nobody who listens."""

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from servers import HTTP, running
from waiting import until

from hillinfer.errors import BrokenRunError
from hillinfer.serve.http.running import Server
from hillinfer.serve.http.telemetry import Log
from hillinfer.serve.inference import State
from hillinfer.serve.rules import ServerRules


class Loading:
    """Loads weights without an end, and notes what ended it."""

    def __init__(self, most=None):
        self.count, self.most, self.cleaned = 0, most, False

    @contextmanager
    def __call__(self):
        try:
            while self.count != self.most:
                torch.ones(1)
                self.count += 1
            raise ValueError("a weight is missing")
        except Exception as error:
            # As loaders do with whatever libraries raise.
            raise RuntimeError("cannot load") from error
        finally:
            self.cleaned = True
        yield


@contextmanager
def started(loading):
    server, errors = Server(ServerRules(port=0), loading, Log(lambda line: None)), []

    def serve():
        try:
            server.serve()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    yield server, thread, errors
    server.end()
    thread.join()


def test_a_model_is_loaded_no_further_and_that_is_no_failure():
    loading = Loading()
    with started(loading) as (server, thread, errors):
        until(lambda: loading.count > 10)
        assert server.inference.state is State.LOADING
        server.end()
        thread.join(20)
        assert not thread.is_alive()
    assert errors == []
    assert loading.cleaned
    assert server.inference.error is None


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_a_signal_that_it_was_started_to_ignore_is_ignored(handler):
    """So a shell starts what a script has in the background, where Ctrl-C ends the script."""
    loading, went_on = Loading(), []
    server = Server(ServerRules(port=0), loading, Log(lambda line: None))
    is_ignored = handler is signal.SIG_IGN

    def strike():
        until(lambda: loading.count > 10)
        os.kill(os.getpid(), signal.SIGINT)
        end = time.monotonic() + (1 if is_ignored else 30)
        while not loading.cleaned and time.monotonic() < end:
            time.sleep(0.01)
        went_on.append(not loading.cleaned)
        server.end()

    thread = threading.Thread(target=strike)
    before = signal.signal(signal.SIGINT, handler)
    try:
        thread.start()
        server.run()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
        thread.join()
    # The twin: where it heeds the signal it ends.
    assert went_on == [is_ignored]


def test_what_fails_in_loading_is_still_told():
    with started(Loading(most=3)) as (_, thread, errors):
        thread.join(20)
    assert [type(one) for one in errors] == [RuntimeError]


def test_torch_computes_as_ever_afterwards():
    loading = Loading()
    with started(loading) as (server, thread, _):
        until(lambda: loading.count)
        server.end()
        thread.join(20)
    assert torch.ones(2).sum() == pytest.approx(2)


def test_a_server_goes_on_where_nobody_reads_what_it_says(endless_folder, cold_dir):
    said = []

    def say(line):
        said.append(line)
        # Whoever started it has read where it listens.
        if len(said) > 1:
            raise BrokenRunError("nobody reads")

    with running(endless_folder, cold_dir, say=say) as server:
        asked = {"model": "tiny", "prompt": "the cat", "max_tokens": 4}
        told = HTTP.post(f"{server.url}/v1/completions", json=asked)
        assert told.status_code == 200, told.text
    assert "is ready" in said[1]


def asked_slowly(url, **asked):
    """Ask for a chat's answer by a connection whose reader takes little at a time."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **asked})
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.settimeout(60)
    made.connect((host, int(port)))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}"
    made.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n{body}".encode())
    return made


def all_of(connection):
    found = b""
    with connection:
        while part := connection.recv(1 << 16):
            found += part
    return found


# More than sockets hold.
MUCH = {"n": 4, "max_tokens": 700, "logprobs": True, "top_logprobs": 20, "temperature": 0}


@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_that_its_reader_has_not_taken_yet_is_sent_to_its_end(
    endless_folder, cold_dir, streamed
):
    with running(endless_folder, cold_dir, drain_seconds=60) as server:
        reader = asked_slowly(server.url, stream=streamed, **MUCH)
        until(lambda: server.logged("answered"), 120)
        server.server.end()
        # Longer than connections have to close where nobody is waited for.
        time.sleep(2.5)
        found = all_of(reader)
        assert len(found) > 3 << 20
        assert found.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if streamed else b"}")
        until(lambda: server.inference.has_ended)


def test_a_second_end_waits_for_no_reader(endless_folder, cold_dir):
    with running(endless_folder, cold_dir, drain_seconds=60) as server:
        reader = asked_slowly(server.url, stream=True, **MUCH)
        until(lambda: server.logged("answered"), 120)
        began = time.monotonic()
        server.server.end()
        server.server.end()
    assert time.monotonic() - began < 20
    reader.close()


@pytest.fixture
def command_server(warm_python, endless_folder, cold_dir):
    """`hillinfer serve` as a process, with its address."""
    program = "from hillinfer_command import main; main()"
    options = ("--model", endless_folder, "--alias", "tiny", "--cold-dir", cold_dir)
    process = subprocess.Popen(
        [
            *(*warm_python, "-c", program, "serve", "--port", "0", "--threads", "1"),
            *(str(one) for one in options),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    address = re.search(r"http://\S+\d", process.stdout.readline()).group()
    assert "is ready" in process.stdout.readline()
    yield process, address
    process.kill()
    process.communicate()


@pytest.mark.parametrize("seconds", [0.0, 1.2])
def test_signals_of_one_moment_are_one_end(command_server, seconds):
    process, url = command_server
    reader = asked_slowly(url, stream=True, max_tokens=1500)
    found = reader.recv(1 << 12)
    assert b"200 OK" in found
    process.send_signal(signal.SIGINT)
    time.sleep(seconds)
    process.send_signal(signal.SIGTERM)
    found += all_of(reader)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    # The twin: one that comes later is another, which ends what is under way.
    assert (b"[DONE]" in found) == (not seconds)
