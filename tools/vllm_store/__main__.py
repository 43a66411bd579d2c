# SPDX-License-Identifier: Apache-2.0
"""vLLM with the store beneath it: restarts, damage, a kill, other salts; beside vLLM alone.

python tools/vllm_store --out build/reports/vllm_store.json

vLLM's build for processors is installed into an environment of its own first, once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from hillinfer.models.registry_model import DEFAULT_MODEL, registry_model  # noqa: E402
from hillinfer.store.store import Store  # noqa: E402
from hillinfer_bench.quality.texts import standard_library_samples  # noqa: E402
from peers.peer import VLLM  # noqa: E402
from peers.peer_environment import PeerSkippedError  # noqa: E402

_PARTS = ("sw_model", "host", "plugins/hillinfer_vllm")
# Of the pool file, what is overwritten to damage rows: behind the sheets of the first chunk.
_DAMAGE_STEP, _DAMAGE_FROM = 1 << 16, 1 << 20


@dataclass(frozen=True)
class Runs:
    """Starts processes of vLLM.

    Parameters
    ----------
    python, preloaded
        Interpreter that has vLLM, and libraries that are loaded before it.
    model, ids
        Directory of the model, and the file of the prompt's token numbers.
    threads, answer_tokens
        As each process has them.
    seconds
        Longest time of one.
    log
        What the last one said.
    """

    python: Path
    preloaded: Sequence[Path]
    model: Path
    ids: Path
    threads: int
    answer_tokens: int
    seconds: float
    log: Path

    def ask(
        self, store: Path | None, times: int = 1, salt: str | None = None, ranks: int = 1
    ) -> Any:
        """Return the answers of one engine that lives as long as it answers."""
        with self._started(store, times, salt, ranks) as process:
            try:
                output, _ = process.communicate(timeout=self.seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                raise SystemExit(f"vLLM gave no answer in {self.seconds:.0f} s") from None
        errors = self.log.read_text(errors="replace")
        for line in output.splitlines():
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        raise SystemExit(f"vLLM gave no answer (exit {process.returncode}):\n{errors[-4000:]}")

    def killed(self, store: Path, seconds: float) -> None:
        """Kill a process some time after it began to read the prompt."""
        with self._started(store, 1, None, 1) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("ASKING"):
                    break
            time.sleep(seconds)
            process.send_signal(signal.SIGKILL)

    def _started(self, store: Path | None, times: int, salt: str | None, ranks: int) -> Any:
        request = {
            "model": str(self.model),
            "ids": str(self.ids),
            "store": None if store is None else str(store),
            "times": times,
            "salt": salt,
            "ranks": ranks,
            "threads": self.threads,
            "answer_tokens": self.answer_tokens,
        }
        paths = os.pathsep.join(str(ROOT / part) for part in _PARTS)
        return subprocess.Popen(
            [str(self.python), str(Path(__file__).with_name("engine_run.py")), json.dumps(request)],
            env=os.environ
            | {"PYTHONPATH": paths, "LD_PRELOAD": ":".join(map(str, self.preloaded))},
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every case and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/reports/vllm_store.json"))
    parser.add_argument("--build", type=Path, default=Path("build/peers"))
    parser.add_argument("--tokens", type=int, default=8064, help="of the document")
    parser.add_argument("--new-tokens", type=int, default=64, help="of the question behind it")
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        help="tensor-parallel ranks of two engines more; SmolLM2's heads take 3. 1: none",
    )
    parser.add_argument("--seconds", type=float, default=900, help="longest time of one process")
    parser.add_argument("--install-seconds", type=float, default=3600)
    options = parser.parse_args(arguments)
    try:
        python = VLLM.python(options.build, options.install_seconds)
    except PeerSkippedError as error:
        raise SystemExit(f"vLLM cannot be installed: {error}") from error
    model = registry_model(DEFAULT_MODEL).fetch(print)
    with tempfile.TemporaryDirectory(dir=options.build) as folder:
        ids = Path(folder) / "ids.json"
        ids.write_text(json.dumps(_document(model, options.tokens + options.new_tokens)))
        libraries, limits = VLLM.libraries(options.build), (options.answer_tokens, options.seconds)
        log = options.build / "vllm-store.log"
        runs = Runs(python, libraries, model, ids, options.threads, *limits, log)
        report = _report(runs, Path(folder), options.tokens, options.new_tokens)
        if options.ranks > 1:
            report["ranks"] = _of_ranks(runs, Path(folder) / "ranks", options.ranks)
            report["errors"] += report["ranks"].pop("errors")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    if report["errors"]:
        raise SystemExit("; ".join(report["errors"]))


def _report(runs: Runs, folder: Path, tokens: int, new_tokens: int) -> dict[str, Any]:
    store, broken = folder / "store", folder / "broken"
    print("vLLM alone: reads the prompt, then finds it in its own prefix cache", flush=True)
    computed, cached = runs.ask(None, times=2)
    print("with an empty store", flush=True)
    [stored] = runs.ask(store)
    shutil.copytree(store, broken)
    print("after a restart", flush=True)
    [restarted] = runs.ask(store)
    print("another salt", flush=True)
    [salted] = runs.ask(store, salt="another")
    print("after a restart, with damaged rows", flush=True)
    flipped = _damage(broken)
    [damaged] = runs.ask(broken)
    print("once more, over what that left", flush=True)
    [mended] = runs.ask(broken)
    print("killed in the middle of storing, and restarted", flush=True)
    half = folder / "half"
    runs.killed(half, computed["first_token_seconds"] / 2)
    [revived] = runs.ask(half)
    loads = restarted["store"]
    # A prompt that is found in part is divided otherwise into passes, and rounded otherwise.
    alike = computed["tokens"], cached["tokens"]
    errors = [
        text
        for is_wrong, text in (
            (not loads.get("loaded_tokens"), "nothing was loaded after the restart"),
            (restarted["tokens"] != cached["tokens"], "other tokens after the restart"),
            (restarted["logprobs"] != cached["logprobs"], "other log-probabilities"),
            (stored["tokens"] != computed["tokens"], "other tokens while storing"),
            (salted["tokens"] != computed["tokens"], "other tokens under another salt"),
            (salted["store"].get("loaded_tokens"), "another salt found the rows"),
            (damaged["tokens"] != computed["tokens"], "other tokens after damage"),
            (not damaged["store"].get("failed_loads"), "damage went unnoticed"),
            (mended["tokens"] not in alike, "other tokens behind the damage"),
            (mended["store"].get("failed_loads"), "damaged rows were found once more"),
            (revived["tokens"] not in alike, "other tokens after a kill"),
        )
        if is_wrong
    ]
    waited, loading = loads.get("waited_seconds", 0.0), loads.get("loading_seconds", 0.0)
    return {
        "label": "measured on this machine",
        "tokens": tokens,
        "new_tokens": new_tokens,
        "threads": runs.threads,
        "tokens_equal": restarted["tokens"] == cached["tokens"],
        "logprobs_equal": restarted["logprobs"] == cached["logprobs"],
        "first_token_seconds": restarted["first_token_seconds"],
        "own_cache_seconds": cached["first_token_seconds"],
        "recompute_seconds": computed["first_token_seconds"],
        "prefill_with_storing": stored["first_token_seconds"] / computed["first_token_seconds"],
        "hidden_share": 1 - waited / loading if loading else None,
        "flipped_bytes": flipped,
        "runs": {
            "stored": stored["store"],
            "restarted": loads,
            "damaged": damaged["store"],
            "revived": revived["store"],
        },
        "errors": errors,
    }


def _of_ranks(runs: Runs, store: Path, ranks: int) -> dict[str, Any]:
    """Have several ranks store a prompt, and others load it after a restart."""
    print(f"{ranks} ranks: store the prompt, then find it in their own prefix cache", flush=True)
    computed, cached = runs.ask(store, times=2, ranks=ranks)
    print(f"{ranks} ranks, after a restart", flush=True)
    [restarted] = runs.ask(store, ranks=ranks)
    errors = [
        text
        for is_wrong, text in (
            (not restarted["cached_tokens"], "ranks loaded nothing after a restart"),
            (restarted["tokens"] != cached["tokens"], "other tokens of ranks after a restart"),
            (restarted["logprobs"] != cached["logprobs"], "other log-probabilities of ranks"),
        )
        if is_wrong
    ]
    return {
        "ranks": ranks,
        "cached_tokens": restarted["cached_tokens"],
        "first_token_seconds": restarted["first_token_seconds"],
        "own_cache_seconds": cached["first_token_seconds"],
        "recompute_seconds": computed["first_token_seconds"],
        "errors": errors,
    }


def _document(model: Path, tokens: int) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    [sample] = standard_library_samples(tokenizer, tokens - 1, parts=1)
    return list(sample.token_ids[:tokens])


def _damage(directory: Path) -> int:
    """Overwrite bytes of stored rows all over the pool; return how many."""
    with Store(directory) as store:
        files = [file.path for file in store.files]
        used = int(store.statistics()["chunk_bytes"])
    count = 0
    # The copy's own file, whatever the store says of its place.
    for path in (directory / one.name for one in files):
        with path.open("r+b") as file:
            for at in range(_DAMAGE_FROM, used, _DAMAGE_STEP):
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 0x10]))
                count += 1
    return count


if __name__ == "__main__":
    main()
