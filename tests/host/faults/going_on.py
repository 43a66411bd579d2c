# SPDX-License-Identifier: Apache-2.0
"""What sees a life pass: its tokens, and how it goes on with a cache that failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from hillinfer.errors import HillInferError
from hillinfer.generate.answering import Generation


class Witness:
    """Sees the tokens of a life, which ends with the first error.

    Parameters
    ----------
    on_token
        Called with each token.
    """

    def __init__(self, on_token: Callable[[int], None] = lambda token_id: None) -> None:
        self._on_token = on_token
        self.shadow_bytes = (0, 0)

    def generation(self, model: Any, cache: Any, chunk_tokens: int) -> Generation:
        """Return what reads and answers with a cache."""
        return Generation(model, cache, chunk_tokens)

    def meanwhile(self, generation: Generation, other: Callable[[], Any]) -> None:
        """Learn what else goes on between a failed forward pass and the next try."""

    def attempt(self, step: Callable[[], Any]) -> None:
        """Do a step that is no forward pass."""
        step()

    def on_token(self, question: int, token_id: int) -> None:
        """See a token of the answer to one question."""
        self._on_token(token_id)

    def count(self, generation: Generation) -> None:
        """Add the bytes of shadow that were written and read, before a cache is closed."""
        found = generation.statistics()
        assert found is not None
        written, read = self.shadow_bytes
        self.shadow_bytes = written + found.shadow_write_bytes, read + found.shadow_read_bytes


class GoingOn(Witness):
    """Uses a cache once more after its first error; a second error ends the life.

    `errors` are all there were, `came` the tokens of each question's answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[HillInferError] = []
        self.used_again = 0
        self.came: dict[int, list[int]] = defaultdict(list)
        self.others: WeakKeyDictionary[Any, Callable[[], Any]] = WeakKeyDictionary()

    def generation(self, model: Any, cache: Any, chunk_tokens: int) -> Generation:
        """Return what makes a forward pass that failed again."""
        return Generation(_Stubborn(model, self), cache, chunk_tokens)

    def meanwhile(self, generation: Generation, other: Callable[[], Any]) -> None:
        """Let `other` go on before a failed forward pass is made again."""
        self.others[generation.cache] = other

    def attempt(self, step: Callable[[], Any], other: Callable[[], Any] = lambda: None) -> None:
        """Do a step, and after the first error of all once more."""
        try:
            step()
        except HillInferError as error:
            self.errors.append(error)
            if len(self.errors) > 1:
                raise
            try:
                other()
            except HillInferError as later:
                self.errors.append(later)
            self.used_again += 1
            step()

    def on_token(self, question: int, token_id: int) -> None:
        """Keep a token."""
        self.came[question].append(token_id)


class Once:
    """Work that is done once, however often it is asked for; its error comes every time."""

    def __init__(self, work: Callable[[], list[int]]) -> None:
        self._work = work
        self._result: list[int] | None = None
        self._error: HillInferError | None = None

    def __call__(self) -> list[int]:
        """Return the result, or raise the error."""
        if self._error is not None:
            raise self._error
        if self._result is None:
            try:
                self._result = self._work()
            except HillInferError as error:
                self._error = error
                raise
        return self._result


class _Stubborn:
    """A model whose forward passes are made again after the first error of a life.

    Parameters
    ----------
    model
        Makes them.
    life
        Counts errors, and knows what goes on with another cache before a pass is made again.
    """

    def __init__(self, model: Any, life: GoingOn) -> None:
        self._model = model
        self._life = life

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **given: Any) -> Any:
        """Make a forward pass."""
        outputs: list[Any] = []
        self._life.attempt(
            lambda: outputs.append(self._model(**given)),
            self._life.others.get(given["past_key_values"], lambda: None),
        )
        return outputs[-1]
