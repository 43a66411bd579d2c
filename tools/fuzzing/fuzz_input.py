# SPDX-License-Identifier: Apache-2.0
"""One input: the files that a target reads, and how they are kept for a replay."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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
                name: base64.b64encode(zlib.compress(data, 9)).decode()
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
        files = {
            name: zlib.decompress(base64.b64decode(text)) for name, text in content["files"].items()
        }
        if content["like"] is not None:
            own = seeds_of(content["target"])[content["like"]]
            files |= {name: own[name] for name in content["same"]}
        return cls(content["target"], content["seed"], content["number"], files)
