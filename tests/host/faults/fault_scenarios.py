# SPDX-License-Identifier: Apache-2.0
"""What runs while drives fail and processes are killed: a document, a question, an answer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tiny_models import TinyModel

from hillinfer.errors import SetupWarning
from hillinfer.generation import Generation
from hillinfer.hf.attach import Attachment
from hillinfer.model_shape import ModelShape
from hillinfer.pools.budget_plan import BudgetPlan, kernel_spec
from hillinfer.sampling import Sampling
from hillinfer.settings import Settings
from hillinfer.storage.drive_calls import DriveCalls

CHUNK = 128
QUESTION = [3, 17, 40, 8, 51]
SECOND_QUESTION = [9, 30, 2]

OnToken = Callable[[int], None]


def unseen(token_id: int) -> None:
    """Let a token pass unseen."""


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
    streams_shadow
        Whether the budget is too small for the key shadow.
    """

    document_tokens: int
    new_tokens: int
    head_dim: int = 32
    alpha: float = 0.1
    streams_shadow: bool = False

    @property
    def document(self) -> list[int]:
        """Token ids of the document."""
        return [5 + (i * i + i // 7) % 50 for i in range(self.document_tokens)]

    @property
    def context_tokens(self) -> int:
        """Longest context of all."""
        return self.document_tokens + len(QUESTION) + self.new_tokens

    def model(self) -> object:
        """Return the tiny random model."""
        return TinyModel(head_dim=self.head_dim).build()

    def settings(self, cold_dir: Path) -> Settings:
        """Return settings with the least budget that works, so that most rows are cold."""
        settings = Settings().changed(
            alpha=self.alpha,
            kept_sinks=2,
            kept_recent=6,
            block_rows=64,
            block_tokens=256,
            io_threads=2,
            shadow="int4",
            cold_dir=cold_dir,
            dram_budget="1KiB",
        )
        config = TinyModel(head_dim=self.head_dim).config()
        shape = ModelShape.from_config(config, TinyModel().dtype)
        plan = BudgetPlan.with_whole_shadow(shape, settings, self.context_tokens, 2)
        if self.streams_shadow:
            plan = plan.streamed(kernel_spec(shape, settings), shape.layers, 2)
        return settings.changed(dram_budget=f"{plan.required_bytes + 32 * 1024}B")

    def attach(self, model: object, cold_dir: Path, calls: DriveCalls | None = None) -> Attachment:
        """Attach to the model with drives of the caller's."""
        return Attachment(model, self.settings(cold_dir), calls or DriveCalls())

    def cache(self, attachment: Attachment) -> object:
        """Return a cache for the whole scenario."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SetupWarning)
            return attachment.new_cache(expected_tokens=self.context_tokens, sequences=2)

    def run(
        self, model: object, cold_dir: Path, calls: DriveCalls, on_token: OnToken = unseen
    ) -> list[int]:
        """Do all of it and return the tokens of both answers."""
        with self.attach(model, cold_dir, calls) as attachment:
            generation = Generation(model, self.cache(attachment), CHUNK)
            try:
                return self.read_and_answer(generation, on_token)
            finally:
                generation.close()

    def read_and_answer(self, generation: Generation, on_token: OnToken) -> list[int]:
        """Read the document and answer both questions, the first one on a fork."""
        generation.read(self.document)
        fork = generation.fork()
        try:
            tokens = self.answer(fork, QUESTION, on_token)
        finally:
            fork.close()
        return tokens + self.answer(generation, SECOND_QUESTION, on_token)

    def answer_again(self, generation: Generation) -> list[int]:
        """Answer both questions on forks of a document that was read, which may be done again."""
        tokens = []
        for question in (QUESTION, SECOND_QUESTION):
            fork = generation.fork()
            try:
                tokens += self.answer(fork, question)
            finally:
                fork.close()
        return tokens

    def answer(
        self, generation: Generation, question: list[int], on_token: OnToken = unseen
    ) -> list[int]:
        """Read a question and return the answer's tokens."""
        generation.read(question)
        tokens = []
        for token_id in generation.decode(Sampling(), self.new_tokens, frozenset()):
            tokens.append(token_id)
            on_token(token_id)
        return tokens
