# SPDX-License-Identifier: Apache-2.0
"""What a study found so far, on the drive: one that broke off goes on where it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from hillinfer.catalogue.measuring import MeasuredDocument
from hillinfer.catalogue.records import MeasuredForm, RestingTimes
from hillinfer.errors import SettingsError
from hillinfer_bench.evicpress.played import Played

_NAME = "evicpress"
_FILE = "notes.jsonl"
_Found = TypeVar("_Found")


class Notes:
    """A folder with a store, and a line for each part of a study that is done.

    Lines of another study, by its settings, are forgotten, and its folder with them.

    Parameters
    ----------
    directory
        Where the folder is made.
    settings
        What figures depend on.

    Raises
    ------
    SettingsError
        Where a folder of that name is somebody else's.

    Attributes
    ----------
    folder
        For whatever else is kept until the study ends.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        self.folder = directory / _NAME
        self._file = self.folder / _FILE
        known = json.loads(json.dumps(dict(settings), default=str))
        if self.folder.exists():
            if not self._file.exists():
                raise SettingsError(
                    f"--dir {directory}: its folder {_NAME} is not of a study; give another folder"
                )
            if self._lines()[:1] != [known]:
                shutil.rmtree(self.folder)
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            self._file.write_text(json.dumps(known) + "\n")
        self._parts = {line["part"]: line["found"] for line in self._lines()[1:]}

    def part(
        self,
        name: str,
        find: Callable[[], _Found],
        pack: Callable[[_Found], Any],
        unpack: Callable[[Any], _Found],
    ) -> _Found:
        """Return what a part of the study found, found now where it was not before.

        Parameters
        ----------
        name
            Of the part.
        find
            Finds it.
        pack, unpack
            Make of it what JSON has, and back.
        """
        if name not in self._parts:
            found = pack(find())
            with self._file.open("a") as file:
                file.write(json.dumps({"part": name, "found": found}) + "\n")
            self._parts[name] = json.loads(json.dumps(found))
        return unpack(self._parts[name])

    def has(self, name: str) -> bool:
        """Return whether a part is done."""
        return name in self._parts

    def remove(self) -> None:
        """Forget all of it, because the study is through."""
        shutil.rmtree(self.folder)

    def _lines(self) -> list[Any]:
        lines = []
        for line in self._file.read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                # The last one, where whoever wrote it was killed.
                break
        return lines


# --- what JSON has of it ---


def packed_profile(found: MeasuredDocument) -> dict[str, Any]:
    """Return a profile as JSON has it."""
    return asdict(found)


def unpacked_profile(packed: Mapping[str, Any]) -> MeasuredDocument:
    """Return the profile again."""
    forms = tuple(MeasuredForm(**one) for one in packed["forms"])
    return MeasuredDocument(RestingTimes(**packed["resting"]), forms, packed["seconds"])


def packed_played(found: Played) -> dict[str, Any]:
    """Return what a rival did as JSON has it."""
    return {one.name: getattr(found, one.name) for one in fields(found)}


def unpacked_played(packed: Mapping[str, Any]) -> Played:
    """Return it again."""
    return Played(**packed)
