# SPDX-License-Identifier: Apache-2.0
"""A layer of transformers' ordinary cache whose first tokens come from a drive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

# Room that is made at once where there is none left: at least so many tokens, or this part of all.
_LEAST_GROWTH, _GROWTH_PART = 256, 4


class StreamedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values in memory with room behind them, the first of which may still be coming.

    Whoever looks at them waits until they are there; how many there are is known before. New
    tokens go to the room behind, so that nothing is copied for them. What takes that away, like
    another batch, makes it behave as its base does.

    Parameters
    ----------
    keys, values
        (1, kv_heads, room, head_dim), on the model's device.
    tokens
        How many of them are there, or are coming.
    arrive
        Waits until they are there; called once, by whoever looks first.
    passed
        Called when a pass comes to this layer, with its tokens and those before them, and with 0
        twice when it goes on.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        tokens: int,
        arrive: Callable[[], None],
        passed: Callable[[int, int], None],
    ) -> None:
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self._room: tuple[torch.Tensor, torch.Tensor] | None = None
        self._arrive: Callable[[], None] | None = None
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self._show((keys, values), tokens)
        self._arrive, self._passed = arrive, passed

    @property
    def keys(self) -> torch.Tensor | None:
        """Keys of all tokens, (batch, kv_heads, tokens, head_dim)."""
        self._wait()
        return self._keys

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self._keys, self._room = keys, None

    @property
    def values(self) -> torch.Tensor | None:
        """Values of all tokens, of the same shape."""
        self._wait()
        return self._values

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self._values, self._room = values, None

    # Waiting is nothing that a compiler could trace.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take new tokens and return all, (batch, kv_heads, tokens, head_dim) each."""
        self._passed(key_states.shape[-2], self.get_seq_length())
        self._wait()
        new = key_states, value_states
        if self._room is None or not all(map(self._fits, self._room, new)):
            both: tuple[torch.Tensor, torch.Tensor] = super().update(*new, *args, **kwargs)
        else:
            both = self._put(self._room, new)
        self._passed(0, 0)
        return both

    def get_seq_length(self) -> int:
        """Return how many tokens are there or coming."""
        return 0 if self._keys is None or not self._keys.numel() else self._keys.shape[-2]

    def reset(self) -> None:
        """Forget all tokens, those that are coming, too."""
        self._arrive = None
        super().reset()

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles are ordinary layers: no two may write to the same room.
        return _ordinary, (self.keys, self.values)

    # --- inside ----------------------------------------------------------------------------

    def _wait(self) -> None:
        if self._arrive is not None:
            self._arrive()
            self._arrive = None

    @staticmethod
    def _fits(room: torch.Tensor, new: torch.Tensor) -> bool:
        """Return whether tokens can go behind others as they are."""
        return (
            new.shape[0] == room.shape[0]
            and new.dtype == room.dtype
            and new.device == room.device
            and not new.requires_grad
        )

    def _put(
        self, room: tuple[torch.Tensor, torch.Tensor], new: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.get_seq_length()
        stop = start + new[0].shape[-2]
        if stop > room[0].shape[-2]:
            size = stop + max(_LEAST_GROWTH, stop // _GROWTH_PART)
            room = _grown(room[0], start, size), _grown(room[1], start, size)
        for own, states in zip(room, new, strict=True):
            own[:, :, start:stop] = states
        return self._show(room, stop)

    def _show(
        self, room: tuple[torch.Tensor, torch.Tensor], tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (states[:, :, :tokens] for states in room)
        self._keys, self._values, self._room = keys, values, room
        return keys, values


def _grown(states: torch.Tensor, tokens: int, size: int) -> torch.Tensor:
    """Return the first tokens with room for so many."""
    batch, heads, _, head_dim = states.shape
    larger = states.new_empty((batch, heads, size, head_dim))
    larger[:, :, :tokens] = states[:, :, :tokens]
    return larger


def _ordinary(keys: torch.Tensor | None, values: torch.Tensor | None) -> DynamicLayer:
    layer = DynamicLayer()
    if keys is not None and values is not None:
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    return layer
