# SPDX-License-Identifier: Apache-2.0
"""A hook of an attached model that copies of the model do not have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class ModelHook(ABC):
    """Something that torch calls before or after a module's forward pass.

    A function would be copied with its model and go on to know the model that it was made for. A
    copy of this hook, also one that is pickled, does nothing.
    """

    @abstractmethod
    def __call__(self, *args: Any) -> Any:
        """Do what torch asks for; arguments as torch gives them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return nothing

    def __reduce__(self) -> Any:
        return _no_hook, ()


def nothing(*args: Any) -> None:
    """Do nothing, in the place of a hook."""


def _no_hook() -> Any:
    return nothing
