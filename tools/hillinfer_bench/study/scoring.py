# SPDX-License-Identifier: Apache-2.0
"""How answers are scored, as LongBench and LM-evaluation-harness do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


def rouge_l(answer: str, reference: str) -> float:
    """Return the F1 of the longest common subsequence of words, from 0 to 1 (LongBench's ROUGE-L).

    Words are what white space parts, in lower case.

    Parameters
    ----------
    answer, reference
        Texts; 0 where one has no words.
    """
    mine, own = answer.lower().split(), reference.lower().split()
    common = _longest_common(mine, own)
    if not common:
        return 0.0
    precision, recall = common / len(mine), common / len(own)
    return 2 * precision * recall / (precision + recall)


def _longest_common(mine: Sequence[str], own: Sequence[str]) -> int:
    lengths = [0] * (len(own) + 1)
    for word in mine:
        before = 0
        for place, other in enumerate(own, 1):
            kept = lengths[place]
            lengths[place] = before + 1 if word == other else max(kept, lengths[place - 1])
            before = kept
    return lengths[-1]


def best_choice(likelihoods: Sequence[float], sizes: Sequence[int]) -> int:
    """Return the number of the choice with the largest log-likelihood per byte.

    This is `acc_norm` of LM-evaluation-harness. Ties fall to the first.

    Parameters
    ----------
    likelihoods
        Log-likelihood of each choice, in nats.
    sizes
        Bytes of each choice's text.
    """
    shares = [one / size for one, size in zip(likelihoods, sizes, strict=True)]
    return shares.index(max(shares))


@dataclass(frozen=True)
class Expected:
    """How far some forced tokens were expected.

    Parameters
    ----------
    right
        Whether each of them was the most probable one behind the right ones before it.
    nll
        Their mean negative log-likelihood, in nats.
    likelihood
        The sum of their log-likelihoods, in nats.
    """

    right: bool
    nll: float
    likelihood: float

    @classmethod
    def of(cls, logits: torch.Tensor, ids: Sequence[int], places: Sequence[int]) -> Expected:
        """Score forced tokens.

        Parameters
        ----------
        logits
            float32 of shape (tokens, vocabulary), what was expected before each forced token.
        ids
            The forced tokens.
        places
            Numbers of those that are scored, at least one.
        """
        chosen = logits[list(places)].double().log_softmax(-1)
        wanted = torch.tensor([ids[place] for place in places])
        own = chosen[range(len(wanted)), wanted]
        right = bool((chosen.argmax(-1) == wanted).all())
        return cls(right, -float(own.mean()), float(own.sum()))
