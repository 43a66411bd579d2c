# SPDX-License-Identifier: Apache-2.0
"""The interface of a target: something that HillInfer reads and the fuzzer tries."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Protocol

from fuzzing.fuzz_input import Files


class Target(Protocol):
    """One kind of input.

    `try_one` returns where the input worked and gave the right answer as far as that can be known;
    it raises a HillInferError where the input was refused, WrongAnswerError where it was taken for
    something else than it says, and anything else where there is a defect.
    """

    name: str

    def seeds(self) -> list[Files]:
        """Return valid inputs, the same in every run."""

    def mutate(self, rng: random.Random, files: Files) -> Files:
        """Return a changed copy of a valid input."""

    def try_one(self, given: Path, other: Path) -> None:
        """Use an input.

        Parameters
        ----------
        given
            Folder with its files.
        other
            An empty folder for whatever is written; it must be empty afterwards.
        """
