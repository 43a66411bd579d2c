# SPDX-License-Identifier: Apache-2.0
"""The table of servers: how each is started, and what it can do with a prompt it has read."""

from __future__ import annotations

import json
import os
import socket
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hillinfer_bench.serving.servers import (
    RunningServer,
    ServerError,
    await_health,
    hillinfer_server,
    server_process,
)

PREPARE = "make serve-peers"
_TRANSFORMERS = "from transformers.cli.transformers import main; main()"
# What `transformers serve` imports beside transformers itself.
_MODULES = ("fastapi", "uvicorn", "openai", "pydantic")
# Tokens of a block of vLLM's cache on processors.
_VLLM_BLOCK = 128
_SLOT_FILE = "document"
# How a server's threads wait is its own default: this command has said it for ours.
_OF_THREADS = ("OMP_", "GOMP_", "KMP_")
_MIB = 1 << 20


@dataclass(frozen=True)
class Setting:
    """What all servers of a run have the same.

    Parameters
    ----------
    model
        As `hillinfer serve` takes it.
    folder
        With config, tokenizer and weights.
    number_type
        Of weights and products, such as `float32`.
    threads
        That compute.
    parallel
        Sequences that may be open at once.
    context
        Most tokens of a prompt and its answer.
    cache_bytes
        That a cache has in memory, for all prompts together.
    token_values
        Numbers of a token's keys and values.
    peers
        Where `make serve-peers` puts what is not of this environment.
    place
        Directory for stores and logs.
    python
        The interpreter that ours and `transformers serve` run in, with options of its own.
    """

    model: str
    folder: Path
    number_type: str
    threads: int
    parallel: int
    context: int
    cache_bytes: int
    token_values: int
    peers: Path
    place: Path
    python: Sequence[str] = (sys.executable,)

    @property
    def gguf(self) -> Path:
        """The same weights and tokenizer as llama.cpp reads them."""
        return self.peers / "served" / f"{self.folder.name}-{self.number_type}.gguf"

    @property
    def llama_server(self) -> Path:
        """llama.cpp's server."""
        return self.peers / "llama_server/llama-server"

    @property
    def vllm(self) -> Path:
        """Environment that has vLLM."""
        return self.peers / "vllm"


@dataclass(frozen=True)
class ServerKind:
    """One row of the table.

    Parameters
    ----------
    key, name
        In figures, and for reading.
    start
        Starts it in a setting.
    missing
        What of it is missing and how that is installed; None where nothing is.
    value_bytes
        Of a number of its cache in a setting.
    finds_again
        Whether it finds a prompt again that it has read, as long as it runs.
    keep, bring_back
        What one does by hand so that a document's rows outlive a restart: called before it and
        behind it; None where there is no such thing, or nothing has to be done by hand.
    """

    key: str
    name: str
    start: Callable[[Setting], AbstractContextManager[RunningServer]]
    missing: Callable[[Setting], str | None]
    value_bytes: Callable[[Setting], int]
    finds_again: bool = True
    keep: Callable[[RunningServer], None] | None = None
    bring_back: Callable[[RunningServer], None] | None = None

    def held_tokens(self, setting: Setting) -> int:
        """Return how many tokens its cache has room for: computed, without what else it keeps."""
        return setting.cache_bytes // (setting.token_values * self.value_bytes(setting))


# --- Ours ---


def _hillinfer(setting: Setting) -> AbstractContextManager[RunningServer]:
    options = ("--dram-budget", f"{-(-setting.cache_bytes // _MIB)}MiB")
    return hillinfer_server(
        *(setting.place / "hillinfer", setting.model, setting.parallel, options),
        python=setting.python,
    )


# --- transformers serve ---


def _transformers_missing(_: Setting) -> str | None:
    missing = [name for name in _MODULES if find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} is not installed: pip install 'transformers[serving]'"
    return None


@contextmanager
def _transformers(setting: Setting) -> Iterator[RunningServer]:
    model = str(setting.folder.absolute())
    command = [*setting.python, "-c", _TRANSFORMERS, "serve", model, "--device", "cpu"]
    command += ["--dtype", setting.number_type]
    # It has no field for answers of one length; -1 is no token, so that no answer ends before.
    lasting = {"eos_token_id": -1, "pad_token_id": 0}
    fields = {"generation_config": json.dumps(lasting)}
    with _listening("transformers serve", setting, model, command, fields) as server:
        yield server


# --- llama.cpp ---


def _llama_missing(setting: Setting) -> str | None:
    for file in (setting.llama_server, setting.gguf):
        if not file.is_file():
            return f"{file} is not there: {PREPARE}"
    return None


