# SPDX-License-Identifier: Apache-2.0
"""What a process does that may be killed at any moment, and what the next one does after it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fault_scenarios import CHUNK, QUESTION, SECOND_QUESTION, OnToken, Scenario

from hillinfer.generation import Generation
from hillinfer.hf.cache import HillInferCache
from hillinfer.storage.drive_calls import DriveCalls
from hillinfer.storage.leftovers import sweep


@dataclass(frozen=True)
class Places:
    """Where a process keeps its files.

    Parameters
    ----------
    cold_dir
        Of the cold pool.
    sessions
        Parent of the session's directory.
    """

    cold_dir: Path
    sessions: Path

    @property
    def session(self) -> Path:
        """The session's directory."""
        return self.sessions / "session"

    def names(self) -> list[str]:
        """Return the names of everything in both directories, but of a complete session."""
        found = [*self.cold_dir.iterdir(), *self.sessions.iterdir()]
        return sorted(path.name for path in found if path != self.session)

    def remove_session(self) -> None:
        """Remove the session where there is one."""
        if self.session.exists():
            shutil.rmtree(self.session)


class Life(Protocol):
    """One kind of process.

    `live` is what may be killed; `restart` is the next start after it, which must clear leftovers
    and give the same tokens. Both return all tokens and pass each on as it comes.
    """

    name: str
    scenario: Scenario

    def live(self, model: Any, places: Places, calls: DriveCalls, on_token: OnToken) -> list[int]:
        """Read, save where there is something to save, and answer."""

    def restart(self, model: Any, places: Places, on_token: OnToken) -> list[int]:
        """Go on from what is there, or begin again."""


@dataclass(frozen=True)
class DocumentLife:
    """Reads a document and answers; saves nothing."""

    scenario: Scenario
    name: str = "document"

    def live(self, model: Any, places: Places, calls: DriveCalls, on_token: OnToken) -> list[int]:
        """Read and answer."""
        return self.scenario.run(model, places.cold_dir, calls, on_token)

    def restart(self, model: Any, places: Places, on_token: OnToken) -> list[int]:
        """Do all of it again."""
        return self.live(model, places, DriveCalls(), on_token)


@dataclass(frozen=True)
class SessionLife:
    """Reads a document, saves a session, answers, and answers again from the session."""

    scenario: Scenario
    name: str = "session"

    def live(self, model: Any, places: Places, calls: DriveCalls, on_token: OnToken) -> list[int]:
        """Read, save, answer, open the session and answer from it."""
        with self.scenario.attach(model, places.cold_dir, calls) as attachment:
            generation = Generation(model, self.scenario.cache(attachment), CHUNK)
            try:
                generation.read(self.scenario.document)
                generation.cache.save_session(places.session)
                tokens = self.scenario.answer(generation, QUESTION, on_token)
            finally:
                generation.close()
            return tokens + self._resumed(model, attachment, places, on_token)

    def restart(self, model: Any, places: Places, on_token: OnToken) -> list[int]:
        """Answer from the session where there is one; a session that is there must be whole."""
        if not places.session.exists():
            return self.live(model, places, DriveCalls(), on_token)
        # What the command does before it saves beside a session: clear what others left.
        sweep(places.sessions)
        with self.scenario.attach(model, places.cold_dir) as attachment:
            tokens = self._answered(model, attachment, places, QUESTION, on_token)
            return tokens + self._resumed(model, attachment, places, on_token)

    def _resumed(self, model: Any, attachment: Any, places: Places, on_token: OnToken) -> list[int]:
        return self._answered(model, attachment, places, SECOND_QUESTION, on_token)

    def _answered(
        self, model: Any, attachment: Any, places: Places, question: list[int], on_token: OnToken
    ) -> list[int]:
        cache = attachment.load_session(
            places.session, expected_tokens=self.scenario.context_tokens
        )
        generation = Generation(model, cache, CHUNK)
        try:
            return self.scenario.answer(generation, question, on_token)
        finally:
            generation.close()


def sessions_exist() -> bool:
    """Say whether caches can be saved as sessions."""
    return hasattr(HillInferCache, "save_session")
