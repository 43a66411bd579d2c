# SPDX-License-Identifier: Apache-2.0
"""The name of HillInfer's attention function in the config of an attached model."""

from __future__ import annotations

from typing import Any

NAME = "hillinfer"


class AttachedName(str):
    """The name that a config has while its model is attached.

    A copy of the config, also one that is pickled, belongs to a model that is not attached, and
    gets the name that was there before.

    Parameters
    ----------
    previous
        That name.
    """

    previous: str

    def __new__(cls, previous: str) -> AttachedName:
        """Return `NAME`."""
        name = super().__new__(cls, NAME)
        name.previous = previous
        return name

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return self.previous

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.previous,)
