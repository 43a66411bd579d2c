# SPDX-License-Identifier: Apache-2.0
"""A model of the hub is fetched from a server that speaks as the hub does; a signal ends that."""

import json
import os
import signal
import subprocess
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from waiting import until

PROGRAM = ("-c", "from hillinfer_command import main; main()")
COMMIT = "1" * 40


@contextmanager
def hub(folder, held):
    """Give out a folder's files as the model `somebody/tiny`; of those held the end never comes.

    Gives the address, and an event for the first that is held.
    """
    waiting, ended = threading.Event(), threading.Event()

    class Answers(BaseHTTPRequestHandler):
        def log_message(self, *said):
            pass

        def do_HEAD(self):
            path = self.path.partition("?")[0]
            sizes = {one.name: one.stat().st_size for one in folder.iterdir()}
            name = path.rpartition("/")[2]
            data, headers = b"", {}
            if "/somebody/tiny/" not in path:
                headers = {"X-Error-Code": "RepoNotFound"}
            elif "/tree/" in path:
                files = [
                    {"type": "file", "path": one, "size": size, "oid": "a" * 40}
                    for one, size in sizes.items()
                ]
                data = json.dumps(files).encode()
            elif "/revision/" in path:
                told = {"id": "somebody/tiny", "sha": COMMIT, "siblings": []}
                told["siblings"] = [{"rfilename": one} for one in sizes]
                data = json.dumps(told).encode()
            elif "/resolve/" in path and name in sizes:
                data = (folder / name).read_bytes()
                headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{name.encode().hex():0<40.40}"'}
            self.send_response(200 if data else 404)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "HEAD":
                return
            if name in held:
                self.wfile.write(data[:10])
                waiting.set()
                ended.wait(120)
                return
            self.wfile.write(data)

        do_GET = do_HEAD  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", waiting
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        serving.join()


def default_signals():
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def started(python, address, place, *arguments):
    environment = os.environ | {
        "HF_ENDPOINT": address, "HF_HUB_CACHE": str(place / "hub"), "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "*", "no_proxy": "*", "HF_HUB_OFFLINE": "0",
    }  # fmt: skip
    process = subprocess.Popen(
        [*python, *PROGRAM, *map(str, arguments)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=default_signals,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def fetching(place):
    """Return where processes work that fetch into a place."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if str(place / "hub").encode() in words and b"somebody/tiny" in words:
                found.append((entry / "cwd").readlink())
    return found


GENERATE = ("generate", "--prompt", "a cat", "--prompt-style", "plain", "--max-new-tokens", 2)


@pytest.mark.parametrize(
    ("how", "command"),
    [
        ("SIGKILL", GENERATE),
        ("SIGTERM", GENERATE),
        ("SIGINT", GENERATE),
        ("SIGTERM", ("serve", "--port", 0)),
    ],
)
def test_a_signal_ends_it(how, command, warm_python, tiny_folder, tmp_path):
    number = signal.Signals[how]
    model = ("--model", "somebody/tiny")
    with (
        hub(tiny_folder, {"model.safetensors"}) as (address, waiting),
        started(warm_python, address, tmp_path, *command, *model) as process,
    ):
        assert waiting.wait(60)
        (place,) = fetching(tmp_path)
        process.send_signal(number)
        _, said = process.communicate(timeout=300)
        # Nothing goes on for nobody, whatever ended it.
        until(lambda: not fetching(tmp_path), 120)
        until(lambda: not place.exists(), 120)
    told = ["looking for somebody/tiny on the hub", f"hillinfer: interrupted ({how})"]
    # As docs/endings.md says; nothing is told of SIGKILL.
    is_killed = how == "SIGKILL"
    assert process.returncode == (-number if is_killed else 128 + number), said
    assert said.splitlines() == told[: 1 if is_killed else 2]


def test_what_comes_is_what_the_hub_has(warm_python, tiny_folder, cold_dir, tmp_path):
    model = ("--model", "somebody/tiny", "--cold-dir", cold_dir)
    with (
        hub(tiny_folder, ()) as (address, _),
        started(warm_python, address, tmp_path, *GENERATE, *model) as process,
    ):
        _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert f"somebody/tiny is commit {COMMIT} now" in said
    (found,) = (tmp_path / "hub").glob(f"models--somebody--tiny/snapshots/{COMMIT}")
    for file in tiny_folder.iterdir():
        assert (found / file.name).read_bytes() == file.read_bytes()


def test_a_model_that_the_hub_does_not_have(warm_python, tiny_folder, tmp_path):
    model = ("--model", "nobody/other")
    with (
        hub(tiny_folder, ()) as (address, _),
        started(warm_python, address, tmp_path, *GENERATE, *model) as process,
    ):
        _, said = process.communicate(timeout=300)
    assert process.returncode == 2, said
    assert said.splitlines() == [
        "looking for nobody/other on the hub",
        "hillinfer: error: 'nobody/other' is neither a path nor a model that the hub gives out",
    ]
