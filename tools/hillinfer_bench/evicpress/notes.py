# SPDX-License-Identifier: Apache-2.0
"""Keeps a study's results on the drive, so that one that broke off goes on."""

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
_STUDY = "hillinfer-bench evicpress"
_SITTING = "sitting"
_Found = TypeVar("_Found")


class Notes:
    """A folder with a store, and a line for each part of a study that is done.

    Lines of a study with other settings are forgotten, and its folder with them.

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
    sittings
        How often it was begun and gone on with.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        self.folder = directory / _NAME
        self._file = self.folder / _FILE
        known = json.loads(json.dumps({"study": _STUDY, "settings": dict(settings)}, default=str))
        if self.folder.exists():
            first = (self._lines() or [None])[0]
            if not isinstance(first, dict) or first.get("study") != _STUDY:
                raise SettingsError(
                    f"--dir {directory}: its folder {_NAME} is not of a study; give another folder"
                )
            if first != known:
                shutil.rmtree(self.folder)
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            self._file.write_text("")
            self._add(known)
        lines = self._lines()[1:]
        self._parts = {line["part"]: line["found"] for line in lines}
        self.sittings = 1 + sum(line["part"] == _SITTING for line in lines)
        self._add({"part": _SITTING, "found": None})

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
            self._add({"part": name, "found": found})
            self._parts[name] = json.loads(json.dumps(found))
        return unpack(self._parts[name])

    def remove(self) -> None:
        """Forget all of it, because the study is through."""
        shutil.rmtree(self.folder)

    def _add(self, line: Mapping[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _lines(self) -> list[Any]:
        """Return what is noted, without what somebody was killed in the middle of."""
        if not self._file.exists():
            return []
        text = self._file.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self._file.write_text(whole)
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError:
            return []


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
