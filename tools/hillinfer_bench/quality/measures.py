# SPDX-License-Identifier: Apache-2.0
"""How far next-token distributions lie from the full cache's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Measures:
    """Means over the last tokens of one text.

    Parameters
    ----------
    negative_log_likelihood
        Of the text's own next tokens, in nats; its exponential is the perplexity.
    kl_divergence
        KL(full cache ‖ this configuration) of the next-token distributions, in nats.
    agreement
        Share of steps whose most probable token is the full cache's.
    """

    negative_log_likelihood: float
    kl_divergence: float
    agreement: float


def measure(logits: torch.Tensor, full_logits: torch.Tensor, next_ids: Sequence[int]) -> Measures:
    """Compare a configuration with the full cache.

    Parameters
    ----------
    logits, full_logits
        float32 of shape (tokens, vocabulary).
    next_ids
        The text's own token after each of them.
    """
    log_probabilities = torch.log_softmax(logits.double(), dim=-1)
    full = torch.log_softmax(full_logits.double(), dim=-1)
    own = log_probabilities.gather(1, torch.tensor(list(next_ids))[:, None])
    divergence = (full.exp() * (full - log_probabilities)).sum(-1)
    agreement = logits.argmax(-1) == full_logits.argmax(-1)
    return Measures(
        negative_log_likelihood=-float(own.mean()),
        kl_divergence=float(divergence.mean()),
        agreement=float(agreement.double().mean()),
    )
