# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values as they are scored and coded, and what is wrong with some of them."""

from __future__ import annotations

from types import TracebackType

import torch

from hillinfer.errors import CacheUseError
from hillinfer_model.errors import NonFiniteQueryError


class Explained:
    """Says what to do about a query that cannot be scored.

    A class, because a generator takes several times as long at every layer and step.
    """

    def __init__(self, layer: int) -> None:
        self._layer = layer

    def __enter__(self) -> None:
        """Do nothing yet."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the reason in words that help."""
        if isinstance(error, NonFiniteQueryError):
            raise explained(self._layer, error) from error


def explained(layer: int, error: NonFiniteQueryError) -> CacheUseError:
    """Return an error that says what to do about a query that cannot be scored."""
    return CacheUseError(
        f"layer {layer} made a query that is not finite ({error}): the model's weights or its "
        "number type are at fault; try --dtype float32 (the rows that the drive returned are "
        "those that were written)"
    )


def shadow_states(states: torch.Tensor) -> torch.Tensor:
    """Return keys or values (kv_heads, tokens, head_dim) token by token in FP16, to be coded."""
    moved = states.transpose(0, 1)
    if moved.dtype is torch.float16 and moved.is_cpu:
        return moved
    return moved.to(device="cpu", dtype=torch.float16)


def host_query(query: torch.Tensor) -> torch.Tensor:
    """Return a query (query_heads, 1, head_dim) as it is scored with, on the processor."""
    own = query[:, 0]
    return own if own.dtype is torch.float32 and own.is_cpu else own.float().cpu()
