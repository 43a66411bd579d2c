# SPDX-License-Identifier: Apache-2.0
"""Computes what a decode step with exact and coded tokens needs in bytes (contract, section 15)."""

from __future__ import annotations

from dataclasses import dataclass

from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec
from hillinfer_model.launch_shape import key_beats
from hillinfer_model.selection import exact_count, selected_count
from hillinfer_model.value_layout import code_row_bytes

_ROW_CHANNEL_BYTES = 2 * 2


@dataclass(frozen=True)
class ExactShare:
    """How many tokens are selected, and how many of these are exact.

    Parameters
    ----------
    alpha
        Importance rate.
    exact
        Exact share of the context; 1 codes nothing.
    floor
        Tokens that are exact at least.
    kept
        Tokens that are always selected, and always exact.
    """

    alpha: float
    exact: float = 1.0
    floor: int = 128
    kept: int = 36


@dataclass(frozen=True)
class StepNeed:
    """What one decode step of all layers needs, and what all codes take; computed, not measured.

    Parameters
    ----------
    exact_tokens, coded_tokens
        Of each selected set.
    exact_row_bytes, value_code_bytes
        Rows of the exact and codes of values of the coded tokens. Where each KV head has a set of
        its own they are of tokens that no two sets share: the most that there can be.
    key_shadow_bytes
        Key shadow of all tokens, which a step ranks and whose codes are the coded tokens' keys; the
        keys in FP16 where there is no shadow.
    all_code_bytes
        Codes of values of all tokens, 0 where nothing is coded.
    kv_bytes
        Rows of all tokens, for comparison.
    """

    exact_tokens: int
    coded_tokens: int
    exact_row_bytes: int
    value_code_bytes: int
    key_shadow_bytes: int
    all_code_bytes: int
    kv_bytes: int

    @property
    def codes_and_shadow_bytes(self) -> int:
        """DRAM that takes the drive out of every coded token."""
        return self.all_code_bytes + self.key_shadow_bytes


def token_code_bytes(spec: KernelSpec) -> int:
    """Return the bytes of one token's value codes and exponents in one layer."""
    return code_row_bytes(spec) + spec.kv_heads


def step_need(
    spec: KernelSpec, scope: Scope, layers: int, tokens: int, share: ExactShare
) -> StepNeed:
    """Return what a step behind so many tokens needs.

    Parameters
    ----------
    spec, scope
        Shape and key codes; what shares one selected set.
    layers
        Layers of the model.
    tokens
        N, at least 1.
    share
        Which are selected and exact. Keys of 2 bits are not attended to, and FP16 keys have no
        codes: all tokens are exact then.

    Raises
    ------
    ValueError
        Where a value is outside its range; the message names it.
    """
    if tokens < 1 or layers < 1:
        raise ValueError(f"tokens={tokens} and layers={layers} must be at least 1")
    kept = min(share.kept, tokens)
    selected = selected_count(tokens, share.alpha, share.kept, None)
    exact = exact_count(tokens, share.exact, share.floor, kept, selected)
    codes = share.exact < 1 and spec.key_mode in (KeyMode.INT8, KeyMode.INT4)
    if not codes:
        exact = selected
    sets = spec.kv_heads if scope is Scope.KV_HEAD else 1
    row = spec.kv_heads * spec.head_dim * _ROW_CHANNEL_BYTES
    code = token_code_bytes(spec)
    segment = spec.segment_tokens
    return StepNeed(
        exact_tokens=exact,
        coded_tokens=selected - exact,
        exact_row_bytes=layers * min(tokens, sets * exact) * row,
        value_code_bytes=layers * min(tokens, sets * (selected - exact)) * code,
        key_shadow_bytes=layers * tokens * (key_beats(segment, spec) * BEAT_BYTES // segment),
        all_code_bytes=layers * tokens * code if codes else 0,
        kv_bytes=layers * tokens * row,
    )
