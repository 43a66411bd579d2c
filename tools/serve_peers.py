# SPDX-License-Identifier: Apache-2.0
"""Make other servers ready, beside which `hillinfer-bench serving` sets ours.

python tools/serve_peers.py --build build/peers

llama.cpp's server is compiled over the peer's libraries, and gets the model's weights and tokenizer
as a file of its own. vLLM is installed, which takes gigabytes of disk. `transformers serve` is of
this environment. What cannot be made ready is told, and the others are.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hillinfer.models.loader import ModelOutline
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.models.sources import ModelSource
from hillinfer.system.machine import NumberType
from peers.gguf_weights import write_gguf
from peers.llama_server import llama_server
from peers.peer import VLLM
from peers.peer_environment import PeerSkippedError


def main(arguments: Sequence[str] | None = None) -> None:
    """Make ready what is asked for, and say what is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=Path("build/peers"))
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument(
        "--install-seconds", type=float, default=3600, help="longest time of a step of installing"
    )
    parser.add_argument(
        "--server", nargs="+", choices=("llama_cpp", "vllm"), default=("llama_cpp", "vllm")
    )
    options = parser.parse_args(arguments)
    for name in options.server:
        try:
            made = _MADE[name](options)
        except PeerSkippedError as error:
            print(f"{name}: {error}")
        else:
            print(f"{name}: {made}")


def _llama_cpp(options: argparse.Namespace) -> Path:
    outline = ModelOutline.read(ModelSource.locate(options.model, print), NumberType.AUTO)
    number_type, folder = str(outline.dtype).removeprefix("torch."), Path(outline.source.folder)
    file: Path = options.build / "served" / f"{folder.name}-{number_type}.gguf"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        half = file.with_suffix(".part")
        write_gguf(outline.load().model, number_type, half, folder)
        half.rename(file)
    return llama_server(options.build, options.install_seconds)


def _vllm(options: argparse.Namespace) -> Path:
    return VLLM.python(options.build, options.install_seconds)


_MADE = {"llama_cpp": _llama_cpp, "vllm": _vllm}

if __name__ == "__main__":
    main()
