# SPDX-License-Identifier: Apache-2.0
"""The table of systems: HillInfer, rivals, and transformers' own caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from hillinfer.drive.files import probe_io_mode
from hillinfer.errors import SettingsError
from hillinfer.settings import Settings
from hillinfer_bench.rivals.rival import Rival, RivalSetup
from hillinfer_bench.rivals.table import RIVALS, RivalCache, make_rival
from hillinfer_bench.systems.case import BenchSetting
from hillinfer_bench.systems.hillinfer_system import HillInferSystem
from hillinfer_bench.systems.kv_source import Chunk, LastQueries
from hillinfer_bench.systems.system import Counted, Needs, OpenSystem, System


class RivalSystem(System):
    """A rival with the case's budget and importance rate."""

    @property
    def bounded(self) -> bool:
        """Whether the rival keeps M0; see `System`."""
        return RIVALS[self.name].bounded

    @property
    def holds_all(self) -> bool:
        """Whether the rival has no bound, or holds prompts beyond it; see `System`."""
        return RIVALS[self.name].holds_prompt or not RIVALS[self.name].bounded

    def needs(self, setting: BenchSetting) -> Needs:
        """Return the budget and the KV on the drive; in memory, where nothing bounds it, twice."""
        if RIVALS[self.name].holds_prompt:
            return Needs(setting.budget_bytes + setting.kv_bytes, 0)
        if RIVALS[self.name].bounded:
            return Needs(setting.budget_bytes, 2 * setting.kv_bytes)
        return Needs(int(RIVALS[self.name].memory_share() * setting.kv_bytes), 0)

    def open(self, setting: BenchSetting) -> OpenSystem:
        """Return an empty cache that hands everything to the rival; see `System`."""
        case, settings = setting.case, setting.case.settings()
        selections = setting.selections
        setup = RivalSetup(
            shape=setting.shape,
            batch=case.batch,
            context=setting.tokens,
            budget_bytes=setting.budget_bytes,
            alpha=case.alpha,
            cold_dir=setting.cold_dir,
            io=settings.io,
            calls=setting.calls,
            ahead_rows=settings.prefetch_blocks * settings.block_rows,
            threads=settings.io_threads,
            kept_sinks=settings.kept_sinks,
            kept_recent=settings.kept_recent,
            selections=selections.positions if selections else None,
        )
        return _OpenRival(make_rival(self.name, setup), setting)


class _OpenRival(OpenSystem):
    cache: RivalCache

    def __init__(self, rival: Rival, setting: BenchSetting) -> None:
        self.cache = RivalCache(rival)
        self._rival = rival
        self._setting = setting
        self._filled = 0
        # Rivals open their files as HillInfer does: directly, wherever that can be.
        self._io_mode = None
        if rival.bounded:
            self._io_mode = probe_io_mode(setting.cold_dir).value if rival.direct else "paged"

    def fill(self, chunk: Chunk) -> None:
        """Store the rows of every sequence."""
        for layer, (keys, values) in enumerate(zip(chunk.keys, chunk.values, strict=True)):
            for row in range(self._setting.case.batch):
                self.cache.fill(layer, row, keys[row], values[row])
        self._filled += chunk.ids.shape[1]

    def observe(self, queries: LastQueries) -> None:
        """Hand them on, layer by layer."""
        for layer, (own, scaling) in enumerate(zip(queries.layers, queries.scalings, strict=True)):
            for row in range(self._setting.case.batch):
                self.cache.observe(layer, row, own[row], scaling)

    def settle(self) -> None:
        """Wait for reads for the next step, which would run on in another system's turn."""
        self._rival.settle()

    def counted(self) -> Counted:
        """Return the rival's own counts.

        A rival does not count what it reads from memory. Taken is the least it can be: the rows
        that it attends to, and what it ranks by.
        """
        traffic, case = self._rival.traffic(), self._setting.case
        lengths = range(self._filled + 1, self._filled + traffic.steps + 1)
        token = self._rival.attended_token_bytes() + self._rival.scored_token_bytes()
        read = token * sum(lengths) * case.batch
        return Counted(
            traffic.drive_read_bytes,
            traffic.drive_write_bytes,
            int(read),
            traffic.dram_peak_bytes,
            None,
            self._io_mode,
            traffic.drive_reads,
        )

    def describe(self) -> str:
        """Return what the rival chose."""
        return self._rival.describe()

    def close(self) -> None:
        """Close the rival."""
        self._rival.close()


class StockSystem(System):
    """A cache of transformers in memory, attended to by its SDPA.

    Parameters
    ----------
    name
        In the table of systems.
    make
        Makes the cache.
    most_tokens
        Tokens of the context that it is filled with; None for all. One token alone shows the floor
        of the loop: what the model costs without a context.
    """

    def __init__(
        self, name: str, make: Callable[[BenchSetting], Any], most_tokens: int | None = None
    ) -> None:
        super().__init__(name)
        self._make = make
        self._most_tokens = most_tokens

    @property
    def holds_all(self) -> bool:
        """Whether it is filled with the whole context; see `System`."""
        return self._most_tokens is None

    def needs(self, setting: BenchSetting) -> Needs:
        """Return the KV in the model's type, twice: a dynamic cache is copied to grow."""
        if self._most_tokens is not None:
            return Needs(0, 0)
        return Needs(setting.kv_bytes * setting.model.dtype.itemsize, 0)

    def open(self, setting: BenchSetting) -> OpenSystem:
        """Return an empty cache."""
        return _OpenStock(setting, self._make(setting), self._most_tokens)


