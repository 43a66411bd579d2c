# SPDX-License-Identifier: Apache-2.0
"""`python tools/pool_turns.py`: documents that take turns in one pool, and how many rows are cold.

What the real model selects in each document is recorded and played to the pools of the product, a
block of steps of one document after the other: with hits that fade with the steps of their own
document alone, with hits that also fade while others take steps (`decayed`), and with `lru`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hillinfer.kv.hot_pool import SLOT_BYTES
from hillinfer.kv.hot_pools import HotPools, PendingHits
from hillinfer.kv.pool_manager import PoolManager
from hillinfer.kv.pool_policies import LayerShares, make_pool_policy
from hillinfer.kv.sequence import Sequence as Document
from hillinfer.memory_budget import Accountant
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.models.loader import ModelOutline
from hillinfer.models.sources import ModelSource
from hillinfer.settings import PoolSizes, Settings
from hillinfer.statistics import Counters
from hillinfer.system.machine import NumberType, ProcessorFacts
from hillinfer.trace.recorder import LayerStep
from hillinfer_bench.quality.forced_reading import compute_threads
from hillinfer_bench.quality.texts import standard_library_samples
from hillinfer_bench.replay.selection_trace import SelectionTrace
from hillinfer_model.kernel_spec import GROUP_TOKENS
from pool_trials import MODEL, record

# Of the model's layers every seventh is played.
_LAYERS = slice(2, None, 7)
# The first steps find pools that are being filled.
_UNCOUNTED = 20


class OwnSteps(PendingHits):
    """Lets hits fade with steps of their own document alone, as they did before."""

    most_fades = 0


RANKINGS = {
    "own steps alone": ("decayed", OwnSteps),
    "decayed": ("decayed", PendingHits),
    "lru": ("lru", PendingHits),
}


@dataclass(frozen=True)
class Row:
    """Cold rows a step and layer of documents that take turns."""

    ranking: str
    documents: int
    block: int
    pool_alphas: float
    cold_rows: float


def turns(documents: int, block: int, steps: int) -> list[int]:
    """Return whose step each is, where everybody takes so many, a block at a time."""
    left, order = [steps] * documents, []
    while any(left):
        for one in range(documents):
            order += [one] * min(block, left[one])
            left[one] -= min(block, left[one])
    return order


def cold_rows(
    traces: Sequence[SelectionTrace], order: Sequence[int], slots: int, ranking: str
) -> float:
    """Return how many selected rows were cold in a step and layer, the first steps left out.

    Parameters
    ----------
    traces
        A document each.
    order
        Whose step each is.
    slots
        Rows that the pool of a layer holds.
    ranking
        A name of `RANKINGS`.
    """
    layers, name = len(traces[0].layers), RANKINGS[ranking][0]
    groups = -(-max(trace.prefix + trace.steps for trace in traces) // GROUP_TOKENS)
    shape = ModelShape(layers, 1, 1, 1, StoredType.FLOAT16, groups * GROUP_TOKENS)
    accountant, policy = Accountant(1 << 30), make_pool_policy(name)
    pools = HotPools(shape, accountant, policy, LayerShares(layers, PoolSizes.EQUAL))
    pools.hits = RANKINGS[ranking][1](pools.layers)
    manager = PoolManager(pools, policy, traces[0].settings, Counters())
    documents = [Document(layers, shape.row_bytes) for _ in traces]
    pools.cover(len(traces) * groups * GROUP_TOKENS)
    for number, one in enumerate(documents):
        one.append_groups(range(number * groups, (number + 1) * groups))
        pools.take_tail()
        for layer in range(layers):
            pools.cover_hits(one.hits, layer, groups * GROUP_TOKENS)
    held = sum(accountant.held().values())
    accountant.budget_bytes = held + slots * layers * (shape.row_bytes + SLOT_BYTES)
    source = np.zeros((groups * GROUP_TOKENS, shape.row_bytes), np.uint8)
    taken, found = [0] * len(traces), 0
    for step, number in enumerate(order, start=1):
        manager.begin_step(step)
        own, trace = documents[number], traces[number]
        length = trace.prefix + taken[number] + 1
        for layer in range(layers):
            own.set_length(layer, length, length // GROUP_TOKENS * GROUP_TOKENS)
            positions = trace.layers[layer][taken[number]].astype(np.int64)
            manager.begin_in_place(layer, own, positions, step)
            settled = positions[positions < own.tail_start(layer)]
            cold = settled[pools.layers[layer].slots(own.rows(settled)) < 0]
            found += len(cold) if step > _UNCOUNTED else 0
            if len(cold):
                entry = LayerStep(step, layer, length)
                manager.offer_read(entry, own, cold, source, np.arange(len(cold))).result()
        pools.promotions.settle_all()
        taken[number] += 1
    pools.close()
    return found / (len(order) - _UNCOUNTED) / layers


def main() -> None:
    """Record, play and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=1536)
    parser.add_argument("--last", type=int, default=160, help="steps of each document")
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--documents", type=int, nargs="+", default=[2, 3], help="3 at most")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 4, 10, 40])
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.5, 1.0, 2.0, 3.0])
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    settings = Settings().changed(alpha=chosen.alpha, exact=1.0, shadow="int4")
    outline = ModelOutline.read(ModelSource.locate(MODEL, print), NumberType.AUTO)
    samples = standard_library_samples(outline.tokenizer, chosen.context)[: max(chosen.documents)]
    loaded = outline.load()
    traces = []
    with compute_threads(ProcessorFacts.read().cores):
        for one in samples:
            ids = one.token_ids[: chosen.context]
            trace = record(loaded.model, ids, chosen.last, settings, one.name).trace
            none = ((),) * len(trace.layers[_LAYERS])
            traces.append(
                SelectionTrace(one.name, settings, trace.prefix, trace.layers[_LAYERS], none)
            )
    rows = []
    for documents in chosen.documents:
        for block in chosen.blocks:
            order = turns(documents, block, chosen.last)
            for size in chosen.sizes:
                slots = int(size * chosen.alpha * chosen.context)
                for name in RANKINGS:
                    found = cold_rows(traces[:documents], order, slots, name)
                    rows.append(Row(name, documents, block, size, found))
                cells = "  ".join(f"{one.ranking} {one.cold_rows:.1f}" for one in rows[-3:])
                print(f"{documents} documents, blocks of {block}, {size:g} αN: {cells}", flush=True)
    report = {
        "label": "measured",
        "model": loaded.name,
        "settings": {key: str(value) for key, value in vars(chosen).items()},
        "processor": ProcessorFacts.read().name,
        "rows": [asdict(row) for row in rows],
    }
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
