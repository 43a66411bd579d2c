# SPDX-License-Identifier: Apache-2.0
"""How far what a model expects of a text is moved by reading its beginning in stages.

Needles tell whether answers stay. This tells of every token what pruning moves, selection while
decoding moves, and both together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import exp
from statistics import mean
from typing import Any

import torch

from hillinfer.pruning.profile import read
from hillinfer_bench.quality.texts import TextSample, standard_library_samples
from hillinfer_bench.slim.quality import FULL, Held, Way, opened

# Twice as fast by FLOPs as a whole read of 4,096 tokens: the schedule that the goals are about.
HALVES = "9:50%,19:25%,28:12.5%"
MOST_KL, LEAST_AGREEMENT = 0.020, 0.945
_PRUNED = (Way(HALVES, "paper"), Way("15:50%", "weights"))
# Selection alone, then each schedule alone and with selection on top.
TEXT_WAYS = (
    Way(FULL, held=Held.DRIVE),
    *(
        Way(one.schedule, one.ranker, held)
        for one in _PRUNED
        for held in (Held.ORDINARY, Held.DRIVE)
    ),
)


@dataclass(frozen=True)
class TextPlan:
    """Which texts are read on.

    Parameters
    ----------
    texts
        How many; none where 0.
    tokens, forced
        Of each, and how many of them are read one by one, as decoding would.
    """

    texts: int
    tokens: int = 4096
    forced: int = 128

    def samples(self, tokenizer: Any) -> list[TextSample]:
        """Return the texts, parts of the Python reference.

        Raises
        ------
        PromptError
            Where a part is too short.
        """
        if self.texts < 1:
            return []
        return standard_library_samples(tokenizer, self.tokens, self.texts)


NO_TEXTS = TextPlan(0)


@dataclass(frozen=True)
class TextRow:
    """One way over all texts, beside a whole read into an ordinary cache.

    Parameters
    ----------
    way, texts
        Which, and of how many texts.
    read_tokens, forced_tokens
        Of each text: in chunks, and one by one behind them.
    kl
        Mean over forced tokens of KL(whole || this way), in nats.
    kl_of_texts
        The same of each text.
    agreement
        Share of forced tokens behind which both expect the same token most.
    perplexity_ratio
        Of this way over a whole read's.
    flop_limit
        How much faster reading may get, mean; 1 where all of it is read.
    """

    way: str
    texts: int
    read_tokens: int
    forced_tokens: int
    kl: float
    kl_of_texts: list[float]
    agreement: float
    perplexity_ratio: float
    flop_limit: float


def measure_text(
    model: Any,
    samples: Sequence[TextSample],
    forced: int,
    say: Callable[[str], None],
    ways: Sequence[Way] = TEXT_WAYS,
) -> list[TextRow]:
    """Read texts in every way and compare what is expected behind each of their last tokens.

    Parameters
    ----------
    model
        Of transformers, unmodified.
    samples
        All of one length.
    forced
        How many of a sample's tokens, but the very last, are read one by one.
    say
        Takes a line of progress.
    ways
        Other than reading all of it into an ordinary cache, with which each is compared.
    """
    if not samples:
        return []
    whole = [_expected(model, sample, forced, Way(FULL))[0] for sample in samples]
    rows = []
    for way in ways:
        compared, limits = [], []
        for sample, one in zip(samples, whole, strict=True):
            own, limit = _expected(model, sample, forced, way)
            compared.append(_compare(one, own, sample.token_ids[-forced:]))
            limits.append(limit)
        row = TextRow(
            way.name,
            len(samples),
            len(samples[0].token_ids) - 1 - forced,
            forced,
            mean(one.kl for one in compared),
            [one.kl for one in compared],
            mean(one.agreement for one in compared),
            exp(mean(one.further for one in compared)),
            mean(limits),
        )
        say(row_text(row))
        rows.append(row)
    return rows


def row_text(row: TextRow) -> str:
    """Return a row for reading."""
    each = ", ".join(f"{one:.4f}" for one in row.kl_of_texts)
    return (
        f"{row.way:<34} {row.texts} texts, {row.read_tokens} + {row.forced_tokens} tokens: KL "
        f"{row.kl:.4f} ({each}), agreement {row.agreement:.3f}, perplexity "
        f"{row.perplexity_ratio - 1:+.1%}, FLOPs allow {row.flop_limit:.2f}"
    )


def text_goals(rows: Sequence[TextRow]) -> list[dict[str, object]]:
    """Return each goal about text beside what was reached."""
    goals: list[dict[str, object]] = []
    known = {row.way: row for row in rows}
    selected = known.get(Way(FULL, held=Held.DRIVE).name)
    for row in rows:
        way = Way.parse(row.way)
        if way == _PRUNED[0]:
            goals += [
                {
                    "goal": f"text, {row.way}: KL at most {MOST_KL:.3f}",
                    "reached": round(row.kl, 4),
                    "met": row.kl <= MOST_KL,
                },
                {
                    "goal": f"text, {row.way}: agreement at least {LEAST_AGREEMENT:.3f}",
                    "reached": round(row.agreement, 4),
                    "met": row.agreement >= LEAST_AGREEMENT,
                },
            ]
        alone = known.get(Way(way.schedule, way.ranker).name)
        if way.held is Held.DRIVE and alone is not None and selected is not None:
            most = alone.kl + selected.kl
            goals.append(
                {
                    "goal": f"text, {row.way}: KL at most {most:.4f}, the sum of pruning's and "
                    "selection's",
                    "reached": round(row.kl, 4),
                    "met": row.kl <= most,
                }
            )
    return goals


@dataclass(frozen=True)
class _Compared:
    """Means over one text's forced tokens; `further` is the added NLL, in nats."""

    kl: float
    agreement: float
    further: float


@torch.no_grad()
def _expected(model: Any, sample: TextSample, forced: int, way: Way) -> tuple[torch.Tensor, float]:
    """Return logits behind each forced token, (forced, vocabulary), and what FLOPs allow."""
    ids = sample.token_ids[:-1]
    # Memory holds all rows: what is compared is selection, which no budget changes.
    with opened(model, way, len(ids), "120%", "keep") as (cache, pruning):
        began, rest = ids[:-forced], ids[-forced:]
        with nullcontext() if pruning is None else pruning.prompt(len(began)):
            read(model, cache, began)
        told = None if pruning is None else pruning.read_of(cache)
        logits = torch.stack([read(model, cache, [token]) for token in rest])
    return logits, 1.0 if told is None else told.flop_limit


def _compare(whole: torch.Tensor, own: torch.Tensor, wanted: Sequence[int]) -> _Compared:
    """Compare logits (tokens, vocabulary) behind the same tokens, of which `wanted` come next."""
    expected, found = (one.double().log_softmax(-1) for one in (whole, own))
    kl = (expected.exp() * (expected - found)).sum(-1)
    alike = (expected.argmax(-1) == found.argmax(-1)).double()
    places, next_ones = torch.arange(len(wanted)), torch.tensor(wanted)
    further = expected[places, next_ones] - found[places, next_ones]
    return _Compared(float(kl.mean()), float(alike.mean()), float(further.mean()))
