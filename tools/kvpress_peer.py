# SPDX-License-Identifier: Apache-2.0
"""`python tools/kvpress_peer.py`: whether our droppers keep what kvpress keeps, index for index.

kvpress 0.5.5 wants an older transformers, so it is installed into a virtual environment of its own
first, once, and reads the text there. Its keys, values and hidden states come back, with what it
would keep of them; our scorers are given the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from hillinfer.forms.dropped import DROPPERS, LayerQueries, kept_positions, kept_tokens, queries_of
from hillinfer.models.loader import ModelOutline
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.models.sources import ModelSource
from hillinfer.system.machine import NumberType
from hillinfer_bench.quality.texts import standard_library_samples
from peers.peer_environment import PeerEnvironment, PeerSkippedError

REMOVED = (0.1, 0.25, 0.5, 0.65, 0.8)
_WORKER = Path(__file__).parent / "peers" / "kvpress_worker.py"


@dataclass(frozen=True)
class Compared:
    """What one dropper keeps at one share, of all layers and KV heads of a model.

    Parameters
    ----------
    model, dropper, removed
        What was compared.
    sets
        How many there are: layers times KV heads.
    equal
        How many of them are equal index for index.
    other
        How many indices of all sets are others.
    """

    model: str
    dropper: str
    removed: float
    sets: int
    equal: int
    other: int


def compared(name: str, model: Any, saved: Mapping[str, Any]) -> list[Compared]:
    """Return how our sets compare with those that kvpress saved.

    Parameters
    ----------
    name
        Of the model.
    model
        The same weights, in our transformers.
    saved
        What `kvpress_worker` saved.
    """
    rows = []
    for key, theirs in saved["kept"].items():
        dropper, removed = key.split()
        equal = other = 0
        for layer, kept in enumerate(theirs):
            ours = kept_by(model, saved, dropper, float(removed), layer)
            for one, head in zip(ours.tolist(), kept.sort(dim=-1).values.tolist(), strict=True):
                equal += one == head
                other += len({*head} - {*one})
        rows.append(Compared(name, dropper, float(removed), theirs[..., 0].numel(), equal, other))
    return rows


def kept_by(
    model: Any, saved: Mapping[str, Any], name: str, removed: float, layer: int
) -> torch.Tensor:
    """Return what this project's dropper keeps of a layer, int64 (kv_heads, kept), ascending."""
    keys, values = saved["keys"][layer], saved["values"][layer]
    dropper = DROPPERS[name]()
    queries: LayerQueries | None = None
    if dropper.observed:
        last = slice(max(0, keys.shape[1] - dropper.observed), None)
        cosines, sines = (part[None, last] for part in saved["rotary"])
        attention = model.model.layers[layer].self_attn
        queries = queries_of(attention, saved["hidden"][layer][None, last], (cosines, sines))

    def turn(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = model.model.rotary_emb(keys, positions[None])
        return cosines[0], sines[0]

    with torch.no_grad():
        scores = dropper.score(keys, values, queries, turn)
    return kept_positions(scores, kept_tokens(keys.shape[1], 1 - removed))


def ask(python: Path, folder: Path, ids: Sequence[int], out: Path, seconds: float) -> Any:
    """Return what kvpress saved of a text.

    Raises
    ------
    PeerSkippedError
        Where it could not read it.
    """
    request = {"model": str(folder), "ids": list(ids), "removed": REMOVED, "out": str(out)}
    done = subprocess.run(
        [str(python), str(_WORKER)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    if done.returncode:
        raise PeerSkippedError(f"kvpress failed: {done.stderr.strip()[-500:]}")
    return torch.load(out, weights_only=True)


def _save_random(folder: Path) -> Path:
    """Save a small random Qwen3, whose heads have norms and share keys."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare on a real model and a random one, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/reports/kvpress.json"))
    parser.add_argument("--build", type=Path, default=Path("build/peers"))
    parser.add_argument("--python", type=Path, help="an interpreter that has kvpress already")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=640)
    parser.add_argument("--seconds", type=float, default=1800, help="longest wait for each step")
    given = parser.parse_args(arguments)
    try:
        environment = PeerEnvironment("kvpress")
        python = given.python or environment.python(given.build, given.seconds)
        outline = ModelOutline.read(ModelSource.locate(given.model, print), NumberType.FLOAT32)
        (sample,) = standard_library_samples(outline.tokenizer, given.tokens - 1, 1)
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            places: dict[str, Path] = {
                given.model: outline.source.folder,
                "random qwen3": _save_random(Path(folder) / "qwen3"),
            }
            for name, place in places.items():
                ids = sample.token_ids[: given.tokens]
                saved = ask(python, place, ids, Path(folder) / "saved.pt", given.seconds)
                model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
                rows += compared(name, model, saved)
    except PeerSkippedError as error:
        print(f"skipped: {error}")
        return 0
    for row in rows:
        print(
            f"{row.model:16} {row.dropper:9} removed {row.removed:<5} equal {row.equal} of "
            f"{row.sets} sets, {row.other} other indices"
        )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0 if all(row.equal == row.sets for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
