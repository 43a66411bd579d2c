# SPDX-License-Identifier: Apache-2.0
"""One forward pass over the last tokens of a text, as if they had been decoded one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hillinfer_bench.policies.selection_policy import SelectionPolicy
from hillinfer_bench.quality.continuation import Continuation
from hillinfer_bench.quality.prefix import Prefix


@torch.no_grad()
def forced_logits(
    model: Any, prefix: Prefix, token_ids: Sequence[int], policy: SelectionPolicy | None
) -> torch.Tensor:
    """Return the logits after each of `token_ids`, every one with a selected set of its own.

    Parameters
    ----------
    model
        A causal language model of transformers, in evaluation mode, inside `selecting`.
    prefix
        What comes before.
    token_ids
        The tokens that are read sparsely; each sees only itself and what comes before it.
    policy
        Selects tokens; None for the full cache.

    Returns
    -------
    float32 of shape (tokens, vocabulary), on the CPU.
    """
    ids = torch.tensor([list(token_ids)], device=model.device)
    output = model(input_ids=ids, past_key_values=Continuation(prefix, policy), use_cache=True)
    logits: torch.Tensor = output.logits[0].float().cpu()
    return logits
