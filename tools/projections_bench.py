# SPDX-License-Identifier: Apache-2.0
"""Measures decode time and quality with each way to compute linear layers.

python tools/projections_bench.py --out build/reports/projections.json

Every round attaches each way in turn to the same model, takes decode steps at a short context,
then calls the linear layers alone, so that what else the machine does falls on all of them. A step
less its linear layers is the rest: attention, norms, Python. Quality is taken token by token, as in
decode, on the last tokens of texts.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from hillinfer.errors import UnsupportedFeatureError
from hillinfer.models.loader import LoadedModel, load_model
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.projections.attachment import LayerGroup, ProjectionAttachment
from hillinfer.projections.ways import PROJECTIONS, make_projections
from hillinfer.system.machine import NumberType, ProcessorFacts
from hillinfer_bench.quality.table import measure
from hillinfer_bench.quality.texts import TextSample, standard_library_samples
from hillinfer_bench.report.rows import LARGEST_SPREAD, Timing

TYPES = (NumberType.FLOAT32, NumberType.BFLOAT16)
_SHORT_CONTEXT = 16


@dataclass(frozen=True)
class Times:
    """Milliseconds of one kind of call.

    Parameters
    ----------
    fastest, median
        Wall clock.
    fastest_cpu
        Processor time of all threads.
    spread
        Of the wall clock, as `Timing` has it.
    """

    fastest: float
    median: float
    fastest_cpu: float
    spread: float

    @classmethod
    def of(cls, taken: Sequence[tuple[float, float]]) -> Times:
        """Take pairs of wall and processor seconds."""
        wall, cpu = zip(*taken, strict=True)
        timing = Timing.of(wall)
        return cls(timing.minimum, timing.median, 1e3 * min(cpu), timing.spread)

    @property
    def flagged(self) -> bool:
        """Whether the spread is too large for the median to mean much."""
        return self.spread > LARGEST_SPREAD


class Decoding:
    """Single-token forward passes at a context that does not grow.

    Parameters
    ----------
    model
        A causal language model of transformers.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._forward(list(range(1, _SHORT_CONTEXT + 1)))

    def step(self) -> None:
        """Decode one token and forget it."""
        self._forward([1])
        self._cache.crop(-1)

    @torch.no_grad()
    def _forward(self, ids: list[int]) -> None:
        self._model(torch.tensor([ids]), past_key_values=self._cache, logits_to_keep=1)


def linear_layers(model: Any) -> Callable[[], None]:
    """Return a function that calls every linear layer once, with one row each."""
    calls = [
        (group.layers, torch.randn(1, 1, group.layers[0].in_features, dtype=model.dtype))
        for group in LayerGroup.of_model(model)
    ]

    @torch.no_grad()
    def call_all() -> None:
        for layers, states in calls:
            for layer in layers:
                layer(states)

    return call_all


