# SPDX-License-Identifier: Apache-2.0
"""Several caches of one attachment that take a step together, each at its own length."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Never

import torch

from hillinfer.engine.queries import Choice, Prediction
from hillinfer.errors import CacheUseError, UnsupportedFeatureError
from hillinfer.extents.shared_chunks import StoredRowsError
from hillinfer.hf.attention import AttachedCache, HillInferLayer, is_autocast
from hillinfer.hf.batch import CacheFamily, Expectation, left_padding
from hillinfer.hf.cache import HillInferCache
from hillinfer.hf.engine import Use
from hillinfer.hf.forward_plan import ForwardPlan, LoneToken
from hillinfer.hf.prompts import PromptCall
from hillinfer.statistics import CacheStatistics
from hillinfer.trace.recorder import ForwardSpans

# Of prompts that `generate` brings to caches without tokens, what is left for the first pass
# together: one that brings a single token would select instead of attending to everything.
_TOGETHER = 2


@dataclass(frozen=True)
class _Member:
    """One of the caches, and which rows of the batch are its own."""

    cache: HillInferCache
    rows: slice


class JoinedCache(AttachedCache):
    """Caches as the rows of one batch; pass it as `past_key_values` with what `inputs` makes.

    The model's linear layers run once for all rows; each row selects and attends in its own cache,
    by its own length, as it would alone. Nothing moves: the caches go on by themselves whenever
    they like, and any of them may be joined with others at the next step.

    Parameters
    ----------
    caches
        Of one attachment; the first one's rows come first. One without tokens is a row: `generate`
        lets it read its prompt by itself.

    Raises
    ------
    CacheUseError
        Where they cannot take a step together; the message names the caches.
    """

    def __init__(self, caches: Sequence[HillInferCache]) -> None:
        self._members = _members(caches)
        self._engine = caches[0].engine
        layers = self._engine.runtime.shape.layers
        super().__init__(layers=[HillInferLayer(self, layer) for layer in range(layers)])
        self._family = CacheFamily(Expectation(), layers)
        self.spans = ForwardSpans.of(self._engine.runtime.recorder)
        self._use: Use | None = None
        # Of the pass under way: tokens that are stored and attended to together, by their row.
        self._together: dict[int, LoneToken] = {}
        self._announced: set[int] = set()
        self._plan = ForwardPlan(0, 1, 0, ())
        self._around: list[tuple[HillInferCache, Use | None]] = []

    # --- what a user calls -----------------------------------------------------------------

    def inputs(self, input_ids: torch.Tensor) -> dict[str, Any]:
        """Return the arguments of a forward pass that brings tokens to every row.

        Parameters
        ----------
        input_ids
            (batch, tokens): of each row of the caches, in their order, as many tokens.

        Returns
        -------
        `input_ids`, `attention_mask` (batch, longest + tokens), `position_ids` (batch, tokens) and
        `past_key_values`.
        """
        self._check_rows(input_ids)
        past = torch.tensor(self._lengths(), device=input_ids.device)[:, None]
        whole = self.get_seq_length() + input_ids.shape[1]
        places = torch.arange(whole, device=input_ids.device)
        mask = (places >= whole - input_ids.shape[1] - past).to(torch.int64)
        return {
            "input_ids": input_ids,
            "attention_mask": mask,
            "position_ids": past + torch.arange(input_ids.shape[1], device=input_ids.device),
            "past_key_values": self,
        }

    def statistics(self) -> CacheStatistics:
        """Return what steps together did; each cache's own statistics have its rows of them."""
        return self._engine.statistics(self._family)

    @property
    def caches(self) -> list[HillInferCache]:
        """The caches that take steps together."""
        return [one.cache for one in self._members]

    @property
    def token_ids(self) -> list[list[int]]:
        """The tokens of each row so far, padding left out."""
        return [row for one in self._members for row in one.cache.token_ids]

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return len(self._lengths())

    # --- what transformers calls -----------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def index_length(self, layer: int) -> int:
        """Return the tokens of a layer in the longest cache, padding included."""
        lengths: list[int] = [one.cache.index_length(layer) for one in self._members]
        return max(lengths)

    def reorder_cache(self, beam_idx: torch.Tensor) -> Never:
        """Refuse: rows belong to caches, which do not take each other's."""
        raise _only_apart("beams")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse more than the rows that there are."""
        if repeats != 1:
            raise _only_apart("beams and num_return_sequences")

    def batch_select_indices(self, indices: torch.Tensor) -> Never:
        """Refuse: rows belong to caches, which do not take each other's."""
        raise _only_apart("choosing rows")

    def crop(self, tokens_to_remove: int) -> Never:
        """Refuse: each cache is cropped by itself."""
        raise _only_apart("crop")

    def reset(self) -> Never:
        """Refuse: each cache is reset by itself."""
        raise _only_apart("reset")

    # --- what the adapter calls ------------------------------------------------------------

    def check_model(self, model: Any) -> None:
        """Refuse another model than that of the caches, and a number type of no rows of theirs."""
        self._members[0].cache.check_model(model)

    def check_continues(self, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Refuse full ids whose rows do not start with what their caches hold."""
        self._check_rows(ids)
        longest = self.get_seq_length()
        # Of new tokens alone, whose mask is of all, every row has as many.
        is_whole = mask is None or mask.shape[1] == ids.shape[1]
        for one in self._members:
            start = longest - one.cache.get_seq_length()
            own_mask = None if mask is None else mask[one.rows, start:]
            one.cache.check_continues(ids[one.rows, start if is_whole else 0 :], own_mask)

    def check_positions(self, positions: torch.Tensor | None) -> None:
        """Refuse positions that are not those of each row's own length."""
        if self._use is None:
            return
        wanted = torch.tensor(self._lengths())
        first = None if positions is None else positions[:, 0].cpu().expand(len(wanted))
        if first is None or not torch.equal(first, wanted):
            found = "none" if first is None else first.tolist()
            raise CacheUseError(
                f"rows of joined caches begin at positions {wanted.tolist()}, and position_ids "
                f"begin at {found}: call the model with **joined.inputs(input_ids)"
            )
        assert positions is not None
        whole = positions.expand(len(wanted), -1)
        for one in self._members:
            one.cache.check_positions(whole[one.rows])

    def begin_prompt(self, ids: torch.Tensor, mask: torch.Tensor | None, call: PromptCall) -> None:
        """Let each cache without tokens read its row by itself, up to what is computed together.

        Raises
        ------
        CacheUseError
            Where a single token is computed together, and a cache without tokens has more of them:
            a single one is a step, which selects, and alone its prompt's last one does not.
        """
        if not call.may_skip or (mask is not None and mask.shape != ids.shape):
            return
        longest = self.get_seq_length()
        together = ids.shape[1] - longest if longest else _TOGETHER
        pads = [0] * len(ids) if mask is None else left_padding(mask)
        empty = [
            (one.cache, ids[one.rows.start, pads[one.rows.start] :].tolist())
            for one in self._members
            if not one.cache.get_seq_length()
        ]
        longest_row = max((len(row) for _, row in empty), default=0)
        if together == 1 < longest_row:
            raise CacheUseError(
                f"one new token in joined caches, and a prompt of {longest_row} tokens in one that "
                "has none: its last token would be a step's. Read the prompt by itself first "
                "(model(ids, past_key_values=cache)), or give two new tokens"
            )
        for cache, row in empty:
            call.read(cache, row[: max(0, len(row) - together)])
            # The next row may begin alike.
            cache.await_stored()

    def begin_generate(self, use: Use) -> Use | None:
        """Learn of it in every cache."""
        begun: list[tuple[HillInferCache, Use | None]] = []
        try:
            for one in self._members:
                begun.append((one.cache, one.cache.begin_generate(use)))
        except BaseException:
            for cache, around in begun:
                cache.end_generate(around)
            raise
        self._around = begun
        return None

    def end_generate(self, around: Use | None) -> None:
        """Learn of it in every cache."""
        for cache, before in self._around:
            cache.end_generate(before)

    def begin_forward(self, ids: torch.Tensor, mask: torch.Tensor | None, use: Use) -> None:
        """Begin a pass in every cache, in one turn."""
        self._check_rows(ids)
        self._engine.turns.take(use)
        try:
            longest = self.get_seq_length()
            for one in self._members:
                start = longest - one.cache.get_seq_length()
                own = None if mask is None else mask[one.rows, start:]
                if start and (mask is None or bool(mask[one.rows, :start].any())):
                    raise CacheUseError(
                        "joined caches of different lengths need a mask that leaves out what the "
                        "shorter ones do not hold: call the model with **joined.inputs(input_ids)"
                    )
                own_ids = ids[one.rows]
                one.cache.begin_joined(own_ids, own, use, len(ids) - len(own_ids))
            parts = [
                (one.cache.family, sequence)
                for one in self._members
                for sequence in one.cache.sequences
            ]
            self._engine.serve_together(self._family, parts)
            self._engine.runtime.begin_step()
            self._take_together()
        except BaseException:
            use.end()
            raise
        self._use = use
        if self.spans is not None:
            self.spans.begin(ids.shape[1])

    def regain(self, error: StoredRowsError, model: Any) -> bool:
        """Let each cache have its own lost rows computed."""
        regained = [one.cache.regain(error, model) for one in self._members]
        return any(regained)

    def end_forward(self) -> None:
        """Learn in every cache that the pass got through."""
        if self.spans is not None:
            self.spans.end()
        use, self._use, self._together = self._use, None, {}
        try:
            for one in self._members:
                one.cache.end_joined()
        finally:
            if use is not None:
                use.end()

    @property
    def holds_prompt(self) -> bool:
        """Whether any cache has a prompt to store."""
        return any(one.cache.holds_prompt for one in self._members)

    def end_prompt(self) -> None:
        """Let each cache store what it has of a prompt that is complete."""
        for one in self._members:
            if one.cache.holds_prompt:
                one.cache.end_prompt()

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store each row's new keys and values in its cache."""
        together, joined = self._together, self._engine.runtime.joined
        if together and self._use is not None and self._use.is_own and joined is not None:
            self._plan.check_states(self._engine.runtime.shape, layer, keys, values)
            if joined.takes_numbers(keys, values):
                for token in together.values():
                    token.store(layer)
                joined.store(layer, keys, values)
                for one in self._apart(together):
                    one.cache.store(layer, keys[one.rows], values[one.rows])
                return
        for one in self._members:
            one.cache.store(layer, keys[one.rows], values[one.rows])

    def attend(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend to what each row's cache holds."""
        batch, heads, tokens, head_dim = query.shape
        together, joined = self._together, self._engine.runtime.joined
        if not together or joined is None:
            with self._engine.runtime.parts.selection.own_together(
                self._own_choices(layer, query, scaling)
            ):
                return torch.cat(
                    [one.cache.attend(layer, query[one.rows], scaling) for one in self._members]
                )
        out = torch.empty((batch, tokens, heads, head_dim))
        alone = joined.attend(layer, query, scaling, out)
        for row in together.keys() - alone:
            together[row].attend(layer)
        out = out.to(query.dtype)
        for one in self._apart(together.keys() - alone):
            out[one.rows] = one.cache.attend(layer, query[one.rows], scaling)
        return out

    @property
    def takes_predictions(self) -> bool:
        """Whether the settings leave it open that queries are predicted."""
        return self._members[0].cache.takes_predictions

    def announce(self, layer: int, predicted: Prediction, scaling: float) -> None:
        """Let every row select for a layer before the layer's own turn."""
        together, joined = self._together, self._engine.runtime.joined
        taken: Collection[int] = ()
        if together and joined is not None:
            # Attention is computed without autocast.
            given = predicted.queries() if is_autocast() else predicted
            taken = together.keys() - joined.announce(layer, given, scaling)
        apart = self._apart(taken)
        if not apart:
            return
        query = predicted.queries()
        self._announced.add(layer)

        def announce() -> None:
            # A device reads what they share of its shadows once for several queries.
            with self._engine.runtime.parts.selection.together():
                for one in apart:
                    one.cache.announce_queries(layer, query[one.rows], scaling)

        # The drive is given all of it at once: little sets one by one leave it idle in between.
        self._engine.runtime.prefetch.together(announce)

    # --- inside ----------------------------------------------------------------------------

    def _take_together(self) -> None:
        """Let rows that can store and attend with others do so in the pass that begins."""
        runtime, self._together = self._engine.runtime, {}
        self._announced.clear()
        if runtime.joined is None:
            return
        lone = {
            one.rows.start: token
            for one in self._members
            if (token := one.cache.lone_token) is not None
        }
        if runtime.follows_context:
            runtime.cover(runtime.parts.rows.tokens + len(lone))
        rows = [(row, token.sequence) for row, token in lone.items()]
        taken = runtime.joined.begin(rows, runtime.step, runtime.observe_selected)
        self._together = {row: lone[row] for row in taken}
        self._plan = ForwardPlan(0, 1, self.batch_size, ())

    def _own_choices(self, layer: int, query: torch.Tensor, scaling: float) -> list[Choice]:
        """Return what a device may choose for at once: rows of one token, by their own queries."""
        parts, found = self._engine.runtime.parts, []
        is_shared = parts.device is not None and parts.device.queries_together > 1
        if not is_shared or parts.gpu is not None or layer in self._announced:
            return []
        for one in self._members:
            token = one.cache.lone_token
            if token is None or token.sequence.told is not None:
                continue
            sequence = token.sequence
            if not parts.selection.selects_all(sequence.lengths[layer], sequence.lacking):
                keys = parts.rows.newest_keys(layer, sequence)
                own = layer, sequence, query[one.rows.start], keys, scaling
                found.append(Choice.own(*own))
        return found

    def _apart(self, together: Collection[int]) -> list[_Member]:
        """Return the caches whose rows are none of these."""
        return [one for one in self._members if one.rows.start not in together]

    def _lengths(self) -> list[int]:
        """Return the tokens that each row holds."""
        return [length for one in self._members for length in one.cache.row_lengths]

    def _check_rows(self, ids: torch.Tensor) -> None:
        if len(ids) != self.batch_size:
            raise CacheUseError(
                f"the joined caches hold {self.batch_size} rows but {len(ids)} were given: pass "
                "tokens of every row, or join fewer caches"
            )


def _members(caches: Sequence[HillInferCache]) -> tuple[_Member, ...]:
    if not caches:
        raise CacheUseError("no caches were given: join at least one")
    members: list[_Member] = []
    start = 0
    for number, cache in enumerate(caches):
        if not isinstance(cache, HillInferCache):
            raise CacheUseError(
                f"cache {number} is {type(cache).__name__}: join caches from new_cache()"
            )
        if any(cache is one.cache for one in members):
            raise CacheUseError(f"cache {number} is there twice: join cache.fork() beside it")
        if cache.engine is not caches[0].engine:
            raise CacheUseError(
                f"cache {number} and cache 0 belong to two engines (of two models, or of one that "
                "changed its number type or was attached again): "
                f"{cache!r} (open caches of its engine: "
                f"{cache.engine.open_caches}), {caches[0]!r} ({caches[0].engine.open_caches}): "
                "join caches of one attachment"
            )
        # A cache without tokens is going to hold a prompt.
        rows = max(1, cache.batch_size)
        members.append(_Member(cache, slice(start, start + rows)))
        start += rows
    return tuple(members)


def _only_apart(what: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        f"{what}: rows of joined caches belong to caches of their own; do it with each cache"
    )
