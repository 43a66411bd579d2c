# SPDX-License-Identifier: Apache-2.0
"""`python tools/question_sets.py`: what a question loses that attends to one selected set.

Documents are parts of the Python reference. Each is opened in the engine; recall probes are read
densely, by one set per layer, and token by token, and their answers token by token. What agrees is
what all rows give. Rows that a question reads from the drive are counted, too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import hillinfer
from form_quality import read
from hillinfer.forms.probes import Probe, Probing, recall_probes
from hillinfer.models.loader import ModelOutline
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.models.sources import ModelSource
from hillinfer.system.machine import NumberType
from hillinfer_bench.quality.texts import standard_library_samples

_INSTRUCTION = "\n\nRepeat the part of the text above that begins with:\n\n"
WAYS = ("dense", "one set", "token by token")


def answered(model: Any, cache: Any, probe: Probe, way: str) -> tuple[torch.Tensor, int, float]:
    """Return an answer's logits, bytes that the question read, and the seconds that it took."""
    logits = []
    began, before = time.perf_counter(), cache.statistics()
    given = [probe.given] if way != WAYS[2] else [(one,) for one in probe.given]
    with cache.one_set() if way == WAYS[1] else nullcontext(), torch.no_grad():
        for part in given:
            output = forward(model, cache, part)
    seconds = time.perf_counter() - began
    counted = cache.statistics().minus(before).cold_read_bytes
    logits.append(output)
    logits += [forward(model, cache, (one,)) for one in probe.answer[:-1]]
    return torch.stack(logits), counted, seconds


def forward(model: Any, cache: Any, part: Sequence[int]) -> torch.Tensor:
    """Return logits behind some tokens, (vocabulary,)."""
    ids = torch.tensor([list(part)])
    with torch.no_grad():
        found = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    last: torch.Tensor = found.logits[0, -1].float()
    return last


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/reports/question-sets.json"))
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1536, help="of a document")
    parser.add_argument("--probes", type=int, default=4, help="of recall, for each document")
    parser.add_argument("--alphas", type=float, nargs="*", default=[0.1, 0.2])
    given = parser.parse_args(arguments)
    outline = ModelOutline.read(ModelSource.locate(given.model, print), NumberType.FLOAT32)
    tokenizer, model = outline.tokenizer, outline.load().model
    instruction = tokenizer.encode(_INSTRUCTION, add_special_tokens=False)
    found: dict[tuple[float, str], list[dict[str, float]]] = {}
    samples = standard_library_samples(tokenizer, given.tokens, given.documents)
    for number, sample in enumerate(samples):
        states = read(model, sample.token_ids[: given.tokens])
        (probes,) = recall_probes(states.ids, (given.probes,), number, instruction)
        # The answers of all rows, before the model is attached.
        probing = Probing(model, states, probes)
        for alpha in given.alphas:
            with (
                tempfile.TemporaryDirectory() as cold,
                hillinfer.attach(
                    model, cold_dir=cold, alpha=alpha, shadow="int4", dram_budget="25%"
                ) as hill,
            ):
                base = hill.new_cache(expected_tokens=given.tokens + 128)
                base.fill(
                    torch.tensor([states.ids]),
                    [keys[None] for keys, _ in states.layers],
                    [values[None] for _, values in states.layers],
                )
                for way in WAYS:
                    answers, counted, seconds = [], 0, 0.0
                    for probe in probes:
                        fork = base.fork()
                        own, more, taken = answered(model, fork, probe, way)
                        answers.append(own)
                        counted, seconds = counted + more, seconds + taken
                        fork.close()
                    quality = probing.compared(answers)
                    found.setdefault((alpha, way), []).append(
                        {
                            "agreement": quality.mean,
                            "divergence": quality.divergence,
                            "read_bytes": counted / len(probes),
                            "seconds": seconds / len(probes),
                        }
                    )
                base.close()
        print(f"{sample.name}: {len(probes)} probes", flush=True)
    rows = []
    for (alpha, way), own in found.items():
        means = {key: sum(one[key] for one in own) / len(own) for key in own[0]}
        rows.append({"alpha": alpha, "way": way, **means})
        print(f"alpha {alpha} {way:15} " + " ".join(f"{k} {v:.4g}" for k, v in means.items()))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"rows": rows, "settings": vars(given)}, default=str, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
