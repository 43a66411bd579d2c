# SPDX-License-Identifier: Apache-2.0
"""The texts that are measured on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hillinfer.generate.prompt import PromptError, read_text

DEFAULT_TEXTS = 3
# More characters than any tokenizer for English puts into one token on average.
_CHARACTERS_PER_TOKEN = 8


@dataclass(frozen=True)
class TextSample:
    """Tokens of one text.

    Parameters
    ----------
    name
        Where it comes from.
    token_ids
        The context and one more token, the last that is predicted.
    """

    name: str
    token_ids: tuple[int, ...]


def standard_library_samples(
    tokenizer: Any, context: int, parts: int = DEFAULT_TEXTS
) -> list[TextSample]:
    """Return disjoint spans of the Python reference, which every machine has.

    The topics of `pydoc_data`, sorted by name and joined, are cut into equal parts, and each part
    gives its beginning. The text follows the version of Python.

    Parameters
    ----------
    tokenizer
        A transformers tokenizer.
    context
        Tokens of context; a sample has one more.
    parts
        How many samples.

    Raises
    ------
    PromptError
        Where a part is too short.
    """
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    length = len(text) // parts
    return [
        _sample(
            tokenizer,
            f"pydoc_data.topics, part {number + 1} of {parts}",
            text[number * length : (number + 1) * length],
            context,
        )
        for number in range(parts)
    ]


def file_samples(tokenizer: Any, files: Sequence[Path], context: int) -> list[TextSample]:
    """Return the beginning of each file.

    Raises
    ------
    PromptError
        Where a file cannot be read, is not UTF-8 or is too short.
    """
    samples = []
    for file in files:
        text = read_text(file, "the text", "--texts")
        samples.append(_sample(tokenizer, file.name, text, context))
    return samples


def _sample(tokenizer: Any, name: str, text: str, context: int) -> TextSample:
    needed = context + 1
    ids = tokenizer(text[: needed * _CHARACTERS_PER_TOKEN]).input_ids
    if len(ids) < needed:
        ids = tokenizer(text).input_ids
    if len(ids) < needed:
        raise PromptError(
            f"{name} has {len(ids)} tokens but --context {context} needs {needed}: give a longer "
            "text or a smaller --context"
        )
    return TextSample(name, tuple(ids[:needed]))
