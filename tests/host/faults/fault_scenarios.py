# SPDX-License-Identifier: Apache-2.0
"""What runs while drives fail and processes are killed: a document, a question, an answer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from going_on import Once, Witness
from tiny_models import TinyModel

import hillinfer
from hillinfer.drive.calls import DriveCalls
from hillinfer.engine.budget_growth import CachePlan
from hillinfer.engine.budget_plan import BudgetPlan, kernel_spec
from hillinfer.errors import SetupWarning
from hillinfer.generate.answering import Generation
from hillinfer.generate.tokens import Sampling
from hillinfer.hf.attach import Attachment
from hillinfer.model_shape import ModelShape
from hillinfer.pruning.passes import ComingPrompt, coming_prompt
from hillinfer.pruning.schedule import Schedule
from hillinfer.settings import IOChoice, Settings
from hillinfer.shadow.store import STREAM_BUFFERS, shadow_bytes
from hillinfer_model.kernel_spec import GROUP_TOKENS

CHUNK = 128
QUESTIONS = ([3, 17, 40, 8, 51], [9, 30, 2])
# Of three layers: something waits at the first cut, and between the two.
CUTS = "1:50%,2:25%"


class StreamingAttachment(Attachment):
    """Caches that keep no full shadow in DRAM, so that a short context streams it, too."""

    def __init__(self, model: object, settings: Settings, calls: DriveCalls | None = None) -> None:
        super().__init__(model, settings, calls, plan=_without_shadows)


class StagingAttachment(Attachment):
    """Caches of a model whose deeper layers see fewer tokens of a prompt."""

    def __init__(self, model: object, settings: Settings, calls: DriveCalls | None = None) -> None:
        super().__init__(model, settings, calls)
        self._pruning = hillinfer.prune(model, CUTS, chunk_tokens=CHUNK)

    def detach(self) -> None:
        """Leave the model as it was."""
        self._pruning.remove()
        super().detach()


@contextmanager
def told(tokens: int, question_tokens: int | None = None) -> Iterator[None]:
    """Say how long the prompt is, as `Pruning.prompt` does; nothing without it."""
    token = coming_prompt.set(ComingPrompt(tokens, question_tokens))
    try:
        yield
    finally:
        coming_prompt.reset(token)


def _without_shadows(*given: object) -> CachePlan:
    return replace(CachePlan.of(*given), shadow_limit_bytes=0)


@dataclass(frozen=True)
class Scenario:
    """A generation that reads a document, asks on a fork of it, and asks on itself.

    Parameters
    ----------
    document_tokens, new_tokens
        Length of the document and of each of the two answers.
    head_dim
        Sets the size of a row.
    alpha
        Share selected.
    attachment
        How caches are made: `StreamingAttachment` keeps full shadows on the drive, and of
        `StagingAttachment` the document waits at the first cut and each question chooses.
    io
        How the drive is read.
    layers
        Of the model.
    """

    document_tokens: int
    new_tokens: int
    head_dim: int = 32
    alpha: float = 0.1
    attachment: type[Attachment] = Attachment
    io: IOChoice = IOChoice.AUTO
    layers: int = 2

    @property
    def document(self) -> list[int]:
        """Token ids of the document."""
        return [5 + (i * i + i // 7) % 50 for i in range(self.document_tokens)]

    @property
    def context_tokens(self) -> int:
        """Longest context of all."""
        return self.document_tokens + len(QUESTIONS[0]) + self.new_tokens

    @property
    def streams(self) -> bool:
        """Whether full shadows lie on the drive."""
        return self.attachment is StreamingAttachment

    def model(self) -> object:
        """Return the tiny random model."""
        return self._tiny.build()

    @property
    def _tiny(self) -> TinyModel:
        return TinyModel(head_dim=self.head_dim, layers=self.layers)

    def settings(self, cold_dir: Path) -> Settings:
        """Return settings with the least budget that works, so that most rows are cold."""
        settings = Settings().changed(
            alpha=self.alpha,
            kept_sinks=2,
            kept_recent=6,
            block_rows=64,
            block_tokens=256,
            io=self.io,
            io_threads=2,
            shadow="int4",
            cold_dir=cold_dir,
            dram_budget="1KiB",
            # What a prompt's pass has brought stays cold, so that answers read it again.
            pool_policy="paper",
        )
        shape = ModelShape.from_config(self._tiny.config(), self._tiny.dtype)
        plan = BudgetPlan.with_whole_shadow(shape, settings, self.context_tokens, 2)
        # The buffers of streaming are part of the least budget of those that stream.
        streams = STREAM_BUFFERS * shadow_bytes(kernel_spec(shape, settings))
        room = 32 * 1024 + (streams if self.streams else 0)
        if self.attachment is StagingAttachment:
            # Of each band in each sequence an open group, and keys of the layer that decides.
            room += 2 * len(Schedule.parse(CUTS).cuts) * GROUP_TOKENS * shape.token_bytes
            room += self.context_tokens * shape.row_bytes
        return settings.changed(dram_budget=f"{plan.required_bytes + room}B")

    def attach(self, model: object, cold_dir: Path, calls: DriveCalls | None = None) -> Attachment:
        """Attach to the model with drives of the caller's."""
        return self.attachment(model, self.settings(cold_dir), calls or DriveCalls())

    def cache(self, attachment: Attachment) -> object:
        """Return a cache for the whole scenario."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SetupWarning)
            return attachment.new_cache(expected_tokens=self.context_tokens, sequences=2)

    def run(
        self, model: object, cold_dir: Path, calls: DriveCalls, witness: Witness | None = None
    ) -> list[int]:
        """Do all of it and return the tokens of both answers."""
        seen = witness or Witness()
        with self.attach(model, cold_dir, calls) as attachment:
            generation = seen.generation(model, self.cache(attachment), CHUNK)
            try:
                tokens = self.read_and_answer(generation, seen)
                seen.count(generation)
                return tokens
            finally:
                generation.close()

    def read_and_answer(self, generation: Generation, witness: Witness) -> list[int]:
        """Read the document and answer both questions, the first one on a fork.

        Where the fork fails and is used again, the second one is answered in between: what the
        fork left half done must not be taken for done once another sequence did it.
        """
        self.read(generation)
        fork = generation.fork()
        own = Once(partial(self.answer, generation, 1, witness))
        witness.meanwhile(fork, own)
        try:
            tokens = self.answer(fork, 0, witness)
        finally:
            fork.close()
        return tokens + own()

    def read(self, generation: Generation) -> None:
        """Read the document; a question is to come."""
        with told(len(self.document) + 1):
            generation.read(self.document)

    def answer_again(self, generation: Generation) -> list[int]:
        """Answer both questions on forks of a document that was read, which may be done again."""
        tokens = []
        for question in range(len(QUESTIONS)):
            fork = generation.fork()
            try:
                tokens += self.answer(fork, question, Witness())
            finally:
                fork.close()
        return tokens

    def answer(self, generation: Generation, question: int, witness: Witness) -> list[int]:
        """Read one of the questions and return the answer's tokens."""
        ids = QUESTIONS[question]
        with told(generation.cache.get_seq_length() + len(ids), len(ids)):
            generation.read(ids)
        tokens = []
        for token_id in generation.decode(Sampling(), self.new_tokens, frozenset()):
            tokens.append(token_id)
            witness.on_token(question, token_id)
        return tokens
