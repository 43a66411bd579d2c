# SPDX-License-Identifier: Apache-2.0
"""How many files, lines and lines of code the product's rooms have, now and at an older commit.

The first line has the rooms of the table that the rebuild of the house was measured by. With
`--since` it is told which of its files git knows from that commit on, renamed ones too, which were
added later, and which commits wrote the lines of today, by what their subjects speak of.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = "host/hillinfer/"
TABLE = (
    "hf", "engine", "kv", "sessions", "shadow", "scoring", "devices", "drive", "attention", "gpu",
    "generate", "models", "doctor", "trace", "cli", "native",
)  # fmt: skip
GROUPS = (
    TABLE,
    (
        "store",
        "extents",
        "reuse",
        "schedule",
        "secrecy",
        "pruning",
        "rates",
        "projections",
        "system",
    ),
    ("forms", "placement", "catalogue", "serve", "harness"),
)

STANDING, OTHER = "as at that commit", "others"
# Words of what issues after the rebuild are about.
TOPICS = {
    "coded tokens": r"code[sd]?\b|exact|value|split|precision|weigh|KL\b",
    "stores, forms, secrecy": r"stor|prefix|extent|seal|encrypt|cipher|secre|form|document|placed"
    r"|placement|catalog|chunk|namespace|checksum",
    "pruning": r"prun|band|stage|cut|among",
    "servers, hosts, vLLM": r"serv|host|vllm|chat|request|stream|conversation|OpenAI",
    "cards that cast rows": r"casts?\b|FP16 rows|device score what",
}


@dataclass(frozen=True)
class Size:
    """What some files are.

    Parameters
    ----------
    files, lines, code
        How many; code is neither blank, a comment nor a docstring.
    """

    files: int = 0
    lines: int = 0
    code: int = 0

    def __add__(self, other: Size) -> Size:
        """Return both together."""
        return Size(self.files + other.files, self.lines + other.lines, self.code + other.code)

    @classmethod
    def of(cls, source: str) -> Size:
        """Return the size of one module."""
        lines = source.splitlines()
        code = {at for at, line in enumerate(lines, 1) if line.strip() and line.strip()[0] != "#"}
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return cls(1, len(lines), len(code))


def git(*arguments: str) -> str:
    """Return what git prints."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout


def room_of(path: str) -> str:
    """Return the room of a file of the product; of single modules nothing."""
    first, _, rest = path.removeprefix(PRODUCT).partition("/")
    return first if rest else ""


def sizes(paths: Iterable[str], read: Callable[[str], str]) -> Mapping[str, Size]:
    """Return the sizes of rooms."""
    found: dict[str, Size] = {}
    for path in paths:
        if path.startswith(PRODUCT) and path.endswith(".py"):
            room = room_of(path)
            found[room] = found.get(room, Size()) + Size.of(read(path))
    return found


def total(found: Mapping[str, Size], rooms: Iterable[str]) -> Size:
    """Return what rooms have together."""
    return sum((found.get(room, Size()) for room in rooms), Size())


def line(name: str, size: Size) -> str:
    """Return a line of the table."""
    return f"| {name} | {size.files} | {size.lines:,} | {size.code:,} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--since", metavar="COMMIT", help="tell what was there at a commit, too")
    options = parser.parse_args()
    now = git("ls-files", PRODUCT).split()
    found = sizes(now, _read)
    print("| rooms | files | lines | of them code |\n|---|---|---|---|")
    for rooms in GROUPS:
        print(line(", ".join(f"`{room}`" for room in rooms), total(found, rooms)))
    rest = sorted(set(found) - {room for rooms in GROUPS for room in rooms})
    print(line("single modules", total(found, rest)))
    print(line("all", total(found, found)))
    if options.since is None:
        return
    then = git("ls-tree", "-r", "--name-only", options.since, PRODUCT).split()
    before = sizes(then, lambda path: git("show", f"{options.since}:{path}"))
    changes = git("diff", "-M", "--name-status", options.since, "--", PRODUCT).splitlines()
    added = {change.split("\t")[-1] for change in changes if change[0] == "A"}
    parts = (
        (f"at {options.since}", total(before, TABLE)),
        ("known since then", total(sizes(set(now) - added, _read), TABLE)),
        ("added later", total(sizes(added & set(now), _read), TABLE)),
    )
    print("\n| first line | files | lines | of them code |\n|---|---|---|---|")
    for name, size in parts:
        print(line(name, size))
    written = [
        by_topic(options.since, one) for one in now if room_of(one) in TABLE and is_code(one)
    ]
    print("\n| lines of the first line by the commit that wrote them | lines |\n|---|---|")
    for topic in (STANDING, *TOPICS, OTHER):
        print(f"| {topic} | {sum(one[topic] for one in written):,} |")
    half = sum(2 * one[STANDING] >= one.total() > 0 for one in written)
    print(f"\n{half} files are half or more what was there at {options.since}.")


def is_code(path: str) -> bool:
    """Say whether a file is a module of Python's."""
    return path.endswith(".py")


def by_topic(commit: str, path: str) -> Counter[str]:
    """Return how many lines of a module stand since a commit, and of what later ones speak.

    Lines that were only moved stand. A commit's topic is the first with a word in its subject.
    """
    known = set(git("rev-list", commit).split())
    subjects = dict(one.split("\t", 1) for one in git("log", "--format=%H%x09%s").splitlines())
    found = Counter[str]()
    for one in git("blame", "-s", "-l", "-w", "-M", "-C", "--root", path).splitlines():
        written = one.split()[0]
        words = (name for name, word in TOPICS.items() if re.search(word, subjects[written], re.I))
        found[STANDING if written in known else next(words, OTHER)] += 1
    return found


def _read(path: str) -> str:
    return (ROOT / path).read_text()


if __name__ == "__main__":
    main()
