# SPDX-License-Identifier: Apache-2.0
"""One input: the files that a target reads, and how they are kept for a replay."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Files = dict[str, bytes]


@dataclass(frozen=True)
class FuzzInput:
    """Files for one target.

    Parameters
    ----------
    target
        Name in the table of targets.
    seed, number
        Which run made it, and as which of the target's inputs.
    files
        Content by name; a name may hold folders.
    """

    target: str
    seed: int
    number: int
    files: Files

    @property
    def name(self) -> str:
        """A name for a file that keeps it."""
        return f"{self.target}-{self.seed}-{self.number}"

    def write(self, folder: Path) -> None:
        """Write the files to a folder."""
        for name, content in self.files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)

    def save(self, file: Path, what: str, seeds: Sequence[Files] = ()) -> None:
        """Keep it as one JSON file.

        Parameters
        ----------
        file
            Where.
        what
            What was found with it, for readers.
        seeds
            The target's; what the input has in common with one of them is not written.
        """
        shared = [self.files.items() & own.items() for own in seeds]
        like = max(range(len(seeds)), key=lambda n: len(shared[n]), default=None)
        same = {name for name, _ in shared[like]} if like is not None else set()
        content = {
            "target": self.target,
            "seed": self.seed,
            "number": self.number,
            "found": what,
            "like": like,
            "same": sorted(same),
            "files": {
                name: _difference(data, {} if like is None else seeds[like], name)
                for name, data in self.files.items()
                if name not in same
            },
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: Path, seeds_of: Callable[[str], Sequence[Files]]) -> FuzzInput:
        """Read what `save` wrote; `seeds_of` gives the seeds of a target by its name."""
        content = json.loads(file.read_text(encoding="utf-8"))
        like = content["like"]
        own = {} if like is None else seeds_of(content["target"])[like]
        files = {name: own[name] for name in content["same"]}
        for name, one in content["files"].items():
            data = own.get(name, b"")
            middle = zlib.decompress(base64.b64decode(one["middle"]))
            files[name] = data[: one["before"]] + middle + data[len(data) - one["after"] :]
        return cls(content["target"], content["seed"], content["number"], files)


def _difference(data: bytes, seed: Files, name: str) -> dict[str, Any]:
    """Return what lies between the bytes at both ends that a seed's file has, too."""
    own = seed.get(name, b"")
    before = _common(data, own)
    most = min(len(data), len(own)) - before
    after = min(most, _common(data[::-1], own[::-1]))
    middle = data[before : len(data) - after]
    packed = base64.b64encode(zlib.compress(middle, 9)).decode()
    return {"before": before, "after": after, "middle": packed}


def _common(one: bytes, other: bytes) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
