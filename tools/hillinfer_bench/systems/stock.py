# SPDX-License-Identifier: Apache-2.0
"""transformers' own caches, as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hillinfer_bench.decode.kv_source import Chunk
from hillinfer_bench.decode.setting import BenchSetting
from hillinfer_bench.systems.system import Counted, Needs, OpenSystem, System


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
