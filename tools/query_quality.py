# SPDX-License-Identifier: Apache-2.0
"""`make query`: measures what predicted queries cost in quality, beside true ones, in the product.

The real model reads all but the last tokens of a text, then the last ones a token at a time, as in
decoding, with the text's own tokens. Every row attends through a cache as `hillinfer generate`
makes it; the full cache is transformers' own.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from hillinfer.hf.attach import Attachment
from hillinfer.models.loader import ModelOutline
from hillinfer.models.sources import ModelSource
from hillinfer.settings import Settings
from hillinfer.system.machine import NumberType, ProcessorFacts
from hillinfer_bench.quality.table import Measures, measure
from hillinfer_bench.quality.texts import TextSample, standard_library_samples

MODEL = "smollm2-135m"
CHUNK = 1024
QUERIES = ("true", "predicted")


@torch.no_grad()
def steps(model: Any, cache: Any, token_ids: Sequence[int], last: int) -> torch.Tensor:
    """Return the logits after each of the last tokens, float32 (last, vocabulary)."""
    ids = torch.tensor([list(token_ids)])
    start = len(token_ids) - last
    for part in torch.split(ids[:, :start], CHUNK, dim=1):
        model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return torch.cat(
        [
            model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits[0].float()
            for i in range(start, len(token_ids))
        ]
    )


def measured(model: Any, sample: TextSample, last: int, alphas: list[float]) -> list[Any]:
    """Return, for each α, the measures of each kind of query on one text."""
    context = list(sample.token_ids[:-1])
    next_ids = sample.token_ids[len(context) - last + 1 :]
    full = steps(model, DynamicCache(config=model.config), context, last)
    rows = []
    for alpha in alphas:
        for query in QUERIES:
            chosen = Settings().changed(alpha=alpha, query=query, shadow="int4", dram_budget="50%")
            with Attachment(model, chosen) as hill:
                cache = hill.new_cache(len(context))
                logits = steps(model, cache, context, last)
                cache.close()
            rows.append((alpha, query, measure(logits, full, next_ids)))
            print(f"{sample.name}: alpha {alpha}, {query} query", flush=True)
    rows.append((1.0, "full cache", measure(full, full, next_ids)))
    return rows


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--last", type=int, default=256)
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.1, 0.2])
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    outline = ModelOutline.read(ModelSource.locate(MODEL, print), NumberType.AUTO)
    samples = standard_library_samples(outline.tokenizer, chosen.context)[: chosen.texts]
    loaded = outline.load()
    by_row: dict[tuple[float, str], list[Measures]] = {}
    for sample in samples:
        for alpha, query, measures in measured(loaded.model, sample, chosen.last, chosen.alphas):
            by_row.setdefault((alpha, query), []).append(measures)
    rows = []
    print("alpha  query       KL to full  perplexity  agreement")
    for (alpha, query), found in by_row.items():
        mean = Measures(
            *(sum(column) / len(found) for column in zip(*map(_values, found), strict=True))
        )
        rows.append({"alpha": alpha, "query": query, **asdict(mean)})
        print(
            f"{alpha:<6} {query:<10} {mean.kl_divergence:>11.4f} "
            f"{math.exp(mean.negative_log_likelihood):>11.2f} {mean.agreement:>9.1%}"
        )
    report = {
        "label": "measured",
        "model": loaded.name,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "processor": ProcessorFacts.read().name,
        "texts": [sample.name for sample in samples],
        "context": chosen.context,
        "last": chosen.last,
        "rows": rows,
    }
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(report, indent=2) + "\n")


def _values(measures: Measures) -> tuple[float, ...]:
    return tuple(asdict(measures).values())


if __name__ == "__main__":
    main()
