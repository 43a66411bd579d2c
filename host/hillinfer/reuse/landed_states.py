# SPDX-License-Identifier: Apache-2.0
"""Keys and values of a stored prefix in memory, and the cache layer that grows behind them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import DynamicLayer

from hillinfer.arrived_rows import ArrivedRows
from hillinfer.drive.files import PAGE_BYTES, aligned_buffer, round_up
from hillinfer.hf.cache import HillInferCache
from hillinfer.kv.opened_sequences import OpenedRows, StoredRows
from hillinfer.kv.sequence import RowLayout
from hillinfer.model_shape import ModelShape
from hillinfer.native.library import native_library
from hillinfer.native.signatures import CheckedRows, StateRows
from hillinfer.store.keys import CHUNK_GROUPS
from hillinfer.store.prefix import WrongBytesError
from hillinfer.system.kept_memory import BLOCK_BYTES, KeptMemory
from hillinfer_model.kernel_spec import GROUP_TOKENS

# As the native library numbers them.
_STORED_TYPES = {torch.bfloat16: 0, torch.float16: 1}
# Fewer numbers than torch divides among threads.
_PIECE_NUMBERS = 32767


class OfferedRows:
    """Rows that the native library places when some core has nothing else to do.

    Until somebody needs them: then they are placed at once. Any thread may use it.

    Parameters
    ----------
    given
        What is to be placed, and where.
    sums
        What the checksums of its groups come to.
    kept
        What `given` points to.
    """

    def __init__(
        self, given: ctypes.Array[CheckedRows], sums: list[NDArray[np.uint32]], kept: object
    ) -> None:
        self._sums, self._kept = sums, kept
        self._functions = native_library().functions
        self._native = self._functions.hillinfer_offer_rows(given, len(given))
        if not self._native:
            raise MemoryError("no memory for rows that wait")

    def place(self, threads: int) -> list[NDArray[np.uint32]]:
        """Place what is left by so many threads; return all checksums, uint32.

        Nobody may use what is there before they were compared.
        """
        self._functions.hillinfer_place_offered(self._native, threads)
        return self._sums

    def is_placed(self, seconds: float) -> bool:
        """Return whether all of it is in its place so many seconds later, at most."""
        return bool(self._functions.hillinfer_await_offered(self._native, round(1e3 * seconds)))

    def end(self, seconds: float) -> bool:
        """Return whether nobody uses the rows any more, so many seconds later at most.

        Who has begun a group waits for a core to end it, where others take them all. To be called
        until it is so, and by one thread alone.
        """
        if self._native and self._functions.hillinfer_end_offer(self._native, round(1e3 * seconds)):
            self._native = self._kept = None
        return self._native is None


class LandedStates:
    """Keys and values of every layer, which rows are put to from any number of threads.

    Parameters
    ----------
    shape, layout
        The model's.
    tokens
        How many there is room for.
    dtype, device
        Of keys and values.
    memory
        Where they lie when they are the processor's.

    Attributes
    ----------
    layers
        Keys and values of each layer, (kv_heads, tokens, head_dim), as they were in memory.
    """

    def __init__(
        self,
        shape: ModelShape,
        layout: RowLayout,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
        memory: KeptMemory,
    ) -> None:
        self._layout = layout
        size = (shape.kv_heads, tokens, shape.head_dim)
        made = (
            _tensors(memory, size, dtype, 2 * shape.layers)
            if torch.device(device).type == "cpu"
            else (torch.empty(size, dtype=dtype, device=device) for _ in range(2 * shape.layers))
        )
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = list(zip(made, made, strict=True))
        known = (torch.float32, layout.stored_type)
        self._is_native = torch.device(device).type == "cpu" and dtype in known
        self._piece_tokens = max(1, _PIECE_NUMBERS // (shape.kv_heads * shape.head_dim))

    def place(self, layer: int, position: int, rows: NDArray[np.uint8], stop: int) -> None:
        """Put rows to their places.

        Parameters
        ----------
        layer, position
            Whose, and that of the first row.
        rows
            uint8 (tokens, row_bytes), contiguous.
        stop
            The position behind the last row that is wanted.
        """
        count = min(len(rows), stop - position)
        if count <= 0:
            return
        if self._is_native:
            # One call without Python's lock, past the caches where that is possible.
            given = self._given(layer, position, rows[:count])
            native_library().functions.hillinfer_place_states(ctypes.byref(given))
        else:
            self._place_by_torch(*self.layers[layer], position, rows[:count])

    @property
    def is_native(self) -> bool:
        """Whether `offer` can be used: states are the processor's, and of a type that it knows."""
        return self._is_native

    def offer(self, arrived: Sequence[ArrivedRows], stop: int) -> OfferedRows:
        """Return rows that go to their places while some core has nothing else to do.

        Parameters
        ----------
        arrived
            Of any layers, which are valid until the offer is ended.
        stop
            The position behind the last row that is wanted.
        """
        given = (CheckedRows * len(arrived))()
        sums = [np.empty(len(one.salts), np.uint32) for one in arrived]
        for own, one, found in zip(given, arrived, sums, strict=True):
            own.states = self._given(one.layer, one.position, one.rows)
            own.placed = max(0, stop - one.position)
            own.salts, own.sums = one.salts.ctypes.data, found.ctypes.data
        return OfferedRows(given, sums, (self, arrived))

    # --- inside ----------------------------------------------------------------------------

    def _given(self, layer: int, position: int, rows: NDArray[np.uint8]) -> StateRows:
        """Return rows and their places as the native library takes them."""
        keys, values = self.layers[layer]
        heads, room, head_dim = keys.shape
        start = position * head_dim * keys.element_size()
        return StateRows(
            rows=rows.ctypes.data,
            tokens=len(rows),
            row_bytes=rows.shape[1],
            kv_heads=heads,
            head_dim=head_dim,
            room_items=room * head_dim,
            keys=keys.data_ptr() + start,
            values=values.data_ptr() + start,
            stored_type=_STORED_TYPES[self._layout.stored_type],
            is_widened=keys.dtype is torch.float32,
        )

    def _place_by_torch(self, keys: Any, values: Any, position: int, rows: NDArray[Any]) -> None:
        # In pieces that torch leaves to this thread: those of its pool compute meanwhile.
        for start in range(0, len(rows), self._piece_tokens):
            own = torch.from_numpy(rows[start : start + self._piece_tokens])
            place = slice(position + start, position + start + len(own))
            keys[:, place] = self._layout.keys(own).transpose(0, 1)
            values[:, place] = self._layout.values(own).transpose(0, 1)


