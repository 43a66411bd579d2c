# SPDX-License-Identifier: Apache-2.0
"""Options of placement: a document's forms on tiers, and the utility of one use of each."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hillinfer.errors import SettingsError

# --- Tiers and options ---


@dataclass(frozen=True)
class Tier:
    """A place for forms, like DRAM or a drive.

    Parameters
    ----------
    name
        Like `dram`.
    budget
        Bytes that forms may take there; None for any number.
    """

    name: str
    budget: int | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and self.budget < 0:
            raise SettingsError(f"tier {self.name}: a budget of {self.budget} bytes is below 0")


ON_DRIVE = "drive-"
"""How names of forms begin that lie packed on the first drive; the form in memory follows."""


def on_drive(form: str, drive: int = 1) -> str:
    """Return the name of a form that lies packed: `drive-int8`, on the second drive `drive2-int8`.

    Parameters
    ----------
    form
        Its name in memory.
    drive
        Number of the drive, from 1 on.
    """
    return f"drive{drive}-{form}" if drive > 1 else f"{ON_DRIVE}{form}"


def packed_form(name: str) -> tuple[str, int] | None:
    """Return the form in memory and the drive of a form that lies packed; None for another."""
    found = re.fullmatch(r"drive(\d*)-(.+)", name)
    return (found[2], int(found[1] or 1)) if found else None


@dataclass(frozen=True)
class Option:
    """One form of a document on one tier: the paper's configuration (EvicPress section 4.2).

    Parameters
    ----------
    form
        Name of the form.
    tier
        Name of the tier that its bytes lie on.
    byte_count
        What it takes there.
    quality
        From 0 to 1; where it was measured, the lower end of its interval.
    first_token
        Seconds until the first token of an answer.
    token_seconds
        Seconds of each further token.
    """

    form: str
    tier: str
    byte_count: int
    quality: float
    first_token: float
    token_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.byte_count < 0:
            raise SettingsError(f"form {self.form}: {self.byte_count} bytes are below 0")
        if not 0 <= self.quality <= 1:
            raise SettingsError(f"form {self.form}: quality {self.quality} is not from 0 to 1")
        for seconds in (self.first_token, self.token_seconds):
            if not 0 <= seconds < math.inf:
                raise SettingsError(f"form {self.form}: {seconds} is no time in seconds")

    @property
    def place(self) -> tuple[str, str]:
        """The form and the tier, which an option of newer measurements shares."""
        return self.form, self.tier


@dataclass(frozen=True)
class Context:
    """A stored document as policies see it.

    Parameters
    ----------
    name
        Of the document.
    options
        What may be chosen.
    values
        Seconds that a use of each option is worth, in their order.
    weight
        How often it is used, in a unit that all contexts share.
    last_used
        When, in seconds.
    pinned
        Number of the option that a user pinned; None where policies choose.
    """

    name: str
    options: tuple[Option, ...]
    values: tuple[float, ...]
    weight: float = 1.0
    last_used: float = 0.0
    pinned: int | None = None

    def utility(self, number: int) -> float:
        """Return the utility of an option: its value times how often it is used."""
        return self.weight * self.values[number]

    def find(self, form: str, tier: str | None = None) -> int | None:
        """Return the number of a form's first option, on a tier where one is named, or None."""
        for number, option in enumerate(self.options):
            if option.form == form and tier in (None, option.tier):
                return number
        return None


# --- What a use is worth ---


class Utility(ABC):
    """Says what one use of an option is worth, in seconds."""

    @abstractmethod
    def value(self, option: Option) -> float:
        """Return the seconds; more is better, and below 0 is allowed."""


@dataclass(frozen=True)
class FirstTokenUtility(Utility):
    """The paper's: α · quality − time to first token (EvicPress section 4.2).

    Parameters
    ----------
    alpha
        Seconds that quality 1 is worth.
    """

    alpha: float = 1.0

    def value(self, option: Option) -> float:
        """Return α · quality − time to first token."""
        return self.alpha * option.quality - option.first_token


@dataclass(frozen=True)
class AnswerUtility(Utility):
    """Counts the whole answer, so that no first token is bought with slow decoding.

    Parameters
    ----------
    alpha
        Seconds that quality 1 is worth.
    tokens
        Of a usual answer.
    decode_weight
        λ: what a second of decoding counts beside one of waiting for the first token.
    """

    alpha: float = 1.0
    tokens: int = 128
    decode_weight: float = 1.0

    def value(self, option: Option) -> float:
        """Return α · quality − time to first token − λ · tokens · time per token."""
        decoding = self.decode_weight * self.tokens * option.token_seconds
        return self.alpha * option.quality - option.first_token - decoding


UTILITIES: Mapping[str, Callable[[float], Utility]] = MappingProxyType(
    {"answer": AnswerUtility, "first-token": FirstTokenUtility}
)

# --- How often a document is used ---


class Uses(ABC):
    """Turns uses into weights.

    Weights of all contexts share a unit that may grow with time, so that a weight changes only
    when its context is used: order and ratios of weights are what policies need.
    """

    @abstractmethod
    def used(self, weight: float, now: float) -> float:
        """Return the weight after a use.

        Parameters
        ----------
        weight
            Before, 0 where it was never used.
        now
            Seconds, since the same moment for all.
        """

    @property
    def longest(self) -> float:
        """Seconds after which weights are to be moved to a later beginning; infinite for never."""
        return math.inf

    def moved(self, weight: float, seconds: float) -> float:
        """Return a weight as it is where time begins so much later."""
        return weight

    @abstractmethod
    def per_hour(self, weight: float, now: float) -> float:
        """Return what a weight means: uses per hour."""


class TotalUses(Uses):
    """The paper's frequency: uses so far, which never fade."""

    def used(self, weight: float, now: float) -> float:
        """Return one more."""
        return weight + 1

    def per_hour(self, weight: float, now: float) -> float:
        """Return uses over the time since the beginning."""
        return weight / max(now, 1.0) * 3600


class FadingUses(Uses):
    """Uses that count for half after each half-life.

    A use at a later time weighs more, by 2 ** (time / half-life), in place of all earlier ones
    weighing less: so nothing has to be brought up to date when time goes by.

    Parameters
    ----------
    half_life
        Seconds.
    """

    def __init__(self, half_life: float = 3600.0) -> None:
        if not 0 < half_life < math.inf:
            raise SettingsError(f"half_life={half_life} is no time above 0 seconds")
        self._half_life = half_life

    @property
    def longest(self) -> float:
        """Seconds after which weights come near the largest number that there is."""
        return 900 * self._half_life

    def moved(self, weight: float, seconds: float) -> float:
        """Return the weight that the same uses have from a later beginning on."""
        return weight * math.pow(2.0, -seconds / self._half_life)

    def used(self, weight: float, now: float) -> float:
        """Return the weight with this use in it."""
        return weight + math.pow(2.0, now / self._half_life)

    def per_hour(self, weight: float, now: float) -> float:
        """Return the faded count over what a use counts for in all: half-life / ln 2."""
        faded = weight * math.pow(2.0, -now / self._half_life)
        return faded * math.log(2) / self._half_life * 3600


# --- A floor of quality ---


def above_floor(options: Sequence[Option], floor: float) -> tuple[Option, ...]:
    """Return the options of at least that quality, or those of the best where none has it.

    This is the setting of fairness: a sum of utilities may ruin a document that few ask for.
    """
    if not 0 <= floor <= 1:
        raise SettingsError(f"floor={floor} is not from 0 to 1")
    best = max((option.quality for option in options), default=0.0)
    return tuple(option for option in options if option.quality >= min(floor, best))
