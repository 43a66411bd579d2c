# SPDX-License-Identifier: Apache-2.0
"""Profiles how long one layer of a model's shape computes, on the grid that schedules go by."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from hillinfer.doctor.finding import Finding, Verdict
from hillinfer.engine.runtime import Runtime
from hillinfer.hf.attach import Attachment
from hillinfer.schedule.kept_windows import (
    DENSE_PASSES,
    PASSES_IN_MEMORY,
    KeptWindows,
    WindowKey,
    single_passes,
)
from hillinfer.schedule.windows import NEW_TOKENS, PREFIX_TOKENS, SlackTable
from hillinfer.settings import Settings
from hillinfer.system.machine import MemoryFacts, ProcessorFacts
from hillinfer.values import format_bytes
from hillinfer_model.kernel_spec import GROUP_TOKENS

if TYPE_CHECKING:
    from hillinfer.doctor.profile import ModelFigures

# A window lies between two layers.
_LAYERS = 2
_WORDS = 64
# What takes less is timed twice.
_BRIEF_SECONDS = 0.5
# About how long it may take: points that would take longer stay unknown.
_MOST_SECONDS = 30.0

Point = tuple[int, int]


class LayerTiming:
    """Times passes of two layers with random weights over caches with random rows.

    The layers are of the model that `figures` are of; the settings are those of caches on a drive.
    """

    def __init__(self, figures: ModelFigures, settings: Settings) -> None:
        self._model = _model(figures)
        self._settings = settings
        self._heads = figures.kv_heads, figures.head_dim

    @contextmanager
    def in_memory(self, before: int) -> Iterator[Callable[[int], float]]:
        """Yield what returns seconds of a layer for new tokens, behind so many in memory."""
        cache = DynamicCache()
        for layer in range(_LAYERS if before else 0):
            cache.update(*self._states(before), layer)

        yield partial(self._layer_seconds, cache)

    @contextmanager
    def on_drive(
        self, before: int
    ) -> Iterator[tuple[Callable[[int], float], Callable[[int], float]]]:
        """Yield the same of the time between two layers' reads, and of a token by itself."""
        opened: list[Runtime] = []

        def open_runtime(*args: Any, **given: Any) -> Runtime:
            opened.append(Runtime(*args, **given))
            return opened[-1]

        with Attachment(self._model, self._settings, open_runtime=open_runtime) as hill:
            cache = hill.new_cache(before + 2 * max(NEW_TOKENS))
            if before:
                ids = torch.zeros(1, before, dtype=torch.int64)
                keys, values = self._states(before)
                cache.fill(ids, [keys] * _LAYERS, [values] * _LAYERS)

            def window(tokens: int) -> float:
                # A pass of one token selects; what one would take densely, two nearly do.
                tokens = max(2, tokens)
                counts = opened[-1].parts.windows.counts
                was = counts()
                self._pass(cache, tokens)
                cache.crop(-tokens)
                now = counts()
                number = now["windows"] - was["windows"]
                return (now["window_seconds"] - was["window_seconds"]) / max(1, number)

            yield window, partial(self._layer_seconds, cache)
            cache.close()

    def _layer_seconds(self, cache: Any, tokens: int) -> float:
        taken = self._pass(cache, tokens) / _LAYERS
        cache.crop(-tokens)
        return taken

    def _pass(self, cache: Any, tokens: int) -> float:
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        started = time.perf_counter()
        with torch.no_grad():
            self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - started

    def _states(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (1, self._heads[0], tokens, self._heads[1])
        kind = self._model.dtype
        return torch.randn(shape, dtype=kind), torch.randn(shape, dtype=kind)


def _model(figures: ModelFigures) -> Any:
    shared = {
        "hidden_size": figures.hidden,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": figures.query_heads,
        "vocab_size": _WORDS,
        "max_position_embeddings": max(PREFIX_TOKENS) + 2 * max(NEW_TOKENS),
    }
    if figures.family == "opt":
        config: Any = OPTConfig(ffn_dim=figures.inner, word_embed_proj_dim=figures.hidden, **shared)
        made: Any = OPTForCausalLM(config)
    else:
        config = LlamaConfig(
            intermediate_size=figures.inner,
            num_key_value_heads=figures.kv_heads,
            head_dim=figures.head_dim,
            **shared,
        )
        made = LlamaForCausalLM(config)
    return made.to(_number_type()).eval()


def _number_type() -> torch.dtype:
    """Return what models compute in here unless somebody says otherwise."""
    return torch.bfloat16 if ProcessorFacts.read().fast_bfloat16 else torch.float32


@dataclass(frozen=True)
class _Turns:
    """Time that is left, and among how many it is shared."""

    end: float
    shares: int

    def own(self) -> float:
        """Return when the next share ends."""
        now = time.perf_counter()
        return now + max(0.0, self.end - now) / self.shares

    def following(self) -> _Turns:
        return replace(self, shares=max(1, self.shares - 1))


class WindowProfile:
    """Measures the points of a model's tables that nobody knows, and keeps them in `kept`.

    Passes of real runs correct them from then on. Rows of caches on a drive lie in `cold_dir`;
    `tokens` is the longest prefix that is measured.
    """

    def __init__(
        self, kept: KeptWindows, figures: ModelFigures, cold_dir: Path, tokens: int
    ) -> None:
        self._kept, self._figures = kept, figures
        # Windows lie between reads, whatever the budget leaves to be read.
        self._settings = Settings().changed(cold_dir=cold_dir)
        self._prefixes = [one for one in PREFIX_TOKENS if one <= tokens]
        shape = figures.whole_kv_shape(2 * tokens)
        kinds = (PASSES_IN_MEMORY, DENSE_PASSES, single_passes(cold_dir))
        self._keys = [WindowKey.of(torch.get_num_threads(), kind, shape) for kind in kinds]
        self._points: list[dict[Point, float]] = [
            {} if (table := kept.table(key)) is None else _points(table) for key in self._keys
        ]

    def finding(self, name: str) -> Finding:
        """Measure and keep what is unknown; `name` is the model's."""
        wanted = [self._unknown(kind, before) for kind in range(3) for before in self._prefixes]
        unknown = sum(map(len, wanted))
        weights = _LAYERS * self._figures.layer_weights * _number_type().itemsize
        started = time.perf_counter()
        if unknown:
            if 2 * weights > MemoryFacts.read().available_bytes:
                found = f"two layers of {name} take {format_bytes(weights)}: too much to profile"
                return Finding("compute windows", Verdict.OPTIONAL, found)
            self._measure(started + _MOST_SECONDS)
            self._keep()
        left = sum(
            len(self._unknown(kind, before)) for kind in range(3) for before in self._prefixes
        )
        return Finding("compute windows", Verdict.OK, self._text(name, unknown - left, left))

    def longest_in_memory(self, new_tokens: int) -> tuple[int, float] | None:
        """Return the longest prefix that a pass is known behind, and seconds of one layer there.

        None where no pass of so many tokens is known behind any, in a cache in memory.
        """
        points = self._points[0]
        known = [before for before in self._prefixes if before and (new_tokens, before) in points]
        return (known[-1], points[new_tokens, known[-1]]) if known else None

    # --- inside ----------------------------------------------------------------------------

    def _text(self, name: str, measured: int, left: int) -> str:
        before = self._prefixes[-1]
        times = [
            f"{1e3 * points[new, before]:.2f} ms {what}"
            for points, new, what in zip(
                self._points,
                (64, 64, 1),
                (
                    "for 64 new tokens in memory",
                    "between two layers' reads of 64",
                    "for a token by itself",
                ),
                strict=True,
            )
            if (new, before) in points
        ]
        return (
            f"a layer of {name} behind {before} tokens takes "
            f"{', '.join(times) or 'longer than was measured'} ({_LAYERS} layers, random weights, "
            f"{str(_number_type()).removeprefix('torch.')}); {measured} points measured now, "
            f"{left} left to running passes, which correct the others, too"
        )

    def _unknown(self, kind: int, before: int) -> Sequence[int]:
        """Return new tokens of points that nobody knows, ascending."""
        new = (1,) if kind == 2 else NEW_TOKENS
        return [one for one in new if (one, before) not in self._points[kind]]

    def _measure(self, end: float) -> None:
        timing = LayerTiming(self._figures, self._settings)
        turns = _Turns(end, 3 * len(self._prefixes))
        for before in self._prefixes:
            with timing.in_memory(before) as seconds:
                self._time(0, before, seconds, turns.own())
            turns = turns.following()
            # One token alone has something to select from.
            with timing.on_drive(before or GROUP_TOKENS) as (_, single):
                self._time(2, before, single, turns.own())
            turns = turns.following()
            with timing.on_drive(before) as (window, _):
                self._time(1, before, window, turns.own())
            turns = turns.following()

    def _time(self, kind: int, before: int, seconds: Callable[[int], float], end: float) -> None:
        """Time points until there is no time for the next one, which takes longer."""
        last = 0.0
        for new in self._unknown(kind, before):
            started = time.perf_counter()
            if started + last * new > end:
                return
            taken = seconds(new)
            if time.perf_counter() - started < _BRIEF_SECONDS:
                taken = min(taken, seconds(new))
            self._points[kind][new, before] = taken
            # Of a token, as far as time goes with them.
            last = (time.perf_counter() - started) / new

    def _keep(self) -> None:
        for key, points in zip(self._keys, self._points, strict=True):
            if points:
                table = SlackTable.measured(partial(_known, points))
                self._kept.keep(key, table)


def _known(points: dict[Point, float], new: int, before: int) -> float:
    """Return what is known of a point, NaN where nothing is."""
    return points.get((new, before), math.nan)


def _points(table: SlackTable) -> dict[Point, float]:
    """Return the points of a table that are known."""
    return {
        (new, before): seconds
        for new in NEW_TOKENS
        for before in PREFIX_TOKENS
        if (seconds := table.window(new, before)) is not None
    }
