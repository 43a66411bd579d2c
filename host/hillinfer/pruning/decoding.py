# SPDX-License-Identifier: Apache-2.0
"""Moves a prompt's blocks into and out of bands of layers while tokens are decoded.

Each decoded token ranks blocks anew before each cut. A policy says from that which blocks the band
behind it has. What leaves is kept aside and put back when it returns. What the band never had is
run through it from what enters the band. SlimInfer, section 4.3 and algorithm 1.

The paper moves blocks between a GPU and the host while the deciding layer's FFN computes. Here all
rows lie in the same memory and nothing is read, so nothing is there to overlap: moving is a copy,
and what enters for the first time is computed by the threads that compute everything else.

In a cache of an attached model rows only come behind each other, so none moves there: the policy
says which blocks a token attends to, and those that enter are read a layer ahead. What the band
never had runs through it, too, where the policy wants it, and comes behind all other rows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hillinfer.errors import SettingsError, UnsupportedFeatureError
from hillinfer.pruning.block_policies import DecodedBlocks, Decoding
from hillinfer.pruning.passes import Document, Pass, Window
from hillinfer.pruning.rankers import kept_blocks
from hillinfer.pruning.schedule import BLOCK_TOKENS
from hillinfer.pruning.stages import Stages, blocks_of
from hillinfer.pruning.states import States, gathered_states

if TYPE_CHECKING:
    from hillinfer.pruning.passes import StagedCache

# --- what is known of one cache ---

# Keys and values of a block, (1, kv_heads, 64, head_dim), in each layer of a band.
_Rows = tuple[tuple[torch.Tensor, torch.Tensor], ...]


@dataclass(frozen=True)
class Swapping:
    """What is kept of a prompt so that its blocks may move.

    Nothing of it is changed in place: a pass that breaks off leaves what was before it.

    Parameters
    ----------
    tokens
        Of the prompt; what comes behind them never moves.
    entering
        For each band, states (1, 64, hidden_size) that enter it, by block; none for the first
        band, which boundary states enter.
    aside
        For each band, rows of blocks that left it once, by block.
    windows
        By the number of the cut, as they were at the prompt's end.
    attended
        For each band, blocks that the last token attended to, where rows stay in their place.
    steps, swaps, computed, put_back, entered_rows, deciding_seconds, swapping_seconds
        As in `DecodedBlocks`.
    """

    tokens: int
    entering: tuple[Mapping[int, torch.Tensor], ...]
    aside: tuple[Mapping[int, _Rows], ...]
    windows: Mapping[int, Window]
    attended: tuple[frozenset[int], ...]
    steps: int
    swaps: tuple[int, ...]
    computed: int = 0
    put_back: int = 0
    entered_rows: int = 0
    deciding_seconds: float = 0.0
    swapping_seconds: float = 0.0

    @classmethod
    def of_prompt(cls, tokens: int, bands: int, window: Window) -> Swapping:
        """Return what is known at the first cut, where nothing has been decoded yet."""
        none = (frozenset[int](),) * bands
        return cls(tokens, ({},) * bands, ({},) * bands, {0: window}, none, 0, (0,) * bands)


# --- moving blocks ---


class BlockManager:
    """Moves blocks of prompts in ordinary caches as a policy says, or says which are attended to.

    Parameters
    ----------
    stages
        The bands of the model's layers.
    policy
        Says which blocks a band has.

    Attributes
    ----------
    moves, enters
        Whether the policy may move any, and of those whose rows stay in their place.
    windows
        The numbers of cuts whose windows are wanted, by the layer that decides.
    """

    def __init__(self, stages: Stages, policy: Decoding) -> None:
        self._stages, self._policy = stages, policy
        self.moves, self.enters = policy.moves, policy.enters
        self._cuts = {band.start: number for number, band in enumerate(stages.bands)}
        self.windows = {
            layer - 1: number for layer, number in self._cuts.items() if self.moves or not number
        }

    def report(self, document: Document) -> DecodedBlocks | None:
        """Return what was done with a prompt's blocks so far; None where none may move."""
        state = document.swapping
        if state is None:
            return None
        rows = [pair for own in state.aside for block in own.values() for pair in block]
        states = [one for own in state.entering for one in own.values()]
        return DecodedBlocks(
            state.steps,
            state.swaps,
            state.computed,
            state.put_back,
            state.entered_rows,
            state.deciding_seconds,
            state.swapping_seconds,
            sum(one.nbytes for one in states) + sum(one.nbytes for pair in rows for one in pair),
            tuple(tuple(sorted(one)) for one in self._active(document, state)),
        )

    def _active(self, document: Document, state: Swapping) -> Sequence[frozenset[int]]:
        if self._policy.share is not None:
            return state.attended
        return [_blocks(one, state.tokens) for one in document.positions]

    def check(self, cache: StagedCache, rows: int) -> None:
        """Refuse a pass whose blocks could not move.

        Parameters
        ----------
        cache
            That the pass goes through.
        rows
            Of the batch.

        Raises
        ------
        UnsupportedFeatureError
            Where blocks may move, and the cache is of another kind or has several rows.
        """
        if not self.moves:
            return
        if self._policy.share is None:
            cache.ordinary()
        elif cache.rows_move:
            raise UnsupportedFeatureError(
                f'prune: decoding="{"enter" if self.enters else "blocks"}" says which rows of a '
                "cache of new_cache() are read, and "
                'a DynamicCache has all of them in memory: take decoding="swap", which moves them'
            )
        if rows != 1:
            raise UnsupportedFeatureError(
                f"prune: decoding moves blocks of one sequence, and {rows} are decoded side "
                'by side: decode one at a time, or leave decoding="keep"'
            )

    def cut_back(self, document: Document, length: int) -> None:
        """Learn that so many tokens are left; where the prompt lost some, no block moves again."""
        state = document.swapping
        if state is None or length >= document.length:
            return
        if length < state.tokens:
            document.swapping = None
        elif length == state.tokens:
            # Another answer begins with the queries that the first one began with.
            document.windows.update(state.windows)
            none = (frozenset[int](),) * len(state.attended)
            document.swapping = replace(state, attended=none)

    def note_prompt(
        self,
        document: Document,
        number: int,
        active: torch.Tensor,
        came: Sequence[States],
        window: torch.Tensor,
    ) -> None:
        """Keep what reading a prompt brought to a cut.

        Parameters
        ----------
        document
            What is known of its cache.
        number
            Of the cut.
        active
            int64, positions of the tokens that came there.
        came
            Their states.
        window
            (1, tokens, hidden_size), what entered the deciding layer, of the last ones.
        """
        if not self.moves:
            return
        if not number:
            bands = len(self._stages.bands)
            document.swapping = Swapping.of_prompt(len(active), bands, document.windows[0])
            return
        state, end = document.swapping, int(active[-1]) + 1
        assert state is not None
        document.windows[number] = own = Window(window.clone(), end)
        windows = {**state.windows, number: own}
        if self._policy.share is not None:
            # What enters is read, so nobody needs states of it.
            document.swapping = replace(state, windows=windows)
            return
        blocks, counts = torch.unique_consecutive(blocks_of(active), return_counts=True)
        states = gathered_states(came, torch.arange(len(active)))
        own_blocks = torch.split(states, counts.tolist(), 1)
        entering = _at(state.entering, number, dict(zip(blocks.tolist(), own_blocks, strict=True)))
        document.swapping = replace(state, entering=entering, windows=windows)

    def step(self, now: Pass, layer: int, given: dict[str, Any]) -> None:
        """Move blocks of the band that begins with a layer, before a decoded token comes there.

        Does nothing in other layers, and for tokens of a prompt.

        Parameters
        ----------
        now
            The pass of that token.
        layer
            Where it is.
        given
            What the pass gives to layers.

        Raises
        ------
        SettingsError
            Where the policy wants what no band may have.
        """
        number, document, state = self._cuts.get(layer), now.document, now.document.swapping
        if number is None or state is None or now.is_prompt or now.tokens != 1:
            return
        if self._policy.share is not None:
            document.swapping = self._attended(now, state, number, given)
            return
        began = time.perf_counter()
        active = wanted = _blocks(document.positions[number], state.tokens)
        last, before = _last_block(state.tokens), document.positions[number - 1]
        # Where nothing was left out there is nothing to choose from.
        if len(active) < (len(_blocks(before, state.tokens)) if number else last + 1):
            candidates = self._candidates(now, state, number, len(active))
            wanted = self._wanted(candidates, active, last)
        decided = time.perf_counter()
        state = replace(
            state,
            steps=state.steps + (number == 0),
            deciding_seconds=state.deciding_seconds + decided - began,
        )
        if wanted != active:
            state = self._swapped(now, state, number, active, wanted, given)
            spent = time.perf_counter() - decided
            state = replace(state, swapping_seconds=state.swapping_seconds + spent)
        document.swapping = state

    def undo(self, now: Pass) -> None:
        """Give layers the rows that they had before a pass that broke off."""
        now.document.swapping = now.held.swapping
        if now.entered:
            # What came behind these goes with the tokens of the pass.
            self._keep(now, now.held.positions[0])
        for number, (keys, values) in now.moved.items():
            layer: Any = now.cache.ordinary().layers[number]
            layer.keys, layer.values = keys, values

    def _wanted(
        self, candidates: frozenset[int], active: frozenset[int], last: int
    ) -> frozenset[int]:
        wanted = self._policy.active(candidates, active)
        if not {0, last} <= wanted <= candidates | active:
            raise SettingsError(
                f"decoding: {type(self._policy).__name__} wants the blocks {sorted(wanted)}: "
                f"return 0, {last} and any of {sorted(candidates | active)}"
            )
        return wanted

    def _attended(self, now: Pass, state: Swapping, number: int, given: dict[str, Any]) -> Swapping:
        """Say which blocks a decoded token attends to, where they lie."""
        began, share = time.perf_counter(), self._policy.share
        assert share is not None
        last, band = _last_block(state.tokens), self._stages.bands[number]
        had, before = _blocks(now.document.positions[number], state.tokens), state.attended[number]
        count = max(2, round(share * (last + 1)))
        # Of a cache that others went on with nobody knows what entered the first cut.
        enters = self.enters and now.document.boundary.tokens >= state.tokens
        if not enters:
            count = min(len(had), count)
        candidates = self._candidates(now, state, number, count, None if enters else had)
        wanted, swapping = self._wanted(candidates, before or candidates, last), 0.0
        if fresh := sorted(wanted - had):
            decided = time.perf_counter()
            self._run_in(now, fresh, band, given)
            swapping = time.perf_counter() - decided
        positions = now.document.positions[number]
        blocks = blocks_of(positions)
        rows = torch.isin(blocks, torch.tensor(sorted(wanted), device=blocks.device))
        rows |= positions >= state.tokens
        now.cache.attend_to(band, rows.nonzero().flatten())
        entered = len(wanted - before) if before else len(fresh)
        return replace(
            state,
            attended=_at(state.attended, number, wanted),
            steps=state.steps + (number == 0),
            swaps=_at(state.swaps, number, state.swaps[number] + (entered > 0)),
            computed=state.computed + len(fresh),
            put_back=state.put_back + entered - len(fresh),
            entered_rows=state.entered_rows + entered * BLOCK_TOKENS * len(band),
            deciding_seconds=state.deciding_seconds + time.perf_counter() - began - swapping,
            swapping_seconds=state.swapping_seconds + swapping,
        )

    def _run_in(self, now: Pass, blocks: list[int], band: range, given: dict[str, Any]) -> None:
        """Run whole blocks through the first band from boundary states; their rows come last.

        Each sees what the band has up to its own tokens, as of a prompt's read.
        """
        document, now.entered = now.document, True
        # The token that comes has no row there yet.
        held, coming = document.positions[0][:-1], document.positions[0][-1:]
        for block in blocks:
            places = _tokens_of([block]).to(held)
            seen = (held < places[0]).nonzero().flatten()
            now.cache.attend_to(band, seen, len(places))
            states = document.boundary.take(places)
            self._stages.enter_behind(states, places, band, now.cache, given)
            held = torch.cat([held, places])
        now.cache.enter(band)
        document.positions[0] = torch.cat([held, coming])
        self._keep(now, held)

    @staticmethod
    def _keep(now: Pass, positions: torch.Tensor) -> None:
        """Say which tokens the band has before those of the pass, in the order of its rows."""
        now.cache.keep([positions], now.before)

    def _candidates(
        self,
        now: Pass,
        state: Swapping,
        number: int,
        count: int,
        among: frozenset[int] | None = None,
    ) -> frozenset[int]:
        """Return the prompt's blocks that rank highest before a cut, as many as `count`.

        Those that are `among` blocks of the prompt alone, where it says so.
        """
        document = now.document
        window = document.windows[number].states
        before = torch.arange(document.length, device=window.device)
        if number:
            before = document.positions[number - 1]
        scores = self._stages.scores(now.cache, number, window, before)
        numbers = torch.unique_consecutive(blocks_of(before))
        # What answers and the window reach into stays; blocks of answers alone take no place.
        last = _last_block(state.tokens)
        if among is not None:
            known = torch.tensor(sorted(among), device=numbers.device)
            others = (numbers <= last) & ~torch.isin(numbers, known)
            scores = scores.masked_fill(others.to(scores.device), -torch.inf)
        reached = min(last, int(before[-window.shape[1]]) // BLOCK_TOKENS)
        of_answers = int((numbers > last).sum())
        forced = int((numbers >= reached).sum())
        stay = numbers[kept_blocks(scores, count + of_answers, forced).to(numbers.device)]
        return frozenset(stay[stay <= last].tolist())

    def _swapped(
        self,
        now: Pass,
        state: Swapping,
        number: int,
        active: frozenset[int],
        wanted: frozenset[int],
        given: dict[str, Any],
    ) -> Swapping:
        """Let a band have other blocks, with its rows in the order of positions."""
        document, band = now.document, self._stages.bands[number]
        layers: list[Any] = now.cache.ordinary().layers[band.start : band.stop]
        # The token that comes has no row there yet.
        held, coming = document.positions[number][:-1], document.positions[number][-1:]
        blocks, rows = blocks_of(held), [(one.keys, one.values) for one in layers]
        now.moved.update(zip(band, rows, strict=True))
        aside = dict(state.aside[number])
        for block in active - wanted - aside.keys():
            aside[block] = _taken(rows, (blocks == block).nonzero().flatten())
        back, fresh = sorted(wanted & aside.keys() - active), sorted(wanted - active - aside.keys())
        leaving = torch.tensor(sorted(active - wanted), device=blocks.device)
        stays = (~torch.isin(blocks, leaving)).nonzero().flatten()
        held = torch.cat([held[stays], _tokens_of(back).to(held)])
        parts = [_taken(rows, stays), *(aside[block] for block in back)]
        for layer, own in zip(layers, zip(*parts, strict=True), strict=True):
            layer.keys, layer.values = (torch.cat(both, -2) for both in zip(*own, strict=True))
        entering = state.entering
        if fresh:
            places = _tokens_of(fresh).to(held)
            states = self._entering(document, state, number, fresh, places)
            out = self._stages.enter(states, places, held, band, given)
            held = torch.cat([held, places])
            if number + 1 < len(entering):
                came = dict(zip(fresh, torch.split(out, BLOCK_TOKENS, 1), strict=True))
                entering = _at(entering, number + 1, {**entering[number + 1], **came})
        order = held.argsort()
        for layer in layers:
            layer.keys, layer.values = layer.keys[..., order, :], layer.values[..., order, :]
        document.positions[number] = torch.cat([held[order], coming])
        return replace(
            state,
            entering=entering,
            aside=_at(state.aside, number, aside),
            swaps=_at(state.swaps, number, state.swaps[number] + 1),
            computed=state.computed + len(fresh),
            put_back=state.put_back + len(back),
            entered_rows=state.entered_rows + len(fresh + back) * BLOCK_TOKENS * len(band),
        )

    def _entering(
        self,
        document: Document,
        state: Swapping,
        number: int,
        blocks: list[int],
        places: torch.Tensor,
    ) -> torch.Tensor:
        """Return states (1, tokens, hidden_size) of whole blocks that enter a band."""
        if not number:
            return document.boundary.take(places)
        return torch.cat([state.entering[number][block] for block in blocks], 1)


def _last_block(tokens: int) -> int:
    return (tokens - 1) // BLOCK_TOKENS


def _blocks(positions: torch.Tensor, tokens: int) -> frozenset[int]:
    """Return the blocks of those positions that lie among the first `tokens`."""
    return frozenset(blocks_of(positions[positions < tokens]).tolist())


def _tokens_of(blocks: list[int]) -> torch.Tensor:
    """Return the positions of whole blocks, int64."""
    starts = torch.tensor(blocks, dtype=torch.int64) * BLOCK_TOKENS
    return (starts[:, None] + torch.arange(BLOCK_TOKENS)).flatten()


def _taken(rows: list[tuple[torch.Tensor, torch.Tensor]], places: torch.Tensor) -> _Rows:
    """Return copies of some rows of each layer."""
    return tuple((keys[..., places, :], values[..., places, :]) for keys, values in rows)


def _at(numbers: tuple[Any, ...], place: int, one: Any) -> tuple[Any, ...]:
    """Return a tuple with another value in one place."""
    return (*numbers[:place], one, *numbers[place + 1 :])
