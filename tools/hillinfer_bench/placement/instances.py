# SPDX-License-Identifier: Apache-2.0
"""Random stocks of documents, with forms that cost what they would on a real drive."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hillinfer.placement.options import Context, FirstTokenUtility, Option, Tier, Utility
from hillinfer.placement.stock import Stock

# Share of all KV that a form takes, and the quality it loses at most; as measured on one model.
_FORMS = {
    "held": (1.0, 0.0),
    "int8": (0.53, 0.005),
    "int4": (0.28, 0.08),
    "int2": (0.16, 0.6),
    "coded": (0.22, 0.05),
    "lead": (0.35, 0.02),
}
_RATIOS = (0.9, 0.75, 0.5, 0.35, 0.2)
_DROPPERS = ("knorm", "keydiff", "snapkv")


@dataclass(frozen=True)
class Rates:
    """Bytes a second that tiers give, and tokens a second that a prompt is read with."""

    dram: float = 20e9
    drive: float = 1.07e9
    prefill: float = 900.0


def random_options(
    draw: np.random.Generator, tokens: int, token_bytes: int, rates: Rates
) -> list[Option]:
    """Return 30 options or more of a document: how it rests, and forms in DRAM and on the drive."""
    kv = tokens * token_bytes
    forms = {name: (share, loss * draw.uniform(0, 1)) for name, (share, loss) in _FORMS.items()}
    for dropper in _DROPPERS:
        sensitivity = draw.uniform(0.2, 1.0)
        for kept in _RATIOS:
            forms[f"{dropper}-{kept}"] = (kept, sensitivity * (1 - kept) ** draw.uniform(0.8, 2))
    options = [
        Option("text", "rest", 0, 1.0, tokens / rates.prefill),
        # The stored rows are always kept, and take nothing of the drive's budget for forms.
        Option("rows", "rest", 0, 1.0, 0.02 + kv / rates.drive),
    ]
    for name, (share, loss) in forms.items():
        size = int(kv * share)
        for tier, rate in (("dram", rates.dram), ("drive", rates.drive)):
            seconds = 0.02 + size / rate
            options.append(Option(name, tier, size, 1.0 - loss, seconds))
    return options


def random_stock(
    seed: int, contexts: int, dram_share: float, drive_share: float, utility: Utility | None = None
) -> Stock:
    """Return a stock in which every document rests.

    Parameters
    ----------
    seed
        Of everything that is drawn.
    contexts
        How many.
    dram_share, drive_share
        Budgets, as shares of the KV of all documents.
    utility
        The paper's with α of 1 second where None.
    """
    draw = np.random.default_rng(seed)
    utility = utility or FirstTokenUtility(1.0)
    lengths = np.exp(draw.uniform(np.log(500), np.log(16_000), contexts)).astype(int)
    weights = draw.zipf(1.6, contexts).clip(max=1000).astype(float)
    token_bytes = 131_072
    kv = int(lengths.sum()) * token_bytes
    stock = Stock(
        (Tier("dram", int(kv * dram_share)), Tier("drive", int(kv * drive_share)), Tier("rest"))
    )
    for number in range(contexts):
        options = random_options(draw, int(lengths[number]), token_bytes, Rates())
        values = tuple(utility.value(option) for option in options)
        context = Context(f"c{number:04}", tuple(options), values)
        stock.put(replace(context, weight=float(weights[number]), last_used=float(number)))
    return stock


def random_instance(seed: int, fewest: int = 20, most: int = 60) -> Stock:
    """Return a stock whose size, budgets and α are drawn, too."""
    draw = np.random.default_rng(10_000 + seed)
    contexts = int(draw.integers(fewest, most + 1))
    dram, drive = draw.uniform(0.05, 0.3), float(draw.choice([0.02, 0.1, 0.3, 1.0]))
    alpha = float(draw.choice([0.3, 1.0, 3.0, 10.0]))
    return random_stock(seed, contexts, dram, drive, FirstTokenUtility(alpha))
