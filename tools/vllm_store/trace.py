# SPDX-License-Identifier: Apache-2.0
"""Requests of a public trace through `vllm bench serve`, over a store smaller than what they ask.

Prompts are the trace's, so many times shorter: a block of 512 tokens stands as 16, say. Which
blocks they have in common stays; when they come does not, each as soon as one has ended.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
import urllib.request
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hillinfer.store.maintenance import Parts
from hillinfer.store.store import Store
from hillinfer_bench.serving.servers import RunningServer, ServerError
from hillinfer_bench.traces.request_trace import BLOCK_TOKENS, Request, RequestTrace
from hillinfer_model.kernel_spec import GROUP_TOKENS
from vllm_store.engines import ENGINE_BLOCK_TOKENS, SERVED, Installed, vllm_servers

_TRACE = "conversation"
_MOST_TOKENS = 4096
_ANSWER_TOKENS = 2
_LOOK_SECONDS = 0.5
# What `vllm bench serve` does: the command asks for a version of the package `vllm`, and the one
# for processors has another name.
_BENCH = (
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser()\n"
    "add_cli_args(parser)\n"
    "main(parser.parse_args())"
)


@dataclass(frozen=True)
class TraceCase:
    """Which requests are replayed.

    Parameters
    ----------
    requests
        Of the trace, from its beginning on.
    shrink
        Its prompts are so many times shorter; a divisor of 512.
    threads
        Of the server.
    share
        Of the bytes of all that is asked: the store's size.
    together
        Requests under way at once.
    seconds
        Longest time of all.
    """

    requests: int
    shrink: int
    threads: int
    share: float = 0.2
    together: int = 4
    seconds: float = 3600.0

    @property
    def block_tokens(self) -> int:
        """Tokens that a block of the trace stands as."""
        return BLOCK_TOKENS // self.shrink


@dataclass(frozen=True)
class Shrunk:
    """Requests with shorter prompts.

    Parameters
    ----------
    lines
        Of a file in Mooncake's format.
    prompt_tokens
        Of all together.
    groups
        Distinct groups of 64 tokens, which is what a store keeps.
    found
        Tokens that a store without end would give: whole blocks of vLLM, less one token at least.
    """

    lines: tuple[str, ...]
    prompt_tokens: int
    groups: int
    found: int

    @classmethod
    def of(cls, requests: Sequence[Request], block_tokens: int) -> Shrunk:
        """Return some requests, a block of each so many tokens long."""
        lines, tokens, found = [], 0, 0
        seen: set[tuple[int, int, int]] = set()
        for one in requests:
            whole, rest = divmod(one.tokens, BLOCK_TOKENS)
            own = whole * block_tokens - (-rest * block_tokens // BLOCK_TOKENS)
            told = {"timestamp": 0, "input_length": own, "output_length": _ANSWER_TOKENS}
            lines.append(json.dumps(told | {"hash_ids": list(one.blocks)}))
            groups = []
            for stop in range(GROUP_TOKENS, own + 1, GROUP_TOKENS):
                # A block's number stands for all before it; one that is cut has other tokens.
                last = (stop - 1) // block_tokens
                groups.append(
                    (one.blocks[last], min(own - last * block_tokens, block_tokens), stop)
                )
            known = 0
            while known < len(groups) and groups[known] in seen:
                known += 1
            usable = min(known * GROUP_TOKENS, own - 1)
            found += usable // ENGINE_BLOCK_TOKENS * ENGINE_BLOCK_TOKENS
            tokens += own
            seen.update(groups)
        return cls(tuple(lines), tokens, len(seen), found)


def trace_report(installed: Installed, folder: Path, case: TraceCase) -> dict[str, Any]:
    """Replay requests and return what a server with a small store did.

    Parameters
    ----------
    installed
        Of vLLM.
    folder
        Where store and logs are.
    case
        Which requests.
    """
    trace = RequestTrace.carried(_TRACE)
    shrunk = Shrunk.of(trace.requests[: case.requests], case.block_tokens)
    file = folder / "trace.jsonl"
    file.write_text("\n".join(shrunk.lines) + "\n")
    row_bytes = _token_bytes(installed.model)
    working_set = shrunk.groups * GROUP_TOKENS * row_bytes
    size = int(case.share * working_set)
    print(f"{len(shrunk.lines)} requests, {working_set / 1e9:.2f} GB of rows", flush=True)
    place = folder / "server"
    with (
        vllm_servers(installed, [place], case.threads, _MOST_TOKENS, str(size)) as [server],
        _Watch(place / "store") as watch,
    ):
        told = _bench(installed, server, file, case, folder)
        counted = _counted(server)
    with closing(Store(place / "store")) as store:
        verified = store.verify(Parts.ALL)
    loaded = counted.get("hillinfer_loaded_tokens_total", 0.0)
    report = {
        "label": "measured: requests of a public trace, shrunk, through vllm bench serve",
        "trace": _TRACE,
        **asdict(case),
        "block_tokens": case.block_tokens,
        "completed": told["completed"],
        "failed": told["failed"],
        "failures": sorted({one.strip().rpartition("\n")[2] for one in told["errors"] if one}),
        "prompt_tokens": shrunk.prompt_tokens,
        "loaded_tokens": loaded,
        "hit_share": loaded / shrunk.prompt_tokens,
        "most_share": shrunk.found / shrunk.prompt_tokens,
        "failed_loads": counted.get("hillinfer_failed_loads_total", 0.0),
        "stored_bytes": counted.get("hillinfer_stored_bytes_total", 0.0),
        "working_set_bytes": working_set,
        "store_bytes": size,
        "most_bytes": watch.most,
        "wrong_chunks": verified.wrong,
        "duration_seconds": told["duration"],
        "first_token_p50_ms": told["p50_ttft_ms"],
        "first_token_p95_ms": told["p95_ttft_ms"],
    }
    texts = (
        (report["completed"] != len(shrunk.lines), "requests of the trace had no answer"),
        (report["failed"], "requests of the trace failed"),
        (report["failed_loads"], "rows that were found did not come"),
        (watch.most > size, "the store took more than its size"),
        (not loaded, "no request of the trace found anything"),
        (verified.wrong, "the trace left wrong chunks"),
    )
    return report | {"errors": [text for is_wrong, text in texts if is_wrong]}


# --- inside ---


class _Watch:
    """Looks again and again at what a directory takes of its drive."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._ended = directory, threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")
        self.most = 0

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            taken = 0
            for path in self._directory.rglob("*"):
                try:
                    taken += 512 * path.stat().st_blocks if path.is_file() else 0
                except FileNotFoundError:
                    continue
            self.most = max(self.most, taken)


