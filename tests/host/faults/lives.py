# SPDX-License-Identifier: Apache-2.0
"""What a process does that may be killed at any moment, and what the next one does after it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fault_scenarios import CHUNK, Scenario
from going_on import Witness

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.files import sweep


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
    and give the same tokens. Both return all tokens and show each as it comes.
    """

    name: str
    scenario: Scenario

    def live(self, model: Any, places: Places, calls: DriveCalls, witness: Witness) -> list[int]:
        """Read, save where there is something to save, and answer."""

    def restart(self, model: Any, places: Places, witness: Witness) -> list[int]:
        """Go on from what is there, or begin again."""


@dataclass(frozen=True)
class DocumentLife:
    """Reads a document and answers; saves nothing."""

    scenario: Scenario
    name: str = "document"

    def live(self, model: Any, places: Places, calls: DriveCalls, witness: Witness) -> list[int]:
        """Read and answer."""
        return self.scenario.run(model, places.cold_dir, calls, witness)

    def restart(self, model: Any, places: Places, witness: Witness) -> list[int]:
        """Do all of it again."""
        return self.live(model, places, DriveCalls(), witness)


@dataclass(frozen=True)
class SessionLife:
    """Reads a document, saves a session, answers, and answers again from the session."""

    scenario: Scenario
    name: str = "session"

    def live(self, model: Any, places: Places, calls: DriveCalls, witness: Witness) -> list[int]:
        """Read, save, answer, open the session and answer from it."""
        with self.scenario.attach(model, places.cold_dir, calls) as attachment:
            generation = witness.generation(model, self.scenario.cache(attachment), CHUNK)
            try:
                self.scenario.read(generation)
                witness.attempt(partial(self._save, generation, places))
                tokens = self.scenario.answer(generation, 0, witness)
                witness.count(generation)
            finally:
                generation.close()
            return tokens + self._resumed(model, attachment, places, witness)

    def restart(self, model: Any, places: Places, witness: Witness) -> list[int]:
        """Answer from the session where there is one; a session that is there must be whole."""
        if not places.session.exists():
            return self.live(model, places, DriveCalls(), witness)
        # What the command does before it saves beside a session: clear what others left.
        sweep(places.sessions)
        with self.scenario.attach(model, places.cold_dir) as attachment:
            tokens = self._answered(model, attachment, places, 0, witness)
            return tokens + self._resumed(model, attachment, places, witness)

    def _save(self, generation: Any, places: Places) -> None:
        # An error after the renaming says that the session is whole, and may be lost with the
        # power; it is not saved again then.
        if not places.session.exists():
            generation.cache.save_session(places.session)

    def _resumed(self, model: Any, attachment: Any, places: Places, witness: Witness) -> list[int]:
        return self._answered(model, attachment, places, 1, witness)

    def _answered(
        self, model: Any, attachment: Any, places: Places, question: int, witness: Witness
    ) -> list[int]:
        cache = attachment.load_session(
            places.session, expected_tokens=self.scenario.context_tokens
        )
        generation = witness.generation(model, cache, CHUNK)
        try:
            tokens = self.scenario.answer(generation, question, witness)
            witness.count(generation)
            return tokens
        finally:
            generation.close()
