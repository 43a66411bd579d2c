# SPDX-License-Identifier: Apache-2.0
"""Parameters of rotary positions, of which transformers says no more than a warning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hillinfer.models.setting_range import check_number, wrong_setting

ROTARY = ("rope_scaling", "rope_parameters")
# Far beyond any model: what is larger leaves positions that are all the same.
_LARGE = 1e6
# What transformers' rope types read, whichever of them (`transformers.modeling_rope_utils`).
_RANGES = {
    "factor": (1.0, _LARGE),
    "attention_factor": (1e-6, _LARGE),
    "beta_fast": (0.0, _LARGE),
    "beta_slow": (0.0, _LARGE),
    "low_freq_factor": (1e-6, _LARGE),
    "high_freq_factor": (1e-6, _LARGE),
    "mscale": (0.0, _LARGE),
    "mscale_all_dim": (0.0, _LARGE),
}
# Of LongRoPE, one number for each pair of a head's dimensions; real ones are a little below 1, too.
_LISTS = ("short_factor", "long_factor")
_ELEMENTS = (1e-6, _LARGE)
# Smaller first; a missing one or 0 is what transformers takes then.
_ORDERED = (("low_freq_factor", "high_freq_factor", 0.0, _LARGE), ("beta_slow", "beta_fast", 1, 32))


def check_rotary(name: str, value: Any, where: object) -> None:
    """Refuse parameters that no positions can be computed from.

    Parameters
    ----------
    name
        `rope_scaling` or `rope_parameters`.
    value
        What is under it: the parameters, or those of each type of layer by its name.
    where
        What they are of, for the message.

    Raises
    ------
    ModelError
        For the first that is of the wrong type or out of range.
    """
    if not isinstance(value, Mapping):
        return
    _check_parameters(name, value, where)
    for kind, own in value.items():
        if isinstance(own, Mapping):
            _check_parameters(f"{name}.{kind!s:.40}", own, where)


def _check_parameters(name: str, own: Mapping[str, Any], where: object) -> None:
    for key, bounds in _RANGES.items():
        if own.get(key) is not None:
            check_number(f"{name}.{key}", own[key], *bounds, where)
    for key in _LISTS:
        if own.get(key) is not None:
            _check_list(f"{name}.{key}", own[key], where)
    if own.get("truncate") is not None and not isinstance(own["truncate"], bool):
        raise wrong_setting(f"{name}.truncate", own["truncate"], where, ": it is true or false")
    for low, high, least, most in _ORDERED:
        smaller, larger = own.get(low) or least, own.get(high) or most
        if smaller > larger:
            raise wrong_setting(
                f"{name}.{low}", smaller, where, f", above its {high}={larger}: they are swapped"
            )
    short, long = (own.get(key) for key in _LISTS)
    if short and long and len(short) != len(long):
        raise wrong_setting(
            f"{name}.short_factor", short, where,
            f": it has {len(short)} numbers, and long_factor {len(long)}",
        )  # fmt: skip


def _check_list(name: str, value: Any, where: object) -> None:
    # One number alone would be used for every dimension without a word.
    if not isinstance(value, list) or len(value) < 2:
        raise wrong_setting(name, value, where, ": it is a list of a number for each frequency")
    for place, one in enumerate(value):
        check_number(f"{name}[{place}]", one, *_ELEMENTS, where)