def _bench(
    installed: Installed, server: RunningServer, file: Path, case: TraceCase, folder: Path
) -> dict[str, Any]:
    command = [str(installed.python), "-c", _BENCH]
    command += ["--backend", "openai", "--endpoint", "/v1/completions", "--base-url", server.url]
    command += ["--model", str(installed.model), "--served-model-name", SERVED]
    command += ["--dataset-name", "timed_trace", "--dataset-path", str(file), "--no-self-timed"]
    command += ["--timed-trace-chunk-hash-size", str(case.block_tokens)]
    command += ["--num-prompts", str(case.requests), "--max-concurrency", str(case.together)]
    command += ["--ignore-eos", "--percentile-metrics", "ttft", "--metric-percentiles", "50,95"]
    command += ["--save-result", "--result-dir", str(folder), "--result-filename", "bench.json"]
    command += ["--save-detailed", "--disable-tqdm"]
    log = folder / "bench.log"
    with log.open("w") as said:
        # What a block's tokens are depends on it.
        variables = installed.variables(1) | {"PYTHONHASHSEED": "0"}
        done = subprocess.run(
            command,
            env=variables,
            stdout=said,
            stderr=subprocess.STDOUT,
            timeout=case.seconds,
            check=False,
        )
    result = folder / "bench.json"
    if done.returncode or not result.exists():
        raise ServerError(f"vllm bench serve failed: {log.read_text(errors='replace')[-4000:]}")
    told: dict[str, Any] = json.loads(result.read_text())
    return told


def _counted(server: RunningServer) -> dict[str, float]:
    """Return what the connector counted, by the names of its metrics."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = re.findall(r"^(hillinfer_\w+_total)\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return {name: float(amount) for name, amount in found}


def _token_bytes(model: Path) -> int:
    """Return the bytes of a token's rows in all layers, of 16 bits."""
    config = json.loads((model / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * 2)
