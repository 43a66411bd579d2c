# SPDX-License-Identifier: Apache-2.0
"""vLLM with the store beneath it: restarts, damage, a kill, other salts; beside vLLM alone.

python tools/vllm_store --out build/reports/vllm_store.json

Its parts: `engines`, one process after the other that is asked one prompt; `both`, HillInfer and
vLLM over one store; `replicas`, two servers with a store each behind a router; `trace`, requests of
a public trace through `vllm bench serve` over a small store; `others`, what else keeps KV beneath
vLLM, where it runs here. Each part is written to the report once it has ended, beside those of
earlier runs.

vLLM's build for processors is installed into an environment of its own first, once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from hillinfer.models.registry_model import DEFAULT_MODEL, registry_model  # noqa: E402
from hillinfer.store.store import Store  # noqa: E402
from hillinfer_bench.quality.texts import standard_library_samples  # noqa: E402
from hillinfer_bench.serving.servers import ServerError  # noqa: E402
from peers.peer import VLLM  # noqa: E402
from peers.peer_environment import PeerSkippedError  # noqa: E402
from vllm_store.both import both_report  # noqa: E402
from vllm_store.engines import EngineError, Installed, Runs, store_transfer  # noqa: E402
from vllm_store.hiding import Hiding  # noqa: E402
from vllm_store.others import others_report  # noqa: E402
from vllm_store.replicas import ReplicasCase, replicas_report  # noqa: E402
from vllm_store.trace import TraceCase, trace_report  # noqa: E402

# Of the pool file, what is overwritten to damage rows: behind the sheets of the first chunk.
_DAMAGE_STEP, _DAMAGE_FROM = 1 << 16, 1 << 20
PARTS = ("engines", "both", "replicas", "trace", "others")


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
    parser.add_argument(
        "--part",
        action="append",
        choices=PARTS,
        help="what is run; give it again for more. engines by default",
    )
    parser.add_argument(
        "--rounds",
        type=_rounds,
        default=5,
        help="of first tokens beside their parts alone; 2 or more",
    )
    parser.add_argument("--requests", type=int, default=1000, help="of the trace that are replayed")
    parser.add_argument(
        "--shrink", type=int, default=32, help="of the trace: its prompts are so many times shorter"
    )
    options = parser.parse_args(arguments)
    try:
        python = VLLM.python(options.build, options.install_seconds)
    except PeerSkippedError as error:
        raise SystemExit(f"vLLM cannot be installed: {error}") from error
    model = registry_model(DEFAULT_MODEL).fetch(print)
    installed = Installed(python, VLLM.libraries(options.build), model)
    errors: list[str] = []
    with tempfile.TemporaryDirectory(dir=options.build) as place:
        makers: dict[str, Callable[[Path], dict[str, Any]]] = {
            "engines": lambda folder: _engines(installed, folder, options),
            "both": lambda folder: both_report(_runs(installed, folder, options), folder),
            "replicas": lambda folder: replicas_report(installed, folder, ReplicasCase()),
            "trace": lambda folder: trace_report(
                installed, folder, TraceCase(options.requests, options.shrink, options.threads)
            ),
            "others": lambda folder: others_report(_runs(installed, folder, options), folder),
        }
        for part in dict.fromkeys(options.part or ["engines"]):
            folder = Path(place) / part
            folder.mkdir()
            try:
                own = makers[part](folder)
            except (EngineError, ServerError) as error:
                raise SystemExit(f"vLLM gave no answer: {error}") from error
            errors += own["errors"]
            told = own if part == "engines" else {part: own}
            _write(options.out, part, told)
            print(json.dumps(told, indent=1), flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    if errors:
        raise SystemExit("; ".join(errors))


def _rounds(text: str) -> int:
    """Return how many rounds an option asks for."""
    count = int(text) if text.isdecimal() else 0
    if count < 2:
        raise argparse.ArgumentTypeError(f"{text} rounds have no median: ask for 2 or more")
    return count


def _write(out: Path, part: str, told: dict[str, Any]) -> None:
    """Write a part beside those that are there; errors are those of the engines."""
    before = json.loads(out.read_text()) if out.exists() else {"errors": []}
    kept = {name: before[name] for name in PARTS if name in before}
    report = told | kept if part == "engines" else before | told
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")


def _runs(installed: Installed, folder: Path, options: argparse.Namespace) -> Runs:
    ids = folder / "ids.json"
    ids.write_text(json.dumps(_document(installed.model, options.tokens + options.new_tokens)))
    log = options.build / "vllm-store.log"
    limits = options.answer_tokens, options.seconds
    return Runs(installed, ids, options.threads, *limits, log)


def _engines(installed: Installed, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    runs = _runs(installed, folder, options)
    report = _report(runs, folder, options.tokens, options.new_tokens, options.rounds)
    if options.ranks > 1:
        report["ranks"] = _of_ranks(runs, folder / "ranks", options.ranks)
        report["errors"] += report["ranks"].pop("errors")
    return report


def _report(runs: Runs, folder: Path, tokens: int, new_tokens: int, rounds: int) -> dict[str, Any]:
    store, broken = folder / "store", folder / "broken"
    print("vLLM alone: reads the prompt, then finds it in its own prefix cache", flush=True)
    computed, cached = runs.ask(None, times=2)["answers"]
    print("with an empty store", flush=True)
    [stored] = runs.ask(store_transfer(store))["answers"]
    shutil.copytree(store, broken)
    print("after a restart", flush=True)
    again = runs.ask(store_transfer(store), rounds=1 + rounds)
    [restarted] = again["answers"]
    hiding = Hiding.of(again["rounds"], len(os.sched_getaffinity(0)))
    print("another salt", flush=True)
    [salted] = runs.ask(store_transfer(store), salt="another")["answers"]
    print("after a restart, with damaged rows", flush=True)
    flipped = _damage(broken)
    [damaged] = runs.ask(store_transfer(broken))["answers"]
    print("once more, over what that left", flush=True)
    [mended] = runs.ask(store_transfer(broken))["answers"]
    print("killed in the middle of storing, and restarted", flush=True)
    half = folder / "half"
    runs.killed(half, computed["first_token_seconds"] / 2)
    [revived] = runs.ask(store_transfer(half))["answers"]
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
        "unwaited_share": 1 - waited / loading if loading else None,
        "hidden_share": hiding.share(hiding.stored),
        "hiding": hiding.told(),
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
    computed, cached = runs.ask(store_transfer(store), times=2, ranks=ranks)["answers"]
    print(f"{ranks} ranks, after a restart", flush=True)
    [restarted] = runs.ask(store_transfer(store), ranks=ranks)["answers"]
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
