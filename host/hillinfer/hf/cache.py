# SPDX-License-Identifier: Apache-2.0
"""The cache that a model is given instead of its ordinary one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence as SequenceOf

import torch
from transformers.cache_utils import Cache

from hillinfer.errors import CacheUseError, UnsupportedFeatureError
from hillinfer.hf.forward_plan import ForwardPlan, SequenceShare
from hillinfer.hf.layer import HillInferLayer
from hillinfer.hf.padding import left_padding
from hillinfer.hf.runtime_users import RuntimeUsers
from hillinfer.runtime import Runtime
from hillinfer.statistics import CacheStatistics
from hillinfer.storage.sequence import Sequence


class HillInferCache(Cache):  # type: ignore[misc]
    """Keys and values of a batch of sequences, on a drive and partly in DRAM.

    Pass it as `past_key_values` to an attached model, to `generate` or to forward calls of your
    own. Identical rows of a batch (beams, `num_return_sequences`) are stored once and part when
    their tokens do.

    Parameters
    ----------
    runtime
        Where rows and shadow live.
    users
        The caches that share this runtime, None for the first.
    """

    def __init__(self, runtime: Runtime, users: RuntimeUsers | None = None) -> None:
        super().__init__(
            layers=[HillInferLayer(self, layer) for layer in range(runtime.shape.layers)]
        )
        self._runtime = runtime
        self._rows: list[Sequence] = []
        self._pads: list[int] = []
        self._index_lengths = [0] * runtime.shape.layers
        self._plan: ForwardPlan | None = None
        self._fresh: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._users = users or RuntimeUsers(runtime)
        self._users.join()
        self._closer = weakref.finalize(self, self._users.leave, self._rows)

    # --- what a user calls -----------------------------------------------------------------

    def statistics(self) -> CacheStatistics:
        """Return memory and traffic so far, of this cache and its forks together."""
        return self._runtime.statistics()

    def fork(self) -> HillInferCache:
        """Return a cache with the same tokens that shares all full groups and segments.

        Both may go on independently; nothing is read or written for it.
        """
        self._recover()
        copy = HillInferCache(self._runtime, self._users)
        forked = {id(row): self._runtime.fork(row) for row in self._distinct()}
        copy._rows[:] = [forked[id(row)] for row in self._rows]
        copy._pads = list(self._pads)
        copy._index_lengths = list(self._index_lengths)
        return copy

    def close(self) -> None:
        """Free the rows; with the last fork the files and threads go too.

        Harmless when done twice; dropping the cache does the same.
        """
        self._closer()

    # --- what transformers calls -----------------------------------------------------------

    def reset(self) -> None:
        """Forget all tokens; the cache can be used for another prompt."""
        for row in self._distinct():
            self._runtime.release(row)
        del self._rows[:]
        self._pads = []
        self._index_lengths = [0] * len(self._index_lengths)
        self._plan = None
        self._fresh = {}

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens of every row.

        Parameters
        ----------
        tokens_to_remove
            A negative count, or 0, as transformers passes it.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass a negative number of tokens to remove"
            )
        self._recover()
        length = max(0, self.get_seq_length() + tokens_to_remove)
        for row, pad in self._distinct_with_pads():
            self._runtime.truncate(row, max(0, length - pad))
        self._pads = [min(pad, length) for pad in self._pads]
        self._index_lengths = [length] * len(self._index_lengths)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let batch row i continue what row beam_idx[i] held."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row; the copies are stored once until they part."""
        self._choose([i for i in range(len(self._rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the given batch rows, in the given order."""
        self._choose([int(i) for i in indices])

    def activate_past_recording(self) -> None:
        """Refuse assisted decoding, which announces itself with this call."""
        raise UnsupportedFeatureError(
            "assisted and prompt-lookup decoding need a cache that takes tokens back at every "
            "step: call generate without assistant_model and prompt_lookup_num_tokens"
        )

    @property
    def batch_size(self) -> int:
        """Rows of the batch, -1 before the first forward."""
        return len(self._rows) or -1

    def index_length(self, layer: int) -> int:
        """Return the tokens of a layer, padding included."""
        return self._index_lengths[layer]

    # --- what the adapter calls ------------------------------------------------------------

    def check_continues(self, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Refuse full ids that do not start with what this cache holds.

        Parameters
        ----------
        ids
            What `generate` was given, (batch, tokens).
        mask
            Its attention mask, (batch, tokens) or longer, or None.

        Raises
        ------
        CacheUseError
            Where another prompt is given on a used cache.
        """
        self._recover()
        past = self.get_seq_length()
        if past == 0:
            return
        # `generate` repeats ids for beams and num_return_sequences, whose rows may exist already.
        copies, rest = divmod(len(self._rows), ids.shape[0])
        if rest or not copies:
            raise CacheUseError(
                f"the cache holds {len(self._rows)} sequences but {ids.shape[0]} were given: "
                "use a new cache"
            )
        if mask is not None and mask.shape[1] != ids.shape[1]:
            if mask.shape[1] != past + ids.shape[1]:
                raise CacheUseError(
                    f"{ids.shape[1]} new tokens on {past} cached ones need an attention mask of "
                    f"{past + ids.shape[1]}, not {mask.shape[1]}"
                )
            return
        pads = left_padding(mask) if mask is not None else [0] * ids.shape[0]
        for number, (row, pad) in enumerate(zip(self._rows, self._pads, strict=True)):
            given = ids[number // copies, pad:past].tolist()
            if ids.shape[1] <= past or pads[number // copies] != pad or given != row.token_ids:
                raise CacheUseError(
                    "the prompt does not continue what the cache holds "
                    f"(sequence {number}): use a new cache for another prompt, or pass the whole "
                    "conversation so far"
                )

    def begin_forward(self, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Learn which tokens a forward pass brings.

        Parameters
        ----------
        ids
            (batch, tokens), left-padded.
        mask
            (batch, past + tokens) of zeros for padding, or None.
        """
        self._recover()
        self._runtime.begin_step()
        batch, tokens = ids.shape
        start = self.get_seq_length()
        pads = self._padding(batch, start, tokens, mask)
        if not self._rows:
            self._open_rows(ids, pads)
        if batch != len(self._rows):
            raise CacheUseError(
                f"the cache holds {len(self._rows)} sequences but the forward pass has {batch}"
            )
        self._pads = pads
        new_ids = [ids[i, max(0, pads[i] - start) :].tolist() for i in range(batch)]
        self._part_ways(new_ids)
        shares: dict[int, list[int]] = {}
        for i, row in enumerate(self._rows):
            shares.setdefault(id(row), []).append(i)
        self._plan = ForwardPlan(
            start=start,
            tokens=tokens,
            batch=batch,
            shares=tuple(
                SequenceShare(self._rows[rows[0]], tuple(rows), len(new_ids[rows[0]]))
                for rows in shares.values()
            ),
        )
        self._fresh = {}
        for share in self._plan.shares:
            share.sequence.token_ids.extend(new_ids[share.batch_rows[0]])

    def end_forward(self) -> None:
        """Learn that the forward pass got through, and its tokens count."""
        self._plan = None
        self._fresh = {}

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store a layer's new keys and values, (batch, kv_heads, tokens, head_dim)."""
        plan = self._planned(layer, keys, values)
        layout, runtime = self._runtime.layout, self._runtime
        fresh = []
        for share in plan.shares:
            begin = plan.tokens - share.tokens
            rounded = []
            for states in (keys, values):
                stored, overflows = layout.round(states[share.batch_rows[0], :, begin:])
                runtime.counters.fp16_overflows += overflows
                rounded.append(stored)
            if share.tokens:
                on_host = [states.cpu() for states in rounded]
                if keys.device.type != "cpu":
                    runtime.counters.device_to_host_bytes += sum(
                        states.numel() * states.element_size() for states in rounded
                    )
                runtime.append(layer, share.sequence, on_host[0], on_host[1])
            fresh.append((rounded[0], rounded[1]))
        self._fresh[layer] = fresh
        self._index_lengths[layer] += plan.tokens

    def attend(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend to what `store` just completed.

        Parameters
        ----------
        layer
            Index of the decoder layer.
        query
            (batch, query_heads, tokens, head_dim).
        scaling
            Factor on inner products.

        Returns
        -------
        (batch, tokens, query_heads, head_dim), contiguous; zeros for padding.
        """
        assert self._plan is not None
        batch, heads, tokens, head_dim = query.shape
        out = query.new_zeros((batch, tokens, heads, head_dim))
        fresh = self._fresh.pop(layer)
        for share, (keys, values) in zip(self._plan.shares, fresh, strict=True):
            if not share.tokens:
                continue
            own = query[share.batch_rows[0], :, tokens - share.tokens :]
            # Only a forward of a single token selects; longer ones attend to everything.
            attended = (
                self._runtime.attend_selected(layer, share.sequence, own, keys, scaling)
                if tokens == 1
                else self._runtime.attend_dense(layer, share.sequence, own, keys, values, scaling)
            )
            for row in share.batch_rows:
                out[row, tokens - share.tokens :] = attended.transpose(0, 1)
        return out

    # --- inside ----------------------------------------------------------------------------

    def _distinct(self) -> list[Sequence]:
        return list({id(row): row for row in self._rows}.values())

    def _distinct_with_pads(self) -> list[tuple[Sequence, int]]:
        pairs = zip(self._rows, self._pads, strict=True)
        return list({id(row): (row, pad) for row, pad in pairs}.values())

    def _padding(self, batch: int, start: int, tokens: int, mask: torch.Tensor | None) -> list[int]:
        if mask is None:
            if any(self._pads):
                raise CacheUseError(
                    "the prompt was padded, so every forward pass needs the full attention mask"
                )
            return [0] * batch
        pads = left_padding(mask)
        if mask.shape != (batch, start + tokens):
            raise CacheUseError(
                f"the attention mask has shape {tuple(mask.shape)}, but {batch} rows of {start} "
                f"cached and {tokens} new tokens need {(batch, start + tokens)}"
            )
        for i, row in enumerate(self._rows):
            if row.token_ids and pads[i] != self._pads[i]:
                raise CacheUseError(
                    f"sequence {i} was padded by {self._pads[i]} tokens, now by {pads[i]}"
                )
        return pads

    def _open_rows(self, ids: torch.Tensor, pads: list[int]) -> None:
        opened: dict[tuple[int, tuple[int, ...]], Sequence] = {}
        for row_ids, pad in zip(ids.tolist(), pads, strict=True):
            key = (pad, tuple(row_ids))
            try:
                if key not in opened:
                    opened[key] = self._runtime.open_sequence()
            except BaseException:
                self.reset()
                raise
            self._rows.append(opened[key])

    def _part_ways(self, new_ids: SequenceOf[list[int]]) -> None:
        """Fork sequences whose batch rows bring different tokens from now on."""
        chosen: dict[tuple[int, tuple[int, ...]], Sequence] = {}
        taken: set[int] = set()
        for i, row in enumerate(self._rows):
            key = (id(row), tuple(new_ids[i]))
            if key not in chosen:
                chosen[key] = self._runtime.fork(row) if id(row) in taken else row
                taken.add(id(row))
            self._rows[i] = chosen[key]

    def _choose(self, indices: list[int]) -> None:
        self._recover()
        before = self._distinct()
        self._rows[:] = [self._rows[i] for i in indices]
        self._pads = [self._pads[i] for i in indices]
        kept = {id(row) for row in self._rows}
        for row in before:
            if id(row) not in kept:
                self._runtime.release(row)

    def _planned(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> ForwardPlan:
        plan, shape = self._plan, self._runtime.shape
        if plan is None or self._index_lengths[layer] != plan.start:
            raise CacheUseError(
                "this cache was not told about the forward pass: call the model that was attached, "
                "not a part of it"
            )
        if keys.requires_grad:
            raise UnsupportedFeatureError(
                "gradients do not pass through a cache on a drive: use torch.no_grad()"
            )
        if keys.shape != values.shape:
            raise UnsupportedFeatureError(
                f"keys {tuple(keys.shape)} and values {tuple(values.shape)} differ in shape "
                "(latent attention): this model needs its ordinary cache"
            )
        expected = (plan.batch, shape.kv_heads, plan.tokens, shape.head_dim)
        if tuple(keys.shape) != expected:
            raise UnsupportedFeatureError(
                f"layer {layer} has keys of shape {tuple(keys.shape)} where the config says "
                f"{expected}: layers of different shapes need the ordinary cache"
            )
        return plan

    def _recover(self) -> None:
        """Forget a forward pass that broke off, so that the cache holds whole tokens again."""
        if not self._closer.alive:
            raise CacheUseError("this cache is closed: make another with new_cache()")
        if self._plan is None:
            return
        start = self._plan.start
        if start == 0:
            self.reset()
            return
        for row, pad in self._distinct_with_pads():
            self._runtime.truncate(row, max(0, start - pad))
        self._index_lengths = [start] * len(self._index_lengths)
        self.end_forward()
