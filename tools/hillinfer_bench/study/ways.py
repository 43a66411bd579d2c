# SPDX-License-Identifier: Apache-2.0
"""What the study compares: systems' ways to attend, at equal α and at equal bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hillinfer.model_shape import ModelShape
from hillinfer.settings import Settings
from hillinfer_bench.frontier.rival_rules import CANDIDATES, InfiniGenRule, partial_channels
from hillinfer_bench.frontier.swept import default_alpha, exact_split
from hillinfer_bench.precision.table import CHOSEN_FORM, Mix
from hillinfer_bench.precision.value_forms import Split
from hillinfer_bench.quality.policies import (
    PAGE_TOKENS,
    Attending,
    FloatWeights,
    Pages,
    SelectionPolicy,
)
from hillinfer_bench.quality.table import Configuration, contract_configuration
from hillinfer_bench.rivals.paged import CHUNK_TOKENS
from hillinfer_bench.study.rules import (
    GROUP_TOKENS,
    OBSERVED,
    Chunks,
    HeavyHitters,
    QuantisedCache,
)
from hillinfer_model.choices import KeyMode, Rule

# The shares of all tokens that are exact, where precision follows weight.
EXACT = 0.02
# Bytes of a row's channel, key and value together.
_ROW = 4
BYTES_TOKENS = 4096
"""Tokens at which bytes are told where they depend on the length."""


@dataclass(frozen=True)
class StudyWay:
    """One way to attend to what is before a token.

    Parameters
    ----------
    name
        Of the system.
    setting
        Which comparison it belongs to: `full`, `α = 0.1`, or equal bytes.
    configuration
        Makes the policy; None for the full cache.
    rows, ranking
        Bytes that a step reads over those of all rows: of what is attended to, and of what it is
        ranked by.
    observed
        Last tokens of a prompt whose queries the policy is shown.
    """

    name: str
    setting: str
    configuration: Configuration | None
    rows: float
    ranking: float
    observed: int = 0

    @property
    def title(self) -> str:
        """Tells it from all others."""
        return f"{self.name}, {self.setting}"

    def policy(self, shape: ModelShape) -> SelectionPolicy | Attending | None:
        """Return the policy of all layers, for one pass."""
        return None if self.configuration is None else self.configuration.policy(shape)

    def policies(self, shape: ModelShape) -> list[SelectionPolicy | Attending | None]:
        """Return the policies of the layers, for one pass after the other."""
        if self.observed:
            return [self.policy(shape) for _ in range(shape.layers)]
        return [self.policy(shape)] * shape.layers


FULL = StudyWay("full cache", "full", None, 1.0, 0.0)


def _shadow(head_dim: int) -> float:
    """Return the bytes of an INT4 key shadow over those of rows: half a byte and one exponent."""
    return (head_dim / 2 + 1) / (_ROW * head_dim)


def _coded(head_dim: int) -> float:
    """Return the bytes of a token's value codes over those of its row."""
    return CHOSEN_FORM.head_bytes(head_dim) / (_ROW * head_dim)


def _quantised(bits: int) -> float:
    """Return the bytes of a quantised cache over those of rows: codes, and two numbers a group."""
    return 2 * (bits / 8 + 4 / GROUP_TOKENS) / _ROW


Make = Callable[[ModelShape, Settings], SelectionPolicy | Attending]


@dataclass(frozen=True)
class System:
    """A system whose α can be chosen.

    Parameters
    ----------
    name
        As tables call it.
    make
        Returns the configuration for an α.
    rows, ranking
        Shares of bytes, given α and the channels of a head; see `StudyWay`.
    observed
        See `StudyWay`.
    """

    name: str
    make: Callable[[float], Configuration]
    rows: Callable[[float, int], float]
    ranking: Callable[[float, int], float]
    observed: int = 0

    def way(self, alpha: float, setting: str, head_dim: int) -> StudyWay:
        """Return the way to attend with an α."""
        return StudyWay(
            self.name,
            setting,
            self.make(alpha),
            self.rows(alpha, head_dim),
            self.ranking(alpha, head_dim),
            self.observed,
        )

    def alpha_for(self, share: float, head_dim: int) -> float | None:
        """Return the α at which a step reads a share of the bytes of all rows, at most 1.

        None where ranking alone reads more, or what is left is less than a hundredth of the rows.
        """
        low, high = 0.01, 1.0
        if self.rows(low, head_dim) + self.ranking(low, head_dim) > share:
            return None
        if self.rows(high, head_dim) + self.ranking(high, head_dim) <= share:
            return high
        for _ in range(50):
            middle = (low + high) / 2
            read = self.rows(middle, head_dim) + self.ranking(middle, head_dim)
            low, high = (middle, high) if read <= share else (low, middle)
        return low


def _of_policy(name: str, make: Make, alpha: float) -> Configuration:
    return Configuration(name, make, Settings().changed(alpha=alpha))


