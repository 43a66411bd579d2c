# SPDX-License-Identifier: Apache-2.0
"""One part of the attack, with counts of what was tried and how it ended."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attacks.commands import Commands, Ended, Setting
from fuzzing.fuzz_input import Files, FuzzInput
from fuzzing.model_folders import tiny_folder
from fuzzing.targets import TARGETS

DOCUMENT = "".join(f"cat {i} sat on mat {i * 7 % 61}. " for i in range(12))


@dataclass
class Part:
    """What a part came to.

    Parameters
    ----------
    name
        As it is chosen.
    tried, refused, harmless
        How often; `harmless` is what changed nothing, or was survived.
    wrong
        What must not be: in a line, and how to do it again.
    skipped
        What could not be tried here, and why.
    """

    name: str
    tried: int = 0
    refused: int = 0
    harmless: int = 0
    wrong: list[dict[str, str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def count(self, wrong: str, again: str, *, refused: bool = False) -> None:
        """Take in one trial.

        Parameters
        ----------
        wrong
            What must not be, empty where nothing is.
        again
            How to repeat it.
        refused
            Whether it was refused; survived otherwise.
        """
        self.tried += 1
        if wrong:
            self.wrong.append({"what": wrong, "again": again})
        elif refused:
            self.refused += 1
        else:
            self.harmless += 1

    def ended(self, ended: Ended, again: str, *, more: str = "", sent: int | None = None) -> None:
        """Take in how a command ended, and what was found to be wrong beside."""
        self.count(ended.wrong(sent) or more, again, refused=ended.refused)

    def as_json(self) -> dict[str, Any]:
        """Return what the report says."""
        return {
            "tried": self.tried,
            "refused": self.refused,
            "harmless": self.harmless,
            "wrong": len(self.wrong),
            "skipped": self.skipped,
            "found": self.wrong,
        }


class Ground:
    """A folder with a tiny model and a document, and the answer that must come.

    Parameters
    ----------
    folder
        An empty one for everything of a part.
    keep
        Where inputs with something wrong are kept.
    commands
        Who runs commands.
    """

    def __init__(self, folder: Path, keep: Path, commands: Commands) -> None:
        self.folder = folder
        self.keep = keep
        self.commands = commands
        self.model = folder / "model"
        FuzzInput("config", 0, 0, tiny_folder()).write(self.model)
        self.document = folder / "document.txt"
        self.document.write_text(DOCUMENT)
        self.cold_dir = self.place("cold")
        self.cache = self.place("cache")
        self.text = self._expected()

    def place(self, name: str) -> Path:
        """Return a folder, made where it is missing."""
        place = self.folder / name
        place.mkdir(exist_ok=True)
        return place

    def setting(self, **given: Any) -> Setting:
        """Return what commands find around them, the user's cache apart from everybody's."""
        variables = {"XDG_CACHE_HOME": str(self.cache), **given.pop("variables", {})}
        return Setting(given.pop("folder", self.folder), variables=variables, **given)

    def generate(self, *more: object, model: Path | None = None) -> list[object]:
        """Return the arguments of a short answer over the document."""
        return [
            *("generate", "--model", model or self.model, "--prompt-file", self.document),
            *("--cold-dir", self.cold_dir, "--max-new-tokens", 6, "--threads", 1),
            *("--question", "who sat", "--dram-budget", "24MiB", *more),
        ]

    def answer_of(self, report: Path) -> str | None:
        """Return the text of a report's first answer, None where there is none."""
        try:
            answers = json.loads(report.read_text(encoding="utf-8"))["answers"]
        except (OSError, ValueError, KeyError):
            return None
        return str(answers[0]["text"]) if answers else ""

    def leftovers(self) -> str:
        """Name what lies where nothing may lie, and remove nothing."""
        left = [str(file.relative_to(self.folder)) for file in sorted(self.cold_dir.rglob("*"))]
        return f"leftover: {', '.join(left)}" if left else ""

    def keep_input(self, target: str, number: int, files: Files, what: str) -> str:
        """Keep an input and say how to try it again."""
        file = self.keep / f"{target}-attack-{number}.json"
        seeds = next(one for one in TARGETS if one.name == target).seeds()
        FuzzInput(target, 0, number, files).save(file, what, seeds)
        return f"python tools/fuzz.py --replay {os.path.relpath(file)}"

    def _expected(self) -> str:
        ended = self.commands.run(self.generate(), self.setting())
        if ended.code != 0:
            raise RuntimeError(f"the plain command fails: {ended}")
        return ended.out