def _tensors(
    memory: KeptMemory, size: Sequence[int], dtype: torch.dtype, count: int
) -> Iterator[torch.Tensor]:
    """Yield uninitialized tensors, few of which share a block, which goes as a whole."""
    byte_count = math.prod(size) * dtype.itemsize
    own = round_up(byte_count, PAGE_BYTES)
    joined = max(1, BLOCK_BYTES // max(own, 1))
    for first in range(0, count, joined):
        together = min(joined, count - first)
        block = memory.taken(together * own)
        for at in range(together):
            # Each is a storage of its own: whoever copies one copies no other, whose rows may not
            # be there yet.
            part = torch.from_numpy(block[at * own : at * own + byte_count])
            yield part.view(dtype).view(*size)


# --- A layer whose first tokens come from a drive ---

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


def copied(
    cache: HillInferCache,
    stored: StoredRows,
    states: Callable[[int, torch.device | str], LandedStates],
) -> OpenedRows:
    """Copy the first tokens of a sealed prompt into an empty cache, which could not read them.

    Parameters
    ----------
    cache
        Empty.
    stored
        The prompt.
    states
        Returns room for so many tokens on a device.
    """
    done, shape = 0, stored.prefix.shape
    for number, chunk in enumerate(stored.prefix.chunks):
        groups = min(chunk.groups, stored.tokens // GROUP_TOKENS - number * CHUNK_GROUPS)
        if groups <= 0:
            break
        count = groups * GROUP_TOKENS
        held = states(count, "cpu")
        memory = aligned_buffer(count * shape.row_bytes)[: count * shape.row_bytes]
        try:
            for layer in range(shape.layers):
                rows = memory.reshape(count, -1)
                stored.prefix.read_groups(chunk, layer, 0, rows)
                held.place(layer, 0, rows, count)
        except (OSError, WrongBytesError) as error:
            return OpenedRows(done, done * shape.layers * shape.row_bytes, error)
        ids = torch.tensor([list(stored.ids[done : done + count])])
        cache.fill(ids, *([one[None] for one in side] for side in zip(*held.layers, strict=True)))
        done += count
    return OpenedRows(done, done * shape.layers * shape.row_bytes, None)


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