def timed(call: Callable[[], None], times: int) -> list[tuple[float, float]]:
    """Return wall and processor seconds of every call; a first one is not counted."""
    taken = []
    for number in range(times + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        if number:
            taken.append((time.perf_counter() - wall, time.process_time() - cpu))
    return taken


@torch.no_grad()
def token_logits(model: Any, sample: TextSample, last: int) -> torch.Tensor:
    """Return float32 (last, vocabulary): logits of the text's last tokens, read one by one."""
    ids = torch.tensor([sample.token_ids[:-1]])
    cache = DynamicCache(config=model.config)
    model(ids[:, :-last], past_key_values=cache, logits_to_keep=1)
    return torch.cat(
        [
            model(ids[:, place : place + 1], past_key_values=cache).logits[0].float()
            for place in range(ids.shape[1] - last, ids.shape[1])
        ]
    )


def qualities(
    model: Any, names: Sequence[str], samples: Sequence[TextSample], last: int
) -> dict[str, dict[str, float]]:
    """Return perplexity, KL divergence from stock and agreement with it, by way."""
    sums: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for sample in samples:
        stock = token_logits(model, sample, last)
        for name in names:
            with (
                ProjectionAttachment(model, make_projections(name)) as attachment,
                attachment.steps,
            ):
                own = stock if name == "stock" else token_logits(model, sample, last)
            one = measure(own, stock, sample.token_ids[-last:])
            sums[name].append((one.negative_log_likelihood, one.kl_divergence, one.agreement))
    found = {}
    for name, all_of_it in sums.items():
        likelihood, divergence, agreement = (
            statistics.mean(column) for column in zip(*all_of_it, strict=True)
        )
        found[name] = {
            "perplexity": math.exp(likelihood),
            "kl_divergence": divergence,
            "agreement": agreement,
        }
    return found


def possible(model: Any) -> tuple[dict[str, int], dict[str, str]]:
    """Return the bytes each way holds, and why others cannot work here."""
    held, refused = {}, {}
    for name in PROJECTIONS:
        try:
            with ProjectionAttachment(model, make_projections(name)) as attachment:
                held[name] = attachment.held_bytes
        except UnsupportedFeatureError as error:
            refused[name] = str(error)
            print(f"  {name}: skipped: {error}", flush=True)
    return held, refused


def bench(loaded: LoadedModel, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every way on one model, print a line each and return what was measured."""
    model = loaded.model
    held, refused = possible(model)
    steps: dict[str, list[tuple[float, float]]] = {name: [] for name in held}
    linears: dict[str, list[tuple[float, float]]] = {name: [] for name in held}
    decoding, call_all = Decoding(model), linear_layers(model)
    for _ in range(options.rounds):
        for name in held:
            with (
                ProjectionAttachment(model, make_projections(name)) as attachment,
                attachment.steps,
            ):
                steps[name] += timed(decoding.step, options.steps)
                linears[name] += timed(call_all, options.steps)
    samples = standard_library_samples(loaded.tokenizer, options.context)[: options.texts]
    quality = qualities(model, list(held), samples, options.last)
    dtype = str(model.dtype).removeprefix("torch.")
    rows: list[dict[str, Any]] = []
    for name in held:
        step, linear = Times.of(steps[name]), Times.of(linears[name])
        rest = step.fastest - linear.fastest
        rows.append(
            {
                "dtype": dtype,
                "projections": name,
                "held_bytes": held[name],
                "step_ms": asdict(step),
                "linear_ms": asdict(linear),
                "rest_ms": rest,
                "flagged": step.flagged or linear.flagged,
                **quality[name],
            }
        )
        print(
            f"{dtype:>9} {name:>10}  step {step.fastest:6.1f} ({step.median:6.1f})  "
            f"linear {linear.fastest:6.1f} ({linear.median:6.1f})  rest {rest:5.1f}  "
            f"perplexity {quality[name]['perplexity']:8.4f}  "
            f"KL {quality[name]['kl_divergence']:.1e}  "
            f"agreement {quality[name]['agreement']:.3f}  "
            f"holds {held[name] / 2**20:6.1f} MiB more"
            + ("  flagged" if rows[-1]["flagged"] else ""),
            flush=True,
        )
    return rows + [
        {"dtype": dtype, "projections": name, "skipped": why} for name, why in refused.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every type and way and write a report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/reports/projections.json"))
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="of every round")
    parser.add_argument("--context", type=int, default=512, help="tokens of each text")
    parser.add_argument("--last", type=int, default=128, help="tokens that quality is taken on")
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    processor = ProcessorFacts.read()
    print(f"{options.model}, {options.threads} threads; milliseconds, fastest (median)")
    rows = []
    for number_type in TYPES:
        rows += bench(load_model(options.model, number_type, print), options)
    report = {
        "label": f"measured on {processor.name}, {options.threads} threads",
        "model": options.model,
        "processor": processor.name,
        "threads": options.threads,
        "context": _SHORT_CONTEXT,
        "quality_context": options.context,
        "quality_tokens": options.last * options.texts,
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
