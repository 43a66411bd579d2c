# SPDX-License-Identifier: Apache-2.0
"""A server that is told to end before it has a model, or that nobody listens to any more."""

import threading
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
