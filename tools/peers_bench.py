# SPDX-License-Identifier: Apache-2.0
"""HillInfer beside other runtimes: same weights, prompts and threads, each in its own process.

python tools/peers_bench.py --out build/reports/peers.json

Every round starts each runtime in turn, reads prompts of each context and decodes after them. A
runtime that cannot be installed or does not run has a row that says why.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hillinfer.machine.processor import ProcessorFacts
from hillinfer.models.loader import ModelOutline
from hillinfer.models.model_source import ModelSource
from hillinfer.models.number_type import NumberType
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.quality.texts import file_samples, standard_library_samples
from peers.crossover import Crossover
from peers.gguf_weights import GGUF_TYPES, write_gguf
from peers.peer import OURS, PEERS, REFERENCE, Peer
from peers.peer_environment import PeerSkippedError, peer_python
from peers.peer_process import PeerProcess

# Runs whose slowest round takes so much longer than the fastest are flagged.
_WIDE_SPREAD = 1.2


@dataclass
class Measured:
    """What a peer did in all rounds.

    Parameters
    ----------
    facts
        As it answered when opened.
    runs
        Answers by context.
    skipped
        Why it stopped taking part; None where it did not.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    runs: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    skipped: str | None = None


def python_of(peer: Peer, options: argparse.Namespace) -> Path:
    """Return the interpreter that runs a peer, its environment made where it has one."""
    if peer.requirements is None:
        return Path(sys.executable)
    assert peer.environment is not None
    folder = options.build / peer.environment
    return peer_python(folder.absolute(), peer.requirements, options.install_seconds)


def take_round(
    peer: Peer,
    measured: Measured,
    opening: dict[str, Any],
    prompts: dict[int, list[int]],
    options: argparse.Namespace,
) -> None:
    """Start a peer, run every context once and note what it answered."""
    command = [str(python_of(peer, options)), str(peer.script)]
    log = options.build / f"{peer.name.replace(' ', '-').replace(',', '')}.log"
    with PeerProcess(command, options.threads, options.seconds, log) as process:
        measured.facts = process.ask({"op": "open", **opening, **peer.options})
        # What a first forward pass sets up is no part of a time to the first token.
        process.ask({"op": "run", "prompt": prompts[min(prompts)][:32], "new_tokens": 2})
        for context, prompt in prompts.items():
            request = {"op": "run", "prompt": prompt, "new_tokens": options.new_tokens}
            measured.runs[context].append(process.ask(request))


def row_of(peer: Peer, context: int, measured: Measured, reference: Measured) -> dict[str, Any]:
    """Return one row of the report; times in milliseconds."""
    runs = measured.runs[context]
    steps = [1e3 * statistics.median(run["step_seconds"]) for run in runs]
    firsts = [run["ttft_seconds"] for run in runs]
    tokens = runs[0]["tokens"]
    reference_runs = reference.runs.get(context)
    return {
        "peer": peer.name,
        "context": context,
        "weights": measured.facts["weights"],
        "kv": measured.facts["kv"],
        "step_ms": {
            "fastest": 1e3 * min(min(run["step_seconds"]) for run in runs),
            "median": statistics.median(steps),
        },
        "decode_tokens_per_second": 1e3 / statistics.median(steps),
        "ttft_seconds": {"fastest": min(firsts), "median": statistics.median(firsts)},
        "spread": max(steps) / min(steps),
        "wide_spread": max(steps) / min(steps) > _WIDE_SPREAD,
        "equal_tokens": _equal(tokens, reference_runs[0]["tokens"]) if reference_runs else None,
        "new_tokens": len(tokens),
    }


