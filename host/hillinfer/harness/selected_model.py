# SPDX-License-Identifier: Apache-2.0
"""Log-likelihoods of texts, of which every token is scored behind selected ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hillinfer.errors import SettingsError
from hillinfer.generate.answering import Generation
from hillinfer.hf.attach import Attachment
from hillinfer.hf.cache import HillInferCache
from hillinfer.settings import Settings

if TYPE_CHECKING:
    import torch

    from hillinfer.models.loader import LoadedModel

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Asked:
    """A continuation behind a context.

    Parameters
    ----------
    context, continuation
        Their tokens; neither is empty.
    """

    context: Tokens
    continuation: Tokens

    @classmethod
    def within(cls, context: Sequence[int], continuation: Sequence[int], most: int) -> Asked:
        """Return what a model of `most` positions is asked; the oldest tokens are left out.

        The last token of a continuation is scored and never read, so it needs no position.

        Raises
        ------
        SettingsError
            Where one is empty, or the continuation alone has more tokens than that.
        """
        if not context or not 0 < len(continuation) <= most:
            raise SettingsError(
                f"a continuation of {len(continuation)} tokens behind {len(context)} cannot be "
                f"scored: both need one, and it {most} at most; shorten the task's texts or raise "
                "max_length"
            )
        whole = (*context, *continuation)[-(most + 1) :]
        split = len(whole) - len(continuation)
        return cls(whole[:split], whole[split:])

    @property
    def read_tokens(self) -> int:
        """Tokens that the model reads."""
        return len(self.context) + len(self.continuation) - 1


@dataclass(frozen=True)
class Likelihood:
    """What a model says of a continuation.

    Parameters
    ----------
    total
        Natural logarithm of its probability.
    greedy
        Whether each of its tokens is the most probable one.
    """

    total: float
    greedy: bool


class SelectedModel:
    """A model with HillInfer on it, whose every scored token went through selection.

    A context is read in chunks, densely, but for its last token. That one and those of the
    continuation are decode steps, each with a selected set of its own. So also an answer of one
    token is behind selected ones. A context that several continuations follow is read once.

    Parameters
    ----------
    loaded
        The model; attached until `close`.
    settings
        Of its caches.
    chunk_tokens
        Tokens of one forward pass while a context is read.

    Raises
    ------
    HillInferError
        As `Attachment` and its `new_cache` say.
    """

    def __init__(self, loaded: LoadedModel, settings: Settings, chunk_tokens: int) -> None:
        self._model, self._chunk_tokens = loaded.model, chunk_tokens
        self.positions = loaded.shape.max_positions
        self._attachment = Attachment(loaded.model, settings)
        try:
            # The engine goes with its last cache: this one has no tokens and stays.
            self._anchor = self._attachment.new_cache(expected_tokens=1)
        except BaseException:
            self._attachment.detach()
            raise

    def close(self) -> None:
        """Take HillInfer off; harmless when done twice."""
        self._anchor.close()
        self._attachment.detach()

    def cache(self, tokens: int) -> HillInferCache:
        """Return an empty cache for so many tokens; whoever asks closes it."""
        return self._attachment.new_cache(expected_tokens=min(tokens, self.positions))

    def likelihoods(
        self, asked: Sequence[Asked], on_done: Callable[[int], None] = lambda done: None
    ) -> list[Likelihood]:
        """Return what the model says of continuations, in their order.

        `on_done` is called with how many more are known.
        """
        found: dict[int, Likelihood] = {}
        groups: dict[Tokens, list[int]] = {}
        for number, one in enumerate(asked):
            groups.setdefault(one.context, []).append(number)
        for context, numbers in groups.items():
            longest = max(asked[number].read_tokens for number in numbers)
            with closing(Generation(self._model, self.cache(longest), self._chunk_tokens)) as own:
                if context[:-1]:
                    own.read(context[:-1])
                own.step(context[-1])
                for number in numbers:
                    found[number] = _likelihood(own, asked[number].continuation)
                    on_done(1)
        return [found[number] for number in range(len(asked))]


def _likelihood(read: Generation, continuation: Tokens) -> Likelihood:
    if len(continuation) == 1:
        return _summed([(read.logits, continuation[0])])
    with closing(read.fork()) as own:
        return _summed(_stepping(own, continuation))


def _stepping(own: Generation, continuation: Tokens) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the logits before each token and the token, which is read when the next is wanted."""
    for number, token in enumerate(continuation):
        if number:
            own.step(continuation[number - 1])
        yield own.logits, token


def _summed(scored: Iterable[tuple[torch.Tensor, int]]) -> Likelihood:
    total, greedy = 0.0, True
    for logits, token in scored:
        # In float32, whatever the model computes in: sums of many are compared.
        total += float(logits.float().log_softmax(-1)[token])
        greedy = greedy and int(logits.argmax()) == token
    return Likelihood(total, greedy)
