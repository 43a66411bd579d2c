# SPDX-License-Identifier: Apache-2.0
"""The prompts that every peer reads, and the tokens it decodes, at each context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hillinfer.errors import PromptError
from hillinfer_bench.quality.texts import TextSample

# A cache that grows by copying has the old rows and the new ones for a moment.
_COPIES_OF_ROWS = 2


@dataclass(frozen=True)
class Prompts:
    """Beginnings of one text, and the tokens that follow each.

    Parameters
    ----------
    name
        Of the text.
    parts
        Prompt and what follows it, token ids, by context in tokens, ascending.
    left_out
        Why a context that was asked for is not measured, by context.
    """

    name: str
    parts: dict[int, tuple[list[int], list[int]]]
    left_out: dict[int, str]

    @classmethod
    def of(
        cls,
        contexts: Sequence[int],
        follow: int,
        sample: Callable[[int], TextSample],
        available_bytes: int,
        weight_bytes: int,
        row_bytes: int,
    ) -> Prompts:
        """Leave out contexts that the memory or the text is too small for, and say why.

        Parameters
        ----------
        contexts
            In tokens, ascending.
        follow
            Tokens decoded after each.
        sample
            Returns at least so many tokens of the text.
        available_bytes
            Memory that may be taken.
        weight_bytes, row_bytes
            Of the model's weights, and of a token's keys and values.

        Raises
        ------
        PromptError
            Where the text is too short for any context that memory holds, or memory holds none.
        """
        left_out: dict[int, str] = {}
        fitting = []
        for context in contexts:
            needed = weight_bytes + _COPIES_OF_ROWS * (context + follow) * row_bytes
            if needed > available_bytes:
                left_out[context] = (
                    f"weights and rows take {needed} bytes and {available_bytes} are available"
                )
            else:
                fitting.append(context)
        while fitting:
            try:
                text = sample(fitting[-1] + follow)
            except PromptError as error:
                left_out[fitting.pop()] = str(error)
                continue
            ids = list(text.token_ids)
            parts = {one: (ids[:one], ids[one : one + follow]) for one in fitting}
            return cls(text.name, parts, dict(sorted(left_out.items())))
        raise PromptError(f"no context can be measured: {left_out[min(left_out)]}")
