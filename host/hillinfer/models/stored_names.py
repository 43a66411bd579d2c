# SPDX-License-Identifier: Apache-2.0
"""Which weight of a model each stored tensor becomes, by the names that transformers gives them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hillinfer.models.errors import ModelError
from hillinfer.models.library_calls import one_line

_LETTERS = 100


def check_names(skeleton: Any, names: Iterable[str], where: object) -> None:
    """Refuse two tensors that become one weight: one of them would be left out without a word.

    transformers adds and removes the prefix of the model without its head, and renames what older
    models call otherwise. Tensors that it joins into one weight are not meant.

    Parameters
    ----------
    skeleton
        The model without memory.
    names
        Of the stored tensors.
    where
        The model's place, for the message.

    Raises
    ------
    ModelError
        For the first two.
    """
    with one_line(f"name the weights in {where}", "get the model anew"):
        renamed = _renamed(skeleton, names)
    taken: dict[str, str] = {}
    for name, weight in renamed:
        if weight in taken:
            first, second = taken[weight][:_LETTERS], name[:_LETTERS]
            raise ModelError(
                f"the weights in {where} have {first} and {second}, which are both "
                f"{weight[:_LETTERS]} of the model: remove one of them, or get the model anew"
            )
        taken[weight] = name


def _renamed(skeleton: Any, names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the tensors that are weights by themselves, each with its weight."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(skeleton)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    joining = [one for one in mapping if isinstance(one, WeightConverter)]
    own, prefix = skeleton.state_dict(), skeleton.base_model_prefix
    found = []
    # In this order, because some renamings begin to work at a name.
    for name in sorted(names, key=dot_natural_key):
        weight, joined = rename_source_key(name, renamings, joining, prefix, own)
        if weight not in own and name in own:
            weight, joined = rename_source_key(name, [], [], prefix, own)
        if weight in own and joined is None:
            found.append((name, weight))
    return found
