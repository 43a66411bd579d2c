# SPDX-License-Identifier: Apache-2.0
"""The first token of a stored prompt in other runtimes: vLLM recomputes, llama.cpp restores a slot.

python tools/stored_peers.py --out build/reports/store_peers.json

Each is installed into a virtual environment of its own first, once: a few minutes, in which
llama.cpp is compiled. What cannot be installed has a row that says why.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hillinfer.models.loader import ModelOutline
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.models.sources import ModelSource
from hillinfer.system.machine import NumberType
from hillinfer_bench.quality.texts import standard_library_samples
from hillinfer_bench.storing.rivals import LLAMA_CPP, VLLM, RivalRow
from peers.gguf_weights import GGUF_TYPES, write_gguf
from peers.peer import PEERS, Peer
from peers.peer_environment import PeerSkippedError
from peers.peer_process import PeerProcess

# Rows of the report, the peer that each asks, and how.
_ASKED = {VLLM: ("vllm", "run"), LLAMA_CPP: ("llama.cpp", "restore")}
_WARM_UP = 32


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask every peer and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/reports/store_peers.json"))
    parser.add_argument("--build", type=Path, default=Path("build/peers"))
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", choices=sorted(GGUF_TYPES), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="of it that are not stored")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1800, help="longest wait for an answer")
    parser.add_argument(
        "--install-seconds", type=float, default=3600, help="longest time of a step of installing"
    )
    parser.add_argument(
        "--peer", nargs="+", choices=[peer for peer, _ in _ASKED.values()],
        help="who is asked; all by default. vLLM takes gigabytes of disk",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    rows = [
        RivalRow(name, skipped="not asked: --peer names others")
        if options.peer and peer not in options.peer
        else _row(name, peer, way, options)
        for name, (peer, way) in _ASKED.items()
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1))
    for row in rows:
        print(f"{row.name}: {row.skipped or row.seconds}")


def _row(name: str, peer_name: str, way: str, options: argparse.Namespace) -> RivalRow:
    peer = next(one for one in PEERS if one.name == peer_name)
    assert peer.environment is not None
    try:
        python = peer.environment.python(options.build, options.install_seconds)
        return RivalRow(name, _seconds(peer, python, way, options))
    except PeerSkippedError as error:
        return RivalRow(name, skipped=str(error))


def _seconds(peer: Peer, python: Path, way: str, options: argparse.Namespace) -> list[float]:
    outline = ModelOutline.read(ModelSource.locate(options.model, print), NumberType(options.dtype))
    tokens = min(outline.shape.max_positions - 64, options.tokens)
    (sample,) = standard_library_samples(outline.tokenizer, tokens - 1, 1)
    ids = list(sample.token_ids)
    environment = peer.environment
    assert environment is not None
    log = options.build / f"{peer.name}-stored.log"
    with tempfile.TemporaryDirectory(dir=options.build) as folder:
        opening = {
            "op": "open",
            "model": str(Path(outline.source.folder).absolute()),
            "threads": options.threads,
            "dtype": options.dtype,
            "positions": len(ids) + 64,
            **peer.options,
        }
        if way == "restore":
            weights = Path(folder).absolute() / "model.gguf"
            kind = write_gguf(outline.load().model, options.dtype, weights).kind
            opening |= {"gguf": str(weights), "gguf_type": kind}
        with PeerProcess(
            [str(python), str(peer.script)],
            options.threads,
            options.seconds,
            log,
            environment.libraries(options.build),
            peer.variables,
        ) as process:
            process.ask(opening)
            process.ask({"op": "run", "prompt": ids[:_WARM_UP], "follow": ids[:2]})
            request: dict[str, Any] = {"op": way, "prompt": ids, "follow": ids[:1]}
            if way == "restore":
                request |= {
                    "held": len(ids) - options.new_tokens,
                    "file": str(Path(folder).absolute() / "slot"),
                }
            times = [process.ask(request)["ttft_seconds"] for _ in range(options.rounds)]
    return [float(one) for one in times]


if __name__ == "__main__":
    main()
