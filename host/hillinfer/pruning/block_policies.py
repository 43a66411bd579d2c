# SPDX-License-Identifier: Apache-2.0
"""Policies of which prompt blocks a band has, or its layers attend to, while decoding.

A policy overrides `Decoding.active` and gets a line in `DECODINGS`. SlimInfer, algorithm 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from hillinfer.errors import SettingsError

# SlimInfer, implementation details: the least overlap at which nothing moves.
PAPER_GAMMA = 0.9


class Decoding(ABC):
    """Says which of a prompt's blocks a band has while tokens are decoded.

    Attributes
    ----------
    moves
        Whether it may say anything but what the prompt's read kept.
    enters
        Whether it may want blocks that a band does not have where rows stay in their place: they
        run through it.
    share
        Of the prompt's blocks, how many decoded tokens are to attend to, where rows stay in their
        place; None where a band has what is said, and nothing else.
    """

    moves: ClassVar[bool] = True
    enters: ClassVar[bool] = False
    share: float | None = None

    @abstractmethod
    def active(self, candidates: frozenset[int], active: frozenset[int]) -> frozenset[int]:
        """Return the blocks that a band has from a decoded token on.

        Parameters
        ----------
        candidates
            Numbers of the prompt's blocks that rank highest before the cut, as many as the band
            has; the first one and those that the last tokens reach into are among them.
        active
            Numbers of those that the band has.

        Returns
        -------
        Blocks of these two sets: the prompt's first and last one, and any others.
        """


class Keep(Decoding):
    """What the prompt's read kept, until the next prompt."""

    moves = False

    def active(self, candidates: frozenset[int], active: frozenset[int]) -> frozenset[int]:
        """Return what the band has; see `Decoding`."""
        return active


class Swap(Decoding):
    """SlimInfer's KV manager: all candidates, once too few of them are there (algorithm 1).

    Parameters
    ----------
    gamma
        The least share of the candidates that a band has at which nothing moves, above 0, up to 1.

    Raises
    ------
    SettingsError
        Where it is none.
    """

    def __init__(self, gamma: float = PAPER_GAMMA) -> None:
        if not 0 < gamma <= 1:
            raise SettingsError(
                f'decoding="swap:{gamma:g}": give a share of the candidates above 0 and up to 1, '
                f"such as swap:{PAPER_GAMMA}"
            )
        self._gamma = gamma

    def active(self, candidates: frozenset[int], active: frozenset[int]) -> frozenset[int]:
        """Return what the band has, or the candidates; see `Decoding`."""
        overlap = len(candidates & active) / len(candidates)
        return active if overlap >= self._gamma else candidates


class Blocks(Swap):
    """The same rule for rows that stay on a drive: a share of the blocks is attended to, whole.

    Parameters
    ----------
    share
        Of the prompt's blocks, above 0 and below 1.
    gamma
        As of `Swap`.

    Raises
    ------
    SettingsError
        Where either is none.
    """

    def __init__(self, share: float, gamma: float = PAPER_GAMMA) -> None:
        super().__init__(gamma)
        if not 0 < share < 1:
            raise SettingsError(
                f"decoding: {share:g} of the prompt's blocks: give a share of them above 0 and "
                "below 1, such as blocks:10%"
            )
        self.share = share


class Enter(Blocks):
    """The same, of all of the prompt's blocks: what the read dropped runs through the band first.

    Parameters and errors as of `Blocks`.
    """

    enters = True


# Made of the numbers behind the name.
DECODINGS: MappingProxyType[str, Callable[..., Decoding]] = MappingProxyType(
    {"keep": Keep, "swap": Swap, "blocks": Blocks, "enter": Enter}
)


def make_decoding(text: str) -> Decoding:
    """Return the policy that a text names: `keep`, `swap:0.8` with its gamma, `blocks:10%`, ...

    Raises SettingsError where it names none.
    """
    name, *given = text.split(":")
    unknown = SettingsError(
        f"decoding={text!r}: choose one of {', '.join(DECODINGS)}, or swap:{PAPER_GAMMA} with the "
        "least share of wanted blocks at which nothing moves, or blocks:10% or enter:10% with the "
        "share of blocks that is attended to"
    )
    try:
        numbers = [_number(one) for one in given]
    except ValueError as error:
        raise unknown from error
    try:
        return DECODINGS[name](*numbers)
    except (KeyError, TypeError) as error:
        raise unknown from error


def _number(text: str) -> float:
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


# --- what they did ---


@dataclass(frozen=True)
class DecodedBlocks:
    """What decoding did with the blocks of a prompt.

    Parameters
    ----------
    steps
        Decoded tokens so far.
    swaps
        At how many of them blocks moved, at each cut.
    computed, put_back
        Blocks that entered a band for the first time, and those that it had before; where rows stay
        in their place, those that a token attends to and the one before it did not.
    entered_rows
        Rows of both, one for each token and layer of the band.
    deciding_seconds, swapping_seconds
        Ranking blocks, and moving and computing them.
    aside_bytes
        Of rows that left, and of states that enter later bands; without boundary states.
    active
        Numbers of the prompt's blocks that each band has, or that the last token attended to,
        ascending.
    """

    steps: int
    swaps: tuple[int, ...]
    computed: int
    put_back: int
    entered_rows: int
    deciding_seconds: float
    swapping_seconds: float
    aside_bytes: int
    active: tuple[tuple[int, ...], ...]

    def as_json(self) -> dict[str, Any]:
        """Return it by name, as a report has it."""
        return {**vars(self), "swaps": [*self.swaps], "active": [[*one] for one in self.active]}
