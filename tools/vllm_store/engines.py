# SPDX-License-Identifier: Apache-2.0
"""Processes of vLLM with a store beneath or without: engines that answer a prompt, and servers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hillinfer_bench.serving.servers import RunningServer, ServerError, health_status
from peers.peer import VLLM_VARIABLES

ROOT = Path(__file__).resolve().parents[2]
_PARTS = ("sw_model", "host", "plugins/hillinfer_vllm")
_START_SECONDS, _END_SECONDS, _MOST_TOLD = 600.0, 30.0, 4000
SERVED = "bench"
_SERVER_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # A client that waits for a core longer than that would find its connection closed.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300",
}
_ERROR = re.compile(r"(\(\S+ pid=\d+\) )?[\w.]*(Error|Exception)\b")
# As vLLM itself has it on processors.
ENGINE_BLOCK_TOKENS = 128


class EngineError(Exception):
    """A process of vLLM gave no answer; the message says what it said last."""


@dataclass(frozen=True)
class Installed:
    """Where vLLM is, and what it runs.

    Parameters
    ----------
    python, preloaded
        Interpreter that has vLLM, and libraries that are loaded before it.
    model
        Directory of the model.
    paths
        Of further packages.
    """

    python: Path
    preloaded: Sequence[Path]
    model: Path
    paths: tuple[Path, ...] = ()

    def variables(self, threads: int) -> dict[str, str]:
        """Return the environment of a process with so many threads."""
        paths = [*(ROOT / part for part in _PARTS), *self.paths]
        return {
            **os.environ,
            # As vLLM has them in processes that it binds to cores: a thread that waited longer for
            # work would keep a core from those that read.
            **VLLM_VARIABLES,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "LD_PRELOAD": ":".join(map(str, self.preloaded)),
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }


def store_transfer(store: Path, size: str = "4GB") -> dict[str, Any]:
    """Return the KV transfer config of a store, made with a size where it is missing."""
    return {
        "kv_connector": "HillInferStoreConnector",
        "kv_connector_module_path": "hillinfer_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": str(store), "store_size": size},
    }


@dataclass(frozen=True)
class Runs:
    """Starts engines one after the other and asks each the same prompt.

    Parameters
    ----------
    installed
        Of vLLM.
    ids
        File of the prompt's token numbers.
    threads, answer_tokens
        As each process has them.
    seconds
        Longest time of one.
    log
        What the last one said.
    """

    installed: Installed
    ids: Path
    threads: int
    answer_tokens: int
    seconds: float
    log: Path

    def ask(self, transfer: Mapping[str, Any] | None, **more: Any) -> Any:
        """Return what one engine has to say that lives as long as it answers.

        Parameters
        ----------
        transfer
            Its KV transfer config; None for none.
        more
            `times` that it is asked, `salt`, `ranks`, `is_eager`, and `rounds` that are timed
            behind that.

        Raises
        ------
        EngineError
            Where it gives no answer.
        """
        with self._started(transfer, more) as process:
            try:
                output, _ = process.communicate(timeout=self.seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                raise EngineError(f"no answer in {self.seconds:.0f} s") from None
        for line in output.splitlines():
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        raise EngineError(self.said())

    def said(self) -> str:
        """Return the last error that the last engine told of, else its last line."""
        return _reason(self.log.read_text(errors="replace"))

    def killed(self, store: Path, seconds: float) -> None:
        """Kill a process some time after it began to read the prompt."""
        with self._started(store_transfer(store), {}) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("ASKING"):
                    break
            time.sleep(seconds)
            process.send_signal(signal.SIGKILL)

    def _started(self, transfer: Mapping[str, Any] | None, more: Mapping[str, Any]) -> Any:
        request = {
            "model": str(self.installed.model),
            "ids": str(self.ids),
            "transfer": transfer,
            "answer_tokens": self.answer_tokens,
            **more,
        }
        script = str(Path(__file__).with_name("engine_run.py"))
        with self.log.open("w") as said:
            return subprocess.Popen(
                [str(self.installed.python), script, json.dumps(request)],
                env=self.installed.variables(self.threads),
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )


@contextmanager
def vllm_servers(
    installed: Installed, places: Sequence[Path], threads: int, most_tokens: int, store_size: str
) -> Iterator[list[RunningServer]]:
    """Run servers of vLLM side by side, each with a store in its place.

    Their own prefix caches are off: what is found came from a store.

    Parameters
    ----------
    installed
        Of vLLM.
    places
        Directories of their stores, `store`, and logs.
    threads
        Of each.
    most_tokens
        Of a prompt and its answer.
    store_size
        Of each store.

    Raises
    ------
    ServerError
        Where one does not start.
    """
    started: list[RunningServer] = []
    try:
        for place in places:
            place.mkdir(parents=True, exist_ok=True)
            transfer = store_transfer(place / "store", store_size)
            started.append(_server(installed, place, threads, most_tokens, transfer))
        for one in started:
            _await_health(one)
        yield started
    finally:
        for one in started:
            one.process.send_signal(signal.SIGTERM)
        for one in started:
            with suppress(subprocess.TimeoutExpired):
                one.process.wait(_END_SECONDS)
            kill(one)


def kill(server: RunningServer) -> None:
    """Kill a server and the engine that is a process of its own."""
    with suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


# --- inside ---


def _reason(said: str) -> str:
    """Return the last line of what was said that is an error, else the last one."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines or ["nothing was said"])[-1]


def _server(
    installed: Installed, place: Path, threads: int, most_tokens: int, transfer: Mapping[str, Any]
) -> RunningServer:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [str(installed.python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(installed.model), "--served-model-name", SERVED]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    # Compiling takes minutes of few cores, and says nothing about stores.
    command += ["--max-model-len", str(most_tokens), "--enforce-eager"]
    command += ["--block-size", str(ENGINE_BLOCK_TOKENS)]
    command += ["--no-enable-prefix-caching", "--enable-prompt-tokens-details"]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    log = place / "server.log"
    with log.open("ab") as said:
        process = subprocess.Popen(
            command,
            env=installed.variables(threads) | _SERVER_VARIABLES,
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
            # Its engine is a process of its own, and ends with it.
            process_group=0,
        )
    return RunningServer(f"http://127.0.0.1:{port}", SERVED, process, {"ignore_eos": True}, log)


def _await_health(server: RunningServer) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until and server.process.poll() is None:
        with suppress(OSError):
            if health_status(*server.address) == 200:
                return
        time.sleep(0.5)
    assert server.log is not None
    said = server.log.read_text(errors="replace")[-_MOST_TOLD:]
    raise ServerError(f"vLLM did not start: {said}")
