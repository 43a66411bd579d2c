# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a prompt each layer saw, read from the report of a run and drawn as a map."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hillinfer.errors import HillInferError, SettingsError, reason_of
from hillinfer.pruning.schedule import BLOCK_TOKENS, Schedule
from hillinfer.system.files import read_plain
from hillinfer_bench.figures.canvas import new_figure, plain_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_BYTES = 64 << 20
_MOST_ANSWERS, _MOST_LAYERS, _MOST_TOKENS = 16, 1024, 1 << 24
_MOST_TITLE = 80


class PruneRecordError(HillInferError):
    """A file is no report of a run that read a prompt in stages."""


@dataclass(frozen=True)
class SeenBlocks:
    """What layers saw of the prompt of one answer.

    Parameters
    ----------
    question
        What was asked; empty where the document was the whole prompt.
    schedule
        Of cuts.
    tokens
        Of the prompt.
    seen
        bool (layers, blocks): whether a layer saw a block of 64 tokens.
    """

    question: str
    schedule: str
    tokens: int
    seen: NDArray[np.bool_]

    @property
    def shares(self) -> list[float]:
        """Which part of the blocks each layer saw."""
        return [float(one) for one in self.seen.mean(axis=1)]


def read_seen_blocks(file: Path) -> list[SeenBlocks]:
    """Read what `hillinfer generate --prune --report` wrote, an entry for each answer.

    Raises
    ------
    PruneRecordError
        Where the file cannot be read, is something else, or nothing was pruned.
    """
    try:
        said = json.loads(read_plain(file, _MOST_BYTES))
        answers = said["answers"][:_MOST_ANSWERS]
        found = [_seen(one) for one in answers if one.get("pruned") is not None]
    except OSError as error:
        raise PruneRecordError(f"cannot read {file}: {reason_of(error)}") from error
    except (
        *(ValueError, TypeError, LookupError, AttributeError, RecursionError, SettingsError),
    ) as error:
        raise PruneRecordError(
            f"{file} is no report of hillinfer generate: {error!s:.200}"
        ) from error
    if not found:
        raise PruneRecordError(
            f"{file} is of a run that pruned nothing: give generate --prune, and a long prompt"
        )
    return found


def _seen(answer: dict[str, Any]) -> SeenBlocks:
    read = answer["pruned"]
    tokens, kept = [int(one) for one in read["tokens"]], read["kept"]
    if not 0 < len(tokens) <= _MOST_LAYERS or not 0 < tokens[0] <= _MOST_TOKENS:
        raise ValueError("it names no layers")
    seen = np.zeros((len(tokens), -(-tokens[0] // BLOCK_TOKENS)), bool)
    cuts = Schedule.parse(str(read["schedule"])).cuts
    for layer in range(len(tokens)):
        passed = sum(cut.layer <= layer for cut in cuts)
        blocks = np.asarray(kept[passed - 1] if passed else range(seen.shape[1]), np.int64)
        if blocks.min() < 0 or blocks.max() >= seen.shape[1]:
            raise ValueError("it names blocks that the prompt has not")
        seen[layer, blocks] = True
    return SeenBlocks(str(answer["question"] or ""), str(read["schedule"]), tokens[0], seen)


def prune_figure(found: list[SeenBlocks]) -> Figure:
    """Return a map for each answer: layers over blocks, dark where a layer saw a block."""
    height = 0.8 + 0.08 * found[0].seen.shape[0]
    figure = new_figure(11.0, height * len(found) + 0.6)
    panels = figure.subplots(len(found), 1, squeeze=False)
    for (axes,), one in zip(panels, found, strict=True):
        layers, blocks = one.seen.shape
        axes.imshow(
            one.seen,
            aspect="auto",
            cmap="Blues",
            vmin=0,
            vmax=1.3,
            interpolation="nearest",
            extent=(0, blocks * BLOCK_TOKENS, layers - 0.5, -0.5),
        )
        axes.set_title(plain_text(f"{one.schedule}  {one.question}"[:_MOST_TITLE]), loc="left")
        axes.set_ylabel("layer")
    axes.set_xlabel("position in the prompt, tokens; white: blocks that a layer did not see")
    return figure


def prune_text(found: list[SeenBlocks]) -> str:
    """Return the same as lines."""
    lines = []
    for one in found:
        lines.append(f"{one.schedule}: {one.tokens} tokens {one.question[:_MOST_TITLE]}".rstrip())
        first = 0
        shares = one.shares
        for layer in range(1, len(shares) + 1):
            if layer == len(shares) or shares[layer] != shares[first]:
                lines.append(f"  layers {first} to {layer - 1} saw {shares[first]:.0%} of it")
                first = layer
    return "\n".join(lines)
