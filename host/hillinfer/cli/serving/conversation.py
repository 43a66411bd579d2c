# SPDX-License-Identifier: Apache-2.0
"""A conversation about documents, in one cache that grows with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from hillinfer.cli.console import ProgressView
from hillinfer.errors import ColdPoolError, HillInferError, PromptError
from hillinfer.extents.shared_chunks import StoredRowsError
from hillinfer.generate.answering import Generation
from hillinfer.serve.answers import AnswerText, WishedTokens
from hillinfer.serve.documents import SEPARATOR
from hillinfer.serve.refusals import ApiError
from hillinfer.serve.requests import AnswerWishes
from hillinfer.serve.served_model import ServedModel
from hillinfer.statistics import CacheStatistics

Message = Mapping[str, str]


@dataclass(frozen=True)
class Turn:
    """What one answer took.

    `held_tokens` of the prompt's tokens the cache or the store had; `read_seconds` is what reading
    the others took. `tokens` and `seconds` are the answer's.
    """

    prompt_tokens: int
    held_tokens: int
    read_seconds: float
    tokens: int = 0
    seconds: float = 0.0

    @property
    def reading(self) -> str:
        """What reading took, for people."""
        read = self.prompt_tokens - self.held_tokens
        return f"{read} of {self.prompt_tokens} tokens read in {self.read_seconds:.1f} s"

    @property
    def answering(self) -> str:
        """What the answer took, for people."""
        said = f"{self.tokens} tokens"
        if self.tokens > 1 and self.seconds:
            said += f", {(self.tokens - 1) / self.seconds:.1f} tokens/s"
        return f"{said}; {self.reading}"


class Conversation:
    """Questions and answers about documents.

    Its cache goes on from turn to turn. Rows of answers, and of what follows them, attended to what
    was selected, as in any conversation that goes on in a cache. `wishes` say how answers are made,
    of `most_tokens` each; `view` shows how far reading has come.
    """

    def __init__(
        self, served: ServedModel, wishes: AnswerWishes, most_tokens: int, view: ProgressView
    ) -> None:
        self._served, self._wishes = served, wishes
        self._most_tokens, self._view = most_tokens, view
        self._messages: list[Message] = []
        # Documents that were opened since the last question, which comes behind them.
        self._opened: list[str] = []
        self._generation: Generation | None = None
        self._has_failed_drive = False
        self._turns = 0

    @property
    def messages(self) -> tuple[Message, ...]:
        """What was said, each with `role` and `content`."""
        return tuple(self._messages)

    def open(self, text: str) -> Turn:
        """Read a document, which the next question is about.

        Raises PromptError where it is too long, or the model knows no chats, and HillInferError
        where it cannot be read.
        """
        coming = [*self._opened, text]
        with self._on_drive():
            _, turn = self._read(self._with(SEPARATOR.join([*coming, ""])))
        self._opened = coming
        return turn

    def ask(self, question: str, on_text: Callable[[str], None]) -> Turn:
        """Answer a question; an interrupt ends the answer, which is kept as far as it came.

        The question is about what was opened and said; `on_text` is called with each piece of the
        answer. Errors are those of `open`.
        """
        messages = self._with(SEPARATOR.join([*self._opened, question]))
        with self._on_drive():
            return self._answered(messages, on_text)

    def _answered(self, messages: list[Message], on_text: Callable[[str], None]) -> Turn:
        generation, turn = self._read(messages)
        pieces: list[str] = []
        began, count = time.perf_counter(), 0
        room = min(self._most_tokens, self._served.context_tokens - turn.prompt_tokens)
        chooser = WishedTokens(self._wishes, self._turns, generation.logits.device)
        text = AnswerText(0, self._served.tokenizer, self._wishes, self._served.stop_ids, room)
        try:
            while True:
                chosen = chooser.choose(generation.logits)
                piece = text.push(chosen)
                count += 1
                if piece.text:
                    pieces.append(piece.text)
                    on_text(piece.text)
                if piece.finish is not None:
                    break
                generation.step(chosen.token_id)
        finally:
            self._turns += 1
            self._opened = []
            self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        return replace(turn, tokens=count, seconds=time.perf_counter() - began)

    def forget(self) -> None:
        """Begin anew."""
        self._messages, self._opened = [], []
        self.close()

    def close(self) -> None:
        """Let the cache go."""
        generation, self._generation = self._generation, None
        if generation is not None:
            generation.close()

    def statistics(self) -> CacheStatistics | None:
        """Return what the cache did so far; None where there is none yet."""
        return None if self._generation is None else self._generation.statistics()

    # --- inside ----------------------------------------------------------------------------

    @contextmanager
    def _on_drive(self) -> Iterator[None]:
        """Open the engine anew whose drive has failed: it keeps what failed."""
        if self._has_failed_drive:
            self._served.renew()
            self._has_failed_drive = False
        try:
            yield
        except ColdPoolError as error:
            # Rows of a store that were lost are one sequence's alone.
            if not isinstance(error, StoredRowsError):
                self._has_failed_drive = True
                with suppress(HillInferError, OSError):
                    self.close()
            raise

    def _with(self, content: str) -> list[Message]:
        return [*self._messages, {"role": "user", "content": content}]

    def _read(self, messages: list[Message]) -> tuple[Generation, Turn]:
        """Read what the cache does not have of a chat."""
        with _plainly():
            ids = self._served.prompts.of_chat(messages)
        if len(ids) >= self._served.context_tokens:
            raise PromptError(
                f"{len(ids)} tokens are more than the {self._served.context_tokens} of this "
                "model's context: /new begins anew"
            )
        began = time.perf_counter()
        generation, held = self._going_on(ids)
        reading = generation.reading(ids[held:])
        found = held + next(reading)
        with self._view.stage("reading", len(ids), found) as advance:
            for done in reading:
                advance(held + done)
        return generation, Turn(len(ids), found, time.perf_counter() - began)

    def _going_on(self, ids: list[int]) -> tuple[Generation, int]:
        """Return what goes on with these tokens, and how many of them it has."""
        generation = self._generation
        if generation is not None:
            # An ordinary cache, of a document's form, does not know its tokens: it is opened anew.
            rows = getattr(generation.cache, "token_ids", ())
            # Those of a pass that broke off come last, and are not in the cache.
            own = rows[0][: generation.cache.get_seq_length()] if rows else []
            # One at least is read: its logits are wanted.
            pairs = zip(own, ids[:-1], strict=False)
            held = next((n for n, (one, other) in enumerate(pairs) if one != other), None)
            held = min(len(own), len(ids) - 1) if held is None else held
            if held:
                generation.cache.crop(held - len(own))
                return generation, held
            self.close()
        # Of nothing that it has: a new one asks the store.
        begun = self._served.begin(b"", ids, len(ids) + self._most_tokens)
        self._generation = begun.generation
        return begun.generation, begun.held


@contextmanager
def _plainly() -> Iterator[None]:
    """Say what a client of a server would be told."""
    try:
        yield
    except ApiError as error:
        raise PromptError(error.message) from error