def _only_settings(
    policy: Callable[[Settings], SelectionPolicy], shape: ModelShape, settings: Settings
) -> SelectionPolicy:
    return policy(settings)


def _contract(rule: Rule, alpha: float) -> Configuration:
    settings = Settings().changed(alpha=alpha, rule=rule, shadow=KeyMode.INT4)
    return contract_configuration(settings)


def _mixed(alpha: float) -> Configuration:
    return Mix(alpha, Split(EXACT), CHOSEN_FORM).configuration()


def _floored_way(alpha: float, head_dim: int) -> StudyWay:
    """Return precision by weight with the product's least number of exact tokens."""
    mix = Mix(alpha, exact_split(), CHOSEN_FORM)
    split = mix.split
    setting = f"α = {alpha:g} and {split.share:g} exact ({split.floor} at least)"
    rows = mix.byte_share(BYTES_TOKENS, head_dim)
    return StudyWay(FLOORED, setting, mix.configuration(), rows, _shadow(head_dim))


def _alpha(alpha: float, head_dim: int) -> float:
    return alpha


def _rival(
    name: str,
    policy: Callable[[Settings], SelectionPolicy],
    ranking: Callable[[float, int], float],
    observed: int = 0,
) -> System:
    make = partial(_of_policy, name, partial(_only_settings, policy))
    return System(name, make, _alpha, ranking, observed)


H2O = "H2O (others dropped)"
ALL_KEYS = "H2O-like (all keys read)"
INFINIGEN, LEOAM, QUEST = "InfiniGen-like", "LeoAM-like", "Quest"
PAPERS, OURS = "HillInfer, paper's rule", "HillInfer, weight_sum"
MIXED = "HillInfer, precision by weight"
# What the product does: exact tokens have a floor, so their share depends on the length.
FLOORED = "HillInfer, as the product"
SYSTEMS: tuple[System, ...] = (
    _rival(H2O, HeavyHitters, lambda alpha, d: 0.0, OBSERVED),
    # Keys of what is not selected are read, too: they are half of a row.
    _rival(ALL_KEYS, FloatWeights, lambda alpha, d: (1 - alpha) / 2),
    _rival(INFINIGEN, InfiniGenRule, lambda alpha, d: partial_channels(d) / (2 * d)),
    _rival(
        LEOAM, Chunks, lambda alpha, d: 1 / CHUNK_TOKENS + min(1, CANDIDATES * alpha) / PAGE_TOKENS
    ),
    _rival(QUEST, Pages, lambda alpha, d: 1 / PAGE_TOKENS),
    System(PAPERS, partial(_contract, Rule.RAW_SUM), _alpha, lambda alpha, d: _shadow(d)),
    System(OURS, partial(_contract, Rule.WEIGHT_SUM), _alpha, lambda alpha, d: _shadow(d)),
    System(
        MIXED,
        _mixed,
        lambda alpha, d: min(alpha, EXACT) + max(0.0, alpha - EXACT) * _coded(d),
        lambda alpha, d: _shadow(d),
    ),
)
BITS = (4, 2)
EQUAL_ALPHA, TARGET_ALPHA = 0.1, 0.2


def quantised_way(bits: int) -> StudyWay:
    """Return a cache of which all tokens are attended to as codes of so many bits."""
    name = f"{bits}-bit cache"
    configuration = Configuration(
        name, lambda shape, settings: QuantisedCache(settings, bits), Settings()
    )
    return StudyWay(name, "all tokens", configuration, _quantised(bits), 0.0)


def study_ways(head_dim: int) -> list[StudyWay]:
    """Return what is compared, the full cache first.

    Parameters
    ----------
    head_dim
        Of the model; bytes depend on it.

    Returns
    -------
    The full cache, quantised ones, every system at α = 0.1, every system that can at the bytes that
    `MIXED` reads at α = 0.2 and at those of the 4-bit cache, and the product's own settings.
    """
    (mixed,) = (one for one in SYSTEMS if one.name == MIXED)
    target = mixed.rows(TARGET_ALPHA, head_dim) + mixed.ranking(TARGET_ALPHA, head_dim)
    quantised = [quantised_way(bits) for bits in BITS]
    ways = [FULL, *quantised]
    ways += [one.way(EQUAL_ALPHA, f"α = {EQUAL_ALPHA:g}", head_dim) for one in SYSTEMS]
    for share in (target, quantised[0].rows):
        for one in SYSTEMS:
            alpha = one.alpha_for(share, head_dim)
            if alpha is not None:
                # With all tokens some read less.
                read = one.rows(alpha, head_dim) + one.ranking(alpha, head_dim)
                ways.append(one.way(alpha, f"{read:.1%} of the bytes", head_dim))
    alphas = sorted({EQUAL_ALPHA, default_alpha()})
    return ways + [_floored_way(alpha, head_dim) for alpha in alphas]
