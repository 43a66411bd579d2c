# SPDX-License-Identifier: Apache-2.0
"""Quality of the very steps that were timed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hillinfer_bench.quality.measures import measure


def step_quality(
    logits: Sequence[torch.Tensor], full: Sequence[torch.Tensor] | None, next_ids: Sequence[int]
) -> tuple[float, float | None]:
    """Return the perplexity of the text and the agreement with the full cache.

    Parameters
    ----------
    logits
        After each measured step, (1, vocabulary).
    full
        Those of a full cache on the same steps; None where none was measured.
    next_ids
        The text's token after each step.
    """
    own = torch.cat(list(logits))
    against = own if full is None else torch.cat(list(full))
    measures = measure(own, against, next_ids)
    perplexity = math.exp(measures.negative_log_likelihood)
    return perplexity, None if full is None else measures.agreement
