# SPDX-License-Identifier: Apache-2.0
"""Pruning schedules: at which layers a prompt loses blocks, how many, and what that may save."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hillinfer.errors import SettingsError
from hillinfer_model.kernel_spec import GROUP_TOKENS

# Of one pruned unit (SlimInfer section 3.2); a group of rows, too.
BLOCK_TOKENS = GROUP_TOKENS
_CUT = re.compile(r"(\d+):(?:(mass=)?(\d+(?:\.\d+)?)%|(\d+))")
# The first block and the last one, at least: a prompt of no more loses none.
_FORCED_BLOCKS = 2
# SlimInfer, implementation details: budgets of 8k, 4k, 2k and 12k, 6k, 4k. The tenth layer decides,
# so layer 10, counted from 0, is the first with fewer tokens; its table 2 comes out so.
PAPER = MappingProxyType(
    {
        "llama-3.1-8b": "10:8192,20:4096,30:2048",
        "qwen2.5-7b": "9:12288,18:6144,26:4096",
    }
)

# Rules by which blocks are chosen, `rankers.RANKERS`; here, where torch need not be loaded.
RANKER_NAMES = ("weights", "paper", "average", "max", "token", "recent", "random")


@dataclass(frozen=True)
class Cut:
    """One layer from which on fewer tokens are left.

    Parameters
    ----------
    layer
        The first that sees fewer, counted from 0; the layer before it decides.
    share
        Of the prompt, above 0 and up to 1; None where another says it.
    tokens
        Most tokens of the prompt; None where another says it.
    mass
        Of the weights that the layer that decides gives to what is left, above 0 and up to 1: as
        many blocks stay as hold it. None where another says it.
    """

    layer: int
    share: float | None = None
    tokens: int | None = None
    mass: float | None = None

    def __post_init__(self) -> None:
        if self.layer < 1:
            raise SettingsError(
                f"prune={self}: layer {self.layer} has no layer before it that could decide; "
                "cut from layer 1 on"
            )
        if sum(one is not None for one in (self.share, self.tokens, self.mass)) != 1:
            raise SettingsError(
                f"prune: the cut at layer {self.layer} keeps share={self.share}, "
                f"tokens={self.tokens}, mass={self.mass}: give one of the three"
            )
        for part in (self.share, self.mass):
            if part is not None and not 0 < part <= 1:
                raise SettingsError(f"prune={self}: keep more than 0 % and at most 100 %")
        if self.tokens is not None and self.tokens < BLOCK_TOKENS:
            raise SettingsError(f"prune={self}: keep {BLOCK_TOKENS} tokens at least, one block")

    def __str__(self) -> str:
        kept = f"{100 * self.share:g}%" if self.share is not None else str(self.tokens)
        if self.mass is not None:
            kept = f"mass={100 * self.mass:g}%"
        return f"{self.layer}:{kept}"

    @property
    def weighs(self) -> bool:
        """Whether weights say how many blocks stay, so that nobody knows before they are there."""
        return self.mass is not None and self.mass < 1

    def blocks_of(self, blocks: int) -> int:
        """Return how many of a prompt's blocks stay, one at least; at most, where it `weighs`."""
        if self.share is not None:
            return max(1, round(self.share * blocks))
        if self.mass is not None:
            return blocks
        assert self.tokens is not None
        return min(blocks, self.tokens // BLOCK_TOKENS)


@dataclass(frozen=True)
class Schedule:
    """All cuts of one model, in the order of layers.

    Parameters
    ----------
    cuts
        One at least; layers rise, and what is kept does not.

    Raises
    ------
    SettingsError
        Where they do not.
    """

    cuts: tuple[Cut, ...]

    def __post_init__(self) -> None:
        if not self.cuts:
            raise SettingsError("prune: name one cut at least, such as 15:50%")
        for before, cut in zip(self.cuts, self.cuts[1:], strict=False):
            if cut.layer <= before.layer:
                raise SettingsError(
                    f"prune={self}: layer {cut.layer} comes after layer {before.layer}; layers of "
                    "cuts must rise"
                )
            grows = (cut.share or 0) > (before.share or 1)
            if grows or (cut.tokens or 0) > (before.tokens or cut.tokens or 0):
                raise SettingsError(
                    f"prune={self}: {cut} keeps more than {before}; what is gone does not return"
                )

    def __str__(self) -> str:
        return ",".join(map(str, self.cuts))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Return what a text says: `15:50%`, `10:8192,20:4096`, `15:mass=95%`, or a name in print.

        Parameters
        ----------
        text
            Cuts, each a layer and what is kept from there on; or a name in `PAPER`.

        Raises
        ------
        SettingsError
            Where it says nothing of the kind.
        """
        cuts = []
        for part in PAPER.get(text, text).split(","):
            found = _CUT.fullmatch(part.strip())
            if found is None:
                raise SettingsError(
                    f"prune={text!r}: {part.strip()!r} is no cut; write LAYER:SHARE%, LAYER:TOKENS "
                    f"or LAYER:mass=SHARE%, such as 15:50%, or one of {', '.join(PAPER)}"
                )
            layer, mass, share, tokens = found.groups()
            if share is None:
                cuts.append(Cut(int(layer), tokens=int(tokens)))
            else:
                kept = float(share) / 100
                cuts.append(
                    Cut(int(layer), share=kept) if mass is None else Cut(int(layer), mass=kept)
                )
        return cls(tuple(cuts))

    def check_layers(self, layers: int) -> None:
        """Refuse cuts behind a model's last layer; raises SettingsError."""
        last = self.cuts[-1].layer
        if last >= layers:
            raise SettingsError(
                f"prune={self}: the model has layers 0 to {layers - 1}, so nothing is left to cut "
                f"at {last}"
            )

    def kept_blocks(self, tokens: int) -> list[int]:
        """Return how many blocks of a prompt each cut keeps, never more than the one before it.

        Of a cut that weighs it is the most that it may keep.
        """
        blocks = -(-tokens // BLOCK_TOKENS)
        kept = []
        for cut in self.cuts:
            blocks = min(blocks, cut.blocks_of(-(-tokens // BLOCK_TOKENS)))
            kept.append(blocks)
        return kept

    def prunes(self, tokens: int) -> bool:
        """Whether a prompt is long enough that any cut drops a block of it, or may by weights."""
        blocks = -(-tokens // BLOCK_TOKENS)
        may = blocks > _FORCED_BLOCKS and any(cut.weighs for cut in self.cuts)
        return may or self.kept_blocks(tokens)[-1] < blocks

    def band_tokens(self, tokens: int, layers: int) -> list[int]:
        """Return the prompt's tokens in each layer; behind a cut that weighs, the most."""
        found, at = [], tokens
        kept = dict(zip((cut.layer for cut in self.cuts), self.kept_blocks(tokens), strict=True))
        for layer in range(layers):
            if layer in kept:
                at = min(at, kept[layer] * BLOCK_TOKENS)
            found.append(at)
        return found


@dataclass(frozen=True)
class LayerWork:
    """What one decoder layer computes.

    Parameters
    ----------
    weights
        Of its linear layers, all of which every token meets.
    width
        Query heads times head_dim.
    """

    weights: int
    width: int

    def flops(self, tokens: Sequence[int]) -> float:
        """Return the floating-point operations of reading so many tokens in each layer.

        The model's head is computed for one token and left out.
        """
        # A token attends to half of the others on average: products with keys, sums of values.
        return sum(2.0 * self.weights * one + 2.0 * self.width * one * one for one in tokens)

    def entering(self, tokens: int, among: int) -> float:
        """Return the operations of so many tokens, which come evenly among as many in a layer.

        Parameters
        ----------
        tokens
            That enter.
        among
            That are there then, those that enter included.
        """
        return 2.0 * self.weights * tokens + 2.0 * self.width * tokens * among

    def limit(self, schedule: Schedule, tokens: int, layers: int) -> float:
        """Return by how much a schedule may make reading faster: operations without it over with.

        Where a cut weighs it is the least that it allows, as if that cut kept all that it may;
        `PrunedRead.flop_limit` says it of a prompt that was read.

        Parameters
        ----------
        schedule
            Of cuts.
        tokens, layers
            Of the prompt and of the model.
        """
        dense = self.flops([tokens] * layers)
        return dense / self.flops(schedule.band_tokens(tokens, layers))
