# SPDX-License-Identifier: Apache-2.0
"""The texts that are measured on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hillinfer.errors import PromptError, SettingsError
from hillinfer.generate.prompt import read_text
from hillinfer.settings import Settings
from hillinfer.system.machine import NumberType
from hillinfer.values import check_threads

DEFAULT_TEXTS = 3
# More characters than any tokenizer for English puts into one token on average.
_CHARACTERS_PER_TOKEN = 8


@dataclass(frozen=True)
class TextsRequest:
    """Options of one run over the beginnings of texts.

    Parameters
    ----------
    model, number_type
        What to load, and the type it computes in.
    texts
        Files; parts of the Python reference where empty.
    context, last
        Tokens of each text, and how many of them are read sparsely, a decode step each.
    alphas
        Importance rates.
    threads
        Compute threads, or what is done at once; None for one per core.
    out
        Where the JSON goes; None for nowhere.

    Raises
    ------
    SettingsError
        Where a value is outside its range; the message names it.
    """

    model: str
    number_type: NumberType
    texts: tuple[Path, ...]
    context: int
    last: int
    alphas: tuple[float, ...]
    threads: int | None
    out: Path | None

    def __post_init__(self) -> None:
        """Refuse values that mean nothing, before a model is loaded."""
        if not 0 < self.last < self.context:
            raise SettingsError(
                f"last={self.last} must be at least 1 and below context={self.context}"
            )
        check_threads(self.threads)
        for alpha in self.alphas:
            Settings().changed(alpha=alpha)

    def samples(
        self, tokenizer: Any, max_positions: int, parts: int = DEFAULT_TEXTS
    ) -> list[TextSample]:
        """Return the texts, by default so many of the parts of the Python reference.

        Raises
        ------
        SettingsError, PromptError
            Where the model has fewer positions, or a text fewer tokens, than the context.
        """
        if self.context > max_positions:
            raise SettingsError(
                f"context={self.context} is longer than the {max_positions} positions of "
                f"{self.model}: give a smaller --context"
            )
        if self.texts:
            return file_samples(tokenizer, self.texts, self.context)
        return standard_library_samples(tokenizer, self.context)[:parts]


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
