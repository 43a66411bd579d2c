# SPDX-License-Identifier: Apache-2.0
"""Reading attention masks."""

from __future__ import annotations

import torch

from hillinfer.errors import UnsupportedFeatureError


def left_padding(mask: torch.Tensor) -> list[int]:
    """Return how many padding tokens each row of a mask starts with.

    Parameters
    ----------
    mask
        (batch, tokens), zero for padding.

    Raises
    ------
    UnsupportedFeatureError
        Where padding stands after a token, or the mask is not two-dimensional.
    """
    if mask.ndim != 2:
        raise UnsupportedFeatureError(
            f"an attention mask of {mask.ndim} dimensions is not supported: pass the "
            "two-dimensional mask that the tokenizer gives"
        )
    real = mask.to(device="cpu", dtype=torch.bool)
    if bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise UnsupportedFeatureError(
            "padding after tokens is not supported: set tokenizer.padding_side = 'left'"
        )
    return [int(count) for count in (~real).sum(dim=1)]
