# SPDX-License-Identifier: Apache-2.0
"""HillInfer beside other runtimes: same weights, prompts and threads, each in its own process.

python tools/peers_bench.py --out build/reports/peers.json

Every round starts each runtime in turn, reads prompts of each context and decodes the text's own
tokens after them. A runtime that cannot be installed or does not run has a row that says why.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hillinfer.errors import PromptError
from hillinfer.models.loader import ModelOutline
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.models.sources import ModelSource
from hillinfer.system.machine import MemoryFacts, NumberType
from hillinfer_bench.quality.texts import TextSample, file_samples, standard_library_samples
from hillinfer_bench.report.kinds import MachineKind
from peers.gguf_weights import GGUF_TYPES, write_gguf
from peers.peer import LLAMA_CPP, PEERS, Peer
from peers.peer_environment import PeerSkippedError
from peers.peer_process import PeerProcess
from peers.prompts import Prompts
from peers.report import Measured, report_of, table_text

# Steps of the first round, after those that are timed, whose parts are taken.
_PROFILED_STEPS = 4


# The prompt that warms up, and what is decoded after it.
_WARM_UP = (32, 2)


def python_of(peer: Peer, options: argparse.Namespace) -> Path:
    """Return the interpreter that runs a peer, its environment made where it has one."""
    if peer.environment is None:
        return Path(sys.executable)
    return peer.environment.python(options.build, options.install_seconds)


def take_round(
    peer: Peer,
    measured: Measured,
    opening: dict[str, Any],
    texts: dict[int, tuple[list[int], list[int]]],
    options: argparse.Namespace,
) -> None:
    """Start a peer, run every context once and note what it answered.

    Parameters
    ----------
    peer, measured
        Who, and where its answers go.
    opening
        What every peer is opened with.
    texts
        Prompt and the tokens that follow it, by context.
    options
        Of the command.

    Raises
    ------
    PeerSkippedError
        Where it cannot be installed, fails or computes with another number of threads.
    """
    command = [str(python_of(peer, options)), str(peer.script)]
    log = options.build / f"{peer.name.replace(' ', '-').replace(',', '')}.log"
    libraries = peer.environment.libraries(options.build) if peer.environment else []
    variables = {**peer.variables, **dict(options.variables)}
    with PeerProcess(
        command, options.threads, options.seconds, log, libraries, variables
    ) as process:
        measured.facts = process.ask({"op": "open", **opening, **peer.options})
        if measured.facts["threads"] != options.threads:
            raise PeerSkippedError(
                f"it computes with {measured.facts['threads']} threads instead of "
                f"{options.threads}: choose another --threads"
            )
        # What a first forward pass sets up is no part of a time to the first token.
        prompt, _ = texts[min(texts)]
        first, more = _WARM_UP
        warming = {"prompt": prompt[:first], "follow": prompt[first : first + more]}
        process.ask({"op": "run", **warming})
        for context, (prompt, follow) in texts.items():
            request = {"op": "run", "prompt": prompt, "follow": follow}
            if not measured.runs[context]:
                request["profiled_steps"] = _PROFILED_STEPS
            measured.runs[context].append(process.ask(request))


def main(arguments: Sequence[str] | None = None, peers: Sequence[Peer] = PEERS) -> None:
    """Run every peer and write a report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/reports/peers.json"))
    parser.add_argument("--build", type=Path, default=Path("build/peers"))
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", choices=sorted(GGUF_TYPES), default="bfloat16")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8000, 16384],
        help="tokens of each prompt; %(default)s if none",
    )  # fmt: skip
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--text", type=Path, help="the prompts' text; the Python reference if none")
    parser.add_argument(
        "--peers", nargs="+", choices=[peer.name for peer in peers], metavar="NAME",
        default=[peer.name for peer in peers],
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=1800, help="longest wait for an answer")
    parser.add_argument("--install-seconds", type=float, default=3600)
    parser.add_argument(
        "--variables", type=_variable, nargs="+", default=[], metavar="NAME=VALUE",
        help="given to every worker, as GOMP_SPINCOUNT=0 on a busy machine; none by default",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    _check(parser, options)
    options.build.mkdir(parents=True, exist_ok=True)
    contexts = sorted(set(options.contexts))
    outline = ModelOutline.read(ModelSource.locate(options.model, print), NumberType(options.dtype))
    if outline.source.gguf_file:
        parser.error(
            f"--model {options.model}: a GGUF file is read by few of the peers: give a folder"
        )

    def sample(tokens: int) -> TextSample:
        if options.text:
            return file_samples(outline.tokenizer, [options.text], tokens)[0]
        return standard_library_samples(outline.tokenizer, tokens)[0]

    try:
        prompts = Prompts.of(
            contexts,
            options.new_tokens,
            sample,
            MemoryFacts.read().available_bytes,
            outline.loading_bytes,
            # Of the peers' caches: those of float32 models have 32 bits, HillInfer's rows 16.
            outline.shape.token_bytes * outline.dtype.itemsize // 2,
        )
    except PromptError as error:
        parser.error(str(error))
    for context, why in prompts.left_out.items():
        print(f"{context} tokens: left out: {why}", flush=True)
    texts = prompts.parts
    folder = Path(outline.source.folder).absolute()
    opening = {
        "model": str(folder),
        "dtype": options.dtype,
        "threads": options.threads,
        "positions": max(texts) + options.new_tokens + _PROFILED_STEPS,
    }
    chosen = [peer for peer in peers if peer.name in options.peers]
    results = {peer.name: Measured() for peer in chosen}
    # Before anything is timed, since some are compiled.
    for peer in chosen:
        try:
            python_of(peer, options)
        except PeerSkippedError as error:
            results[peer.name].skipped = str(error)
            print(f"{peer.name}: skipped: {error}", flush=True)
    gguf: dict[str, Any] = {}
    if any(peer.environment is LLAMA_CPP for peer in chosen):
        file = (options.build / f"{folder.name}-{GGUF_TYPES[options.dtype]}.gguf").absolute()
        try:
            gguf = asdict(write_gguf(outline.load().model, options.dtype, file))
            opening |= {"gguf": str(file), "gguf_type": gguf["kind"]}
        except PeerSkippedError as error:
            for peer in chosen:
                if peer.environment is LLAMA_CPP:
                    results[peer.name].skipped = str(error)
    facts = {
        "model": options.model,
        "dtype": options.dtype,
        **MachineKind.here(options.dtype).as_record(),
        "threads": options.threads,
        "rounds": options.rounds,
        "variables": dict(options.variables),
        "text": prompts.name,
        "left_out": {str(context): why for context, why in prompts.left_out.items()},
        "trained_context": outline.config.max_position_embeddings,
        "gguf": gguf,
        "new_tokens": options.new_tokens,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for number in range(options.rounds):
        for peer in chosen:
            measured = results[peer.name]
            if measured.skipped is not None:
                continue
            print(f"round {number + 1} of {options.rounds}: {peer.name}", flush=True)
            try:
                take_round(peer, measured, opening, texts, options)
            except PeerSkippedError as error:
                measured.skipped = str(error)
                print(f"{peer.name}: skipped: {error}", flush=True)
        # What was measured is kept where a later round is broken off.
        report = report_of(results, contexts, facts)
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(table_text(report))


def _variable(text: str) -> tuple[str, str]:
    """Read NAME=VALUE."""
    name, sign, value = text.partition("=")
    if not name or not sign:
        raise argparse.ArgumentTypeError(f"{text}: give NAME=VALUE, as GOMP_SPINCOUNT=0")
    return name, value


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse numbers that nothing can be measured with."""
    least = {"new_tokens": 2, "rounds": 1, "threads": 1}
    for name, number in least.items():
        if getattr(options, name) < number:
            parser.error(
                f"--{name.replace('_', '-')} {getattr(options, name)}: give at least {number}"
            )
    if min(options.contexts) < sum(_WARM_UP):
        parser.error(f"--contexts {min(options.contexts)}: give at least {sum(_WARM_UP)} tokens")


if __name__ == "__main__":
    main()
