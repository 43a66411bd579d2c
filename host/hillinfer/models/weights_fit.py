# SPDX-License-Identifier: Apache-2.0
"""Whether a model's weights are those that its settings describe: all of them, and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hillinfer.models.errors import ModelError
from hillinfer.models.stored_names import check_names
from hillinfer.models.stored_tensor import StoredTensor

_FIX = "config and weights are not of one model, or a file is incomplete: get the model anew"
_SHOWN = 3


def check_stored(skeleton: Any, tensors: Mapping[str, StoredTensor], where: object) -> None:
    """Refuse weights that cannot be a model's, before any is read.

    What can only be known once they are loaded, because transformers gives some of them other
    names, `check_loaded` looks at.

    Parameters
    ----------
    skeleton
        The model without memory.
    tensors
        What its files hold.
    where
        The model's place, for the message.

    Raises
    ------
    ModelError
        Where a tensor has another shape than the model's of the same name, the model has more
        numbers than the files, or two tensors are one weight of it.
    """
    own = {name: tuple(weight.shape) for name, weight in skeleton.state_dict().items()}
    misshapen = [
        f"{name} is {list(tensor.shape)} in the file and {list(own[name])} in the config"
        for name, tensor in tensors.items()
        if name in own and tensor.shape != own[name]
    ]
    missing = _without_ties(skeleton, own.keys() - tensors.keys())
    unused = tensors.keys() - own.keys()
    if misshapen:
        raise ModelError(f"the weights in {where} have other shapes: {_some(misshapen)}; {_FIX}")
    # Of the same names but for a few: those few are all there is to say.
    if missing and not unused and not skeleton._keys_to_ignore_on_load_missing:
        raise _missing(where, missing)
    numbers = sum(weight.numel() for weight in skeleton.parameters())
    held = sum(tensor.numel for tensor in tensors.values())
    if numbers > held and not skeleton._keys_to_ignore_on_load_missing:
        raise ModelError(
            f"the weights in {where} are too few: its config describes {numbers} numbers and its "
            f"files hold {held}, without {_some(missing)}; {_FIX}"
        )
    check_names(skeleton, tensors, where)


def check_loaded(info: Mapping[str, Any], where: object) -> None:
    """Refuse a model of which transformers made up a weight, or left one out.

    Parameters
    ----------
    info
        What `from_pretrained` says with `output_loading_info`. Tied weights, and those that the
        model's class declares to be of no matter, are not in it.
    where
        The model's place, for the message.

    Raises
    ------
    ModelError
        Where one is missing, unused, of another shape or not readable.
    """
    if info["missing_keys"]:
        raise _missing(where, info["missing_keys"])
    if info["unexpected_keys"]:
        raise unused_weights(where, info["unexpected_keys"])
    others = [*(one[0] for one in info["mismatched_keys"]), *map(str, info["error_msgs"])]
    if others:
        raise ModelError(f"the weights in {where} do not fit: {_some(others)}; {_FIX}")


def check_ties(skeleton: Any, model: Any, where: object) -> None:
    """Refuse a model whose config ties weights of which its files hold two that differ.

    Parameters
    ----------
    skeleton
        The model without memory, which says what its config ties.
    model
        The loaded one: transformers leaves such weights apart, with a warning.
    where
        The model's place, for the message.

    Raises
    ------
    ModelError
        For the first two.
    """
    tied: Mapping[str, str] = getattr(skeleton, "all_tied_weights_keys", {})
    for second, first in tied.items():
        if model.get_parameter_or_buffer(second) is not model.get_parameter_or_buffer(first):
            raise ModelError(
                f"the weights in {where} have {second} and {first}, which differ, and its config "
                "says that they are one weight: set tie_word_embeddings to false in config.json to "
                f"use both, or remove {second} from the files"
            )


def unused_weights(where: object, names: Collection[str]) -> ModelError:
    """Return the error of weights that the model has no place for."""
    return ModelError(
        f"the weights in {where} have {len(names)} tensors that its config has no place for, "
        f"{_some(names)}; {_FIX}"
    )


def _missing(where: object, names: Collection[str]) -> ModelError:
    return ModelError(
        f"the weights in {where} lack {len(names)} tensors of its config, {_some(names)}; {_FIX}"
    )


def _without_ties(skeleton: Any, names: Collection[str]) -> set[str]:
    """Leave out what is another weight under a second name."""
    tied: Mapping[str, str] = getattr(skeleton, "all_tied_weights_keys", {})
    return {name for name in names if name not in tied and name not in tied.values()}


def _some(names: Collection[str]) -> str:
    shown = ", ".join(name[:100] for name in sorted(names)[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
