# SPDX-License-Identifier: Apache-2.0
"""A rival of the table, in the same runtime."""

from __future__ import annotations

from hillinfer.storage.cold_file import probe_io_mode
from hillinfer_bench.decode.kv_source import Chunk, LastQueries
from hillinfer_bench.decode.setting import BenchSetting
from hillinfer_bench.rivals.rival import Rival
from hillinfer_bench.rivals.rival_cache import RivalCache
from hillinfer_bench.rivals.setup import RivalSetup
from hillinfer_bench.rivals.table import RIVALS, make_rival
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
        return Needs(2 * setting.kv_bytes, 0)

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
        )

    def describe(self) -> str:
        """Return what the rival chose."""
        return self._rival.describe()

    def close(self) -> None:
        """Close the rival."""
        self._rival.close()