def dynamic_cache(setting: BenchSetting) -> Any:
    """Return a cache that grows by concatenation, transformers' default."""
    from transformers import DynamicCache

    return DynamicCache(config=setting.model.config)


def static_cache(setting: BenchSetting) -> Any:
    """Return a preallocated cache."""
    from transformers import StaticCache

    return StaticCache(config=setting.model.config, max_cache_len=setting.tokens)


class _OpenStock(OpenSystem):
    def __init__(self, setting: BenchSetting, cache: Any, most_tokens: int | None) -> None:
        self.cache = cache
        self._setting = setting
        self._left = setting.tokens if most_tokens is None else most_tokens
        self._steps_start: int | None = None

    def fill(self, chunk: Chunk) -> None:
        """Take tokens, in the model's type."""
        count = min(self._left, chunk.ids.shape[1])
        self._left -= count
        if count:
            dtype = self._setting.model.dtype
            for layer, (keys, values) in enumerate(zip(chunk.keys, chunk.values, strict=True)):
                self.cache.update(
                    keys[:, :, :count].to(dtype), values[:, :, :count].to(dtype), layer
                )
        self._steps_start = self._tokens

    def counted(self) -> Counted:
        """Return the whole KV for each step."""
        token = self._setting.case.batch * self._setting.shape.token_bytes
        token = token * self._setting.model.dtype.itemsize // 2
        start = self._steps_start or 0
        read = sum(range(start + 1, self._tokens + 1)) * token
        return Counted(0, 0, read, self._tokens * token)

    def close(self) -> None:
        """Drop the cache."""
        self.cache = None

    @property
    def _tokens(self) -> int:
        return int(self.cache.get_seq_length())


HILLINFER, IN_MEMORY, FLOOR = "hillinfer", "hillinfer-in-memory", "floor"
IN_MEMORY_TRUE = "hillinfer-in-memory-true"
# What selects by the product's default, exact and coded, whichever α a case has; in memory with the
# true query, as there is nothing to read ahead.
CODED, CODED_IN_MEMORY = "hillinfer-coded", "hillinfer-coded-in-memory"
_SPLIT = {"exact": Settings().exact_share, "exact_floor": Settings().exact_floor}
# Caches that take steps together, and one after another: rows of a case of their own.
JOINED, ALONE = "hillinfer-joined", "hillinfer-alone"
STOCK = ("transformers-dynamic", "transformers-static")
# Any full cache computes the same logits up to rounding; the first that was measured is compared
# with.
REFERENCES = ("transformers-dynamic", "full-memory", "full-drive")
# From nothing to everything (the paper's figure 16a): scores in one block and no pool but the
# most recent rows; scores in blocks, merged as they come; pools; queries predicted.
_NONE = {"block_tokens": 65_536, "pool_policy": "recent", "query": "true"}
ABLATION = ("hillinfer-none", "hillinfer-hie", "hillinfer-bkp", "hillinfer-app")

_OWN: Mapping[str, System] = MappingProxyType(
    {
        system.name: system
        for system in (
            HillInferSystem(HILLINFER),
            HillInferSystem(IN_MEMORY, memory_kv=1.5),
            # With nothing to read ahead, predicting costs time and changes the selection.
            HillInferSystem(IN_MEMORY_TRUE, {"query": "true"}, memory_kv=1.5),
            HillInferSystem(CODED, _SPLIT),
            HillInferSystem(CODED_IN_MEMORY, {**_SPLIT, "query": "true"}, memory_kv=1.5),
            HillInferSystem("hillinfer-none", _NONE),
            HillInferSystem("hillinfer-hie", {"pool_policy": "recent", "query": "true"}),
            HillInferSystem("hillinfer-bkp", {"query": "true"}),
            HillInferSystem("hillinfer-app", {"query": "predicted"}),
            StockSystem(FLOOR, dynamic_cache, most_tokens=1),
            *(
                StockSystem(name, make)
                for name, make in zip(STOCK, (dynamic_cache, static_cache), strict=True)
            ),
        )
    }
)


def system_names() -> tuple[str, ...]:
    """Return the names of all systems."""
    return (*_OWN, *RIVALS)


def selects(name: str) -> bool:
    """Return whether a system attends to a part of the context."""
    return name not in (FLOOR, *STOCK) and not name.startswith(("full-", "four-bit", "five-bit"))


def make_system(name: str) -> System:
    """Return a system by its name.

    Raises
    ------
    SettingsError
        Where there is none of that name.
    """
    if name in RIVALS:
        return RivalSystem(name)
    if name not in _OWN:
        raise SettingsError(f"system={name!r}: choose one of {', '.join(system_names())}")
    return _OWN[name]