def _equal(own: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first tokens agree."""
    same = [one == two for one, two in zip(own, other, strict=False)]
    return same.index(False) if False in same else len(same)


def report_of(
    results: dict[str, Measured], contexts: Sequence[int], facts: dict[str, Any]
) -> dict[str, Any]:
    """Return the whole report."""
    reference = results.get(REFERENCE, Measured())
    rows, skipped, crossovers = [], {}, {}
    medians: dict[str, list[float]] = {}
    for peer in PEERS:
        measured = results.get(peer.name)
        if measured is None:
            continue
        if measured.skipped is not None:
            skipped[peer.name] = measured.skipped
        own = [row_of(peer, one, measured, reference) for one in contexts if measured.runs[one]]
        rows += own
        if len(own) == len(contexts):
            medians[peer.name] = [row["step_ms"]["median"] for row in own]
    for name, theirs in medians.items():
        if OURS in medians and not name.startswith(OURS):
            crossovers[name] = asdict(Crossover.of(contexts, medians[OURS], theirs))
    versions = {name: one.facts["versions"] for name, one in results.items() if one.facts}
    return {
        **facts,
        "versions": versions,
        "rows": rows,
        "skipped": skipped,
        "crossovers_of_hillinfer": crossovers,
    }


def table_text(report: dict[str, Any]) -> str:
    """Return the report for reading."""
    lines = [
        f"{'':32} {'weights':>9} {'KV':>9} {'context':>7} {'TTFT s':>8} {'ms/token':>9} "
        f"{'tokens/s':>8}  equal tokens"
    ]
    for row in report["rows"]:
        flag = "  spread above 20 %" if row["wide_spread"] else ""
        lines.append(
            f"{row['peer']:32} {row['weights']:>9} {row['kv']:>9} {row['context']:7d} "
            f"{row['ttft_seconds']['median']:8.2f} {row['step_ms']['median']:9.1f} "
            f"{row['decode_tokens_per_second']:8.1f}  "
            f"{row['equal_tokens']}/{row['new_tokens']}{flag}"
        )
    for name, found in report["crossovers_of_hillinfer"].items():
        where = "" if found["context"] is None else f"{found['context']:.0f} tokens, "
        lines.append(f"hillinfer decodes faster than {name} from: {where}{found['kind']}")
    lines += [f"{name}: skipped: {why}" for name, why in report["skipped"].items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every peer and write a report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/reports/peers.json"))
    parser.add_argument("--build", type=Path, default=Path("build/peers"))
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", choices=sorted(GGUF_TYPES), default="bfloat16")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8000])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--text", type=Path, help="the prompts' text; the Python reference if none")
    parser.add_argument(
        "--peers", nargs="+", choices=[peer.name for peer in PEERS], metavar="NAME",
        default=[peer.name for peer in PEERS],
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=1800, help="longest wait for an answer")
    parser.add_argument("--install-seconds", type=float, default=3600)
    options = parser.parse_args(arguments)
    options.build.mkdir(parents=True, exist_ok=True)
    contexts = sorted(set(options.contexts))
    outline = ModelOutline.read(ModelSource.locate(options.model, print), NumberType(options.dtype))
    samples = (
        file_samples(outline.tokenizer, [options.text], contexts[-1])
        if options.text
        else standard_library_samples(outline.tokenizer, contexts[-1])
    )
    prompts = {one: list(samples[0].token_ids[:one]) for one in contexts}
    folder = Path(outline.source.folder).absolute()
    opening = {
        "model": str(folder),
        "dtype": options.dtype,
        "threads": options.threads,
        "positions": contexts[-1] + options.new_tokens,
    }
    chosen = [peer for peer in PEERS if peer.name in options.peers]
    results = {peer.name: Measured() for peer in chosen}
    if any(peer.environment == "llama_cpp" for peer in chosen):
        file = (options.build / f"{folder.name}-{GGUF_TYPES[options.dtype]}.gguf").absolute()
        try:
            kind = write_gguf(outline.load().model, options.dtype, file)
            opening |= {"gguf": str(file), "gguf_type": kind}
        except PeerSkippedError as error:
            for peer in chosen:
                if peer.environment == "llama_cpp":
                    results[peer.name].skipped = str(error)
    for number in range(options.rounds):
        for peer in chosen:
            measured = results[peer.name]
            if measured.skipped is not None:
                continue
            print(f"round {number + 1} of {options.rounds}: {peer.name}", flush=True)
            try:
                take_round(peer, measured, opening, prompts, options)
            except PeerSkippedError as error:
                measured.skipped = str(error)
                print(f"{peer.name}: skipped: {error}", flush=True)
    facts = {
        "model": options.model,
        "dtype": options.dtype,
        "processor": ProcessorFacts.read().name,
        "threads": options.threads,
        "rounds": options.rounds,
        "new_tokens": options.new_tokens,
    }
    report = report_of(results, contexts, facts)
    print(table_text(report))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
