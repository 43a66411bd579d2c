# SPDX-License-Identifier: Apache-2.0
"""The table of rivals, and the cache that lets a model decode through one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from hillinfer.engine.queries import Prediction
from hillinfer.errors import CacheUseError, SettingsError, UnsupportedFeatureError
from hillinfer.hf.attention import AttachedCache, HillInferLayer
from hillinfer.hf.engine import Use
from hillinfer.trace.recorder import SILENT, ForwardSpans
from hillinfer_bench.rivals.few_bits.rivals import (
    FiveBitDrive,
    FiveBitMemory,
    FourBitDrive,
    FourBitMemory,
)
from hillinfer_bench.rivals.full import FullDrive, FullMemory
from hillinfer_bench.rivals.full_swap import FullSwap
from hillinfer_bench.rivals.h2o import H2OAllKeys, H2ODrop
from hillinfer_bench.rivals.infinigen import InfiniGen
from hillinfer_bench.rivals.paged import LeoAM, Quest
from hillinfer_bench.rivals.rival import Rival, RivalSetup


class RivalCache(AttachedCache):
    """Decodes through a rival; pass it as `past_key_values` to a model that HillInfer is on.

    Made for decode alone: the prompt's keys and values come by `fill`, from a prefill with any
    other cache, and every forward pass brings one token per sequence. A forward pass that breaks
    off leaves the cache unusable.

    Parameters
    ----------
    rival
        Empty, or filled alike in all layers; the caller closes it.
    """

    def __init__(self, rival: Rival) -> None:
        shape = rival.setup.shape
        super().__init__(layers=[HillInferLayer(self, layer) for layer in range(shape.layers)])
        self.rival = rival
        # Rivals are not traced.
        self.spans = ForwardSpans(SILENT)
        self._under_way = False
        self._use: Use | None = None

    def fill(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take more of a prompt; see `Rival.fill`, but in any type and on any device."""
        self.rival.fill(layer, row, self._stored(keys), self._stored(values))

    def observe(self, layer: int, row: int, queries: torch.Tensor, scaling: float) -> None:
        """Show the prompt's last queries, once all of it came; see `Rival.observe`."""
        self.rival.observe(layer, row, queries.detach().float().cpu(), scaling)

    def index_length(self, layer: int) -> int:
        """Return the tokens of a layer; all sequences have as many."""
        return self.rival.lengths[layer][0]

    def check_continues(self, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Refuse full ids that bring more, or less, than one new token."""
        if ids.shape[1] != self.index_length(0) + 1:
            raise CacheUseError(
                f"{ids.shape[1]} ids for a rival that holds {self.index_length(0)} tokens: give "
                "generate the prompt's ids and one more"
            )

    def begin_generate(self, use: Use) -> Use | None:
        """Do nothing: a rival is used by one thread."""

    def end_generate(self, around: Use | None) -> None:
        """Do nothing."""

    def begin_forward(self, ids: torch.Tensor, mask: torch.Tensor | None, use: Use) -> None:
        """Begin a decode step; refuse anything but one token of each sequence, unpadded."""
        if self._under_way:
            raise CacheUseError("a forward pass broke off in this rival: make another and fill it")
        batch, tokens = ids.shape
        if tokens != 1:
            raise CacheUseError(
                f"{tokens} tokens in one forward pass: a rival only decodes; prefill with an "
                "ordinary cache, hand its keys and values to RivalCache.fill, then give one token "
                "at a time"
            )
        if batch != self.rival.setup.batch:
            raise CacheUseError(
                f"{batch} sequences for a rival made with batch={self.rival.setup.batch}"
            )
        if len({length for layer in self.rival.lengths for length in layer}) != 1:
            raise CacheUseError(
                "layers or sequences of this rival hold different numbers of tokens: fill all of "
                "them alike"
            )
        if mask is not None and not bool(mask.all()):
            raise UnsupportedFeatureError(
                "padding: sequences of a rival are equally long; leave attention_mask out"
            )
        self._under_way = True
        # Held weakly by whoever asks for it.
        self._use = use
        self.rival.begin_step()

    def end_forward(self) -> None:
        """Learn that the step got through."""
        self._under_way = False
        self._use = None

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append one token of each sequence, (batch, kv_heads, 1, head_dim)."""
        if not self._under_way:
            raise CacheUseError(
                "this cache was not told about the forward pass: call the model that was attached, "
                "not a part of it"
            )
        keys, values = self._stored(keys), self._stored(values)
        for row in range(self.rival.setup.batch):
            self.rival.append(layer, row, keys[row], values[row])

    def predict(self, layer: int, query: torch.Tensor, scaling: float) -> None:
        """Hand a layer's approximate queries on; see `Rival.predict`."""
        self.rival.predict(layer, query, scaling)

    @property
    def takes_predictions(self) -> bool:
        """Whether the rival does anything with them."""
        return self.rival.wants_prediction

    def announce(self, layer: int, predicted: Prediction, scaling: float) -> None:
        """Hand on what the model's hooks predicted; see `predict`."""
        self.predict(layer, predicted.queries(), scaling)

    def attend(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend with one query of each sequence; see `AttachedCache`."""
        attended = [self.rival.attend(layer, row, query[row], scaling) for row in range(len(query))]
        return torch.stack(attended).transpose(1, 2).contiguous()

    @property
    def batch_size(self) -> int:
        """Sequences of the rival."""
        return self.rival.setup.batch

    def _stored(self, states: torch.Tensor) -> torch.Tensor:
        return self.rival.layout.round(states.detach())[0].cpu()


RIVALS: Mapping[str, type[Rival]] = MappingProxyType(
    {
        "full-memory": FullMemory,
        "full-drive": FullDrive,
        "full-swap": FullSwap,
        "four-bit-memory": FourBitMemory,
        "four-bit-drive": FourBitDrive,
        "five-bit-memory": FiveBitMemory,
        "five-bit-drive": FiveBitDrive,
        "h2o-all-keys": H2OAllKeys,
        "infinigen": InfiniGen,
        "leoam": LeoAM,
        "quest": Quest,
        "h2o-drop": H2ODrop,
    }
)


def make_rival(name: str, setup: RivalSetup) -> Rival:
    """Return a rival by its name.

    Raises
    ------
    SettingsError
        Where there is none of that name.
    BudgetError, ColdPoolError
        As `Rival` says.
    """
    if name not in RIVALS:
        raise SettingsError(f"rival={name!r}: choose one of {', '.join(RIVALS)}")
    return RIVALS[name](setup)
