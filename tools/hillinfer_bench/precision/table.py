# SPDX-License-Identifier: Apache-2.0
"""Configurations of the precision study, and its table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from hillinfer.devices.opening import make_scorer
from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.model_shape import ModelShape
from hillinfer.settings import Settings
from hillinfer_bench.precision.key_readings import (
    AlignedShadow,
    DecodedShadow,
    KeyReading,
    OwnKeyCodes,
)
from hillinfer_bench.precision.mixed import MixedPrecision
from hillinfer_bench.precision.value_forms import (
    ByteScale,
    ChannelBytes,
    ChannelPowers,
    ContractCodes,
    Groups,
    HalfScale,
    PowerScale,
    Split,
    ValueForm,
)
from hillinfer_bench.quality.policies import Attending
from hillinfer_bench.quality.table import Configuration, QualityRow
from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.selection import selected_count

# Bytes of one channel of a row, keys and values together.
_ROW_CHANNEL_BYTES = 4
_ALL_EXACT = Split(1.0)
_SHADOW = AlignedShadow()


@dataclass(frozen=True)
class Mix:
    """One row of the table.

    Parameters
    ----------
    alpha
        Share of the tokens that is attended to.
    split
        How many of them are exact.
    form
        How the others' values are coded.
    exact_scope
        What shares one exact set.
    keys
        What the others' inner products are made from.
    """

    alpha: float
    split: Split
    form: ValueForm
    exact_scope: Scope = Scope.LAYER
    keys: KeyReading = _SHADOW

    @property
    def name(self) -> str:
        """What is coded and how."""
        if self.split == _ALL_EXACT:
            return "none"
        name = f"keys {self.keys.name}, values {self.form.name}"
        return name if self.exact_scope is Scope.LAYER else f"{name}, exact per KV head"

    @property
    def exact_text(self) -> str:
        """The exact share, and its floor where there is one."""
        if self.split == _ALL_EXACT:
            return "all"
        floor = f", at least {self.split.floor}" if self.split.floor else ""
        return f"{self.split.share:g}{floor}"

    @property
    def settings(self) -> Settings:
        """α, and the default shadow and rule."""
        return Settings().changed(alpha=self.alpha, shadow=KeyMode.INT4)

    def configuration(self) -> Configuration:
        """Return what the study runs."""
        name = f"{self.alpha:g} {self.exact_text} {self.name}"
        return Configuration(name, partial(_policy, self), self.settings)

    def byte_share(self, length: int, head_dim: int) -> float:
        """Return the bytes of rows and value codes of a step, over the rows of all tokens.

        The key shadow is not in it: a step reads it whole to rank, with all rows alike.
        """
        settings = self.settings
        count = selected_count(length, self.alpha, settings.kept_tokens, settings.max_selected)
        exact = self.split.exact_count(length, count, settings.kept_tokens)
        row = _ROW_CHANNEL_BYTES * head_dim
        return (exact * row + (count - exact) * self.form.head_bytes(head_dim)) / (length * row)


def _policy(mix: Mix, shape: ModelShape, settings: Settings) -> Attending:
    scorer, ranker = (
        make_scorer(settings.device, kernel_spec(shape, settings), scope)
        for scope in (Scope.LAYER, mix.exact_scope)
    )
    if mix.exact_scope is Scope.LAYER:
        ranker = scorer
    return MixedPrecision(scorer, ranker, settings, mix.split, mix.form, mix.keys)


CHOSEN_FORM = ContractCodes()


def study_mixes() -> list[Mix]:
    """Return the rows of the study, in the order of its questions."""
    two, kept_only = Split(0.02), Split(0.0, floor=36)
    finer = OwnKeyCodes(ChannelBytes(4))
    forms = [
        *(CHOSEN_FORM, PowerScale(4), ByteScale(4), HalfScale(4), Groups(4)),
        *(ChannelPowers(3), ByteScale(3), HalfScale(3), Groups(3), ByteScale(2), Groups(2)),
    ]
    return [
        *(Mix(alpha, _ALL_EXACT, CHOSEN_FORM) for alpha in (0.1, 0.2)),
        *(Mix(1.0, split, HalfScale(4), keys=finer) for split in (Split(0.0), kept_only)),
        *(Mix(0.2, two, form) for form in forms),
        *(Mix(0.2, Split(share), CHOSEN_FORM) for share in (0.01, 0.03, 0.05)),
        *(Mix(alpha, two, CHOSEN_FORM) for alpha in (0.1, 0.15, 0.3)),
        *(Mix(0.2, Split(share), CHOSEN_FORM, Scope.KV_HEAD) for share in (0.01, 0.02)),
        *(Mix(0.2, two, CHOSEN_FORM, keys=keys) for keys in (DecodedShadow(), finer)),
        *(Mix(1.0, split, CHOSEN_FORM) for split in (two, kept_only)),
        Mix(1.0, kept_only, ByteScale(4)),
        *(Mix(0.2, Split(0.02, floor), CHOSEN_FORM) for floor in (64, 96, 128)),
    ]


@dataclass(frozen=True)
class PrecisionRow:
    """One mix over all texts.

    Parameters
    ----------
    mix
        What was measured.
    quality
        How it compares with the full cache.
    byte_share
        `Mix.byte_share` at the length of the texts.
    """

    mix: Mix
    quality: QualityRow
    byte_share: float

    def as_record(self) -> dict[str, object]:
        """Return what the report says of this row."""
        return {
            "alpha": self.mix.alpha,
            "exact": self.mix.exact_text,
            "exact_scope": self.mix.exact_scope.value,
            "coded": self.mix.name,
            "kl_divergence": self.quality.kl_divergence,
            "kl_of_texts": [one.kl_divergence for one in self.quality.measures],
            "kl_standard_error": self.quality.kl_standard_error,
            "agreement": self.quality.agreement,
            "perplexity_against_full": self.quality.perplexity_against_full,
            "byte_share": self.byte_share,
        }


def precision_table(rows: list[PrecisionRow]) -> str:
    """Return the table as Markdown."""
    lines = [
        "| α | exact | coded | KL | ± s.e. | agreement | bytes |",
        "|---:|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.mix.alpha:g} | {row.mix.exact_text} | {row.mix.name} "
        f"| {row.quality.kl_divergence:.4f} | {row.quality.kl_standard_error:.4f} "
        f"| {row.quality.agreement:.3f} | {row.byte_share:.4f} |"
        for row in rows
    ]
    return "\n".join(lines)