@contextmanager
def _llama(setting: Setting) -> Iterator[RunningServer]:
    slots = setting.place / "llama.cpp slots"
    slots.mkdir(parents=True, exist_ok=True)
    command = [str(setting.llama_server), "--model", str(setting.gguf), "--alias", "bench"]
    command += ["--threads", str(setting.threads), "--threads-batch", str(setting.threads)]
    # One cache for all slots, whichever of them needs it.
    tokens = setting.cache_bytes // (setting.token_values * _two_bytes(setting))
    command += ["--ctx-size", str(tokens), "--kv-unified"]
    command += ["--parallel", str(setting.parallel), "--slot-save-path", str(slots)]
    command += ["--no-ui", "--offline", "--jinja"]
    # It keeps prompts of slots that are taken by others, too, and has room for them by default.
    fields = {"ignore_eos": True, "cache_prompt": True}
    with _listening("llama.cpp", setting, "bench", command, fields) as server:
        yield server


def _keep_slot(server: RunningServer) -> None:
    _slots(server, "save")


def _restore_slot(server: RunningServer) -> None:
    _slots(server, "restore")


def _slots(server: RunningServer, action: str) -> None:
    """Save the slot that has read most, or read a saved one into the first."""
    number = 0
    if action == "save":
        with urllib.request.urlopen(f"{server.url}/slots", timeout=60) as answer:
            told: Sequence[Mapping[str, int]] = json.load(answer)
        number = max(told, key=lambda one: one.get("n_prompt_tokens", 0))["id"]
    asked = urllib.request.Request(
        f"{server.url}/slots/{number}?action={action}",
        json.dumps({"filename": _SLOT_FILE}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=600) as answer:
        answer.read()


# --- vLLM ---


def _vllm_missing(setting: Setting) -> str | None:
    if not (setting.vllm / "bin/python").exists():
        return f"{setting.vllm} has no vLLM: {PREPARE} (it takes gigabytes of disk)"
    return None


@contextmanager
def _vllm(setting: Setting) -> Iterator[RunningServer]:
    command = [str(setting.vllm / "bin/python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(setting.folder.absolute()), "--served-model-name", "bench"]
    # Compiling takes minutes of few cores; without it a step takes somewhat longer.
    command += ["--dtype", setting.number_type, "--enforce-eager"]
    command += ["--max-model-len", str(setting.context)]
    command += ["--max-num-seqs", str(setting.parallel), "--enable-prefix-caching"]
    command += ["--kv-cache-memory-bytes", str(setting.cache_bytes)]
    command += ["--block-size", str(_VLLM_BLOCK), "--enable-prompt-tokens-details"]
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(setting.threads),
        # As it has them in processes that it binds to cores.
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "LD_PRELOAD": ":".join(map(str, sorted(setting.vllm.absolute().glob("lib/libiomp5.so")))),
        "PYTHONPATH": "",
    }
    fields = {"ignore_eos": True}
    with _listening("vLLM", setting, "bench", command, fields, variables) as server:
        yield server


# --- the table ---


def _two_bytes(_: Setting) -> int:
    return 2


def _as_computed(setting: Setting) -> int:
    return 4 if setting.number_type == "float32" else 2


HILLINFER = ServerKind("hillinfer", "hillinfer serve", _hillinfer, lambda _: None, _two_bytes)
RIVALS = (
    ServerKind(
        "transformers_serve",
        "transformers serve",
        _transformers,
        _transformers_missing,
        _as_computed,
        finds_again=False,
    ),
    ServerKind(
        "llama_cpp",
        "llama.cpp",
        _llama,
        _llama_missing,
        _two_bytes,
        keep=_keep_slot,
        bring_back=_restore_slot,
    ),
    ServerKind("vllm", "vLLM", _vllm, _vllm_missing, _as_computed),
)
"""Whom ours is set beside."""


# --- inside ---


@contextmanager
def _listening(
    name: str,
    setting: Setting,
    model: str,
    command: Sequence[str],
    fields: Mapping[str, object],
    variables: Mapping[str, str] | None = None,
) -> Iterator[RunningServer]:
    """Run a server that is told where it listens, until it answers and then until the end."""
    setting.place.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    log = setting.place / f"{name}.log"
    where = ["--host", "127.0.0.1", "--port", str(port)]
    own = {"OMP_NUM_THREADS": str(setting.threads), **(variables or {})}
    try:
        with server_process(
            [*command, *where], log, variables=own, kept_back=_OF_THREADS
        ) as process:
            running = RunningServer(f"http://127.0.0.1:{port}", model, process, fields, log)
            await_health(running, name, log)
            yield running
    except OSError as error:
        raise ServerError(f"{name} cannot be started ({os.strerror(error.errno or 0)})") from error
