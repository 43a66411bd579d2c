# SPDX-License-Identifier: Apache-2.0
"""The pages say what they are for, in short sentences, and name only what exists.

Each rule is a function from a page's text to its faults; a twin page breaks each rule once.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
)
LINKING = sorted(
    {*PAGES, "CHANGELOG.md", "bitstreams/README.md", "hw/rtl/README.md"},
)
ROOTS = ("bitstreams", "docs", "host", "hw", "sw_model", "tests", "tools")
MOST_WORDS = 40
MOST_LEAD_LINES = 3
MOST_LEAD_WORDS = 60

FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
FORMULA = re.compile(r"\$\$.*?\$\$", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")
CODE = re.compile(r"``(.+?)``|`([^`]+)`")
HEADING = re.compile(r"^#{1,6} +(.*?)\s*$")
ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+")
# A full stop ends a sentence before white space and a capital, a digit, code or a bracket.
ENDING = re.compile(r"(?<=[.!?])[\"'”)*_]*\s+(?=[\"'“(*_]*[A-Z0-9`αβΔ])")
SHORT_FORMS = re.compile(r"\b(e\.g|i\.e|vs|cf|No|Fig|Sec|approx)\.\s", re.IGNORECASE)


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def without_code_blocks(text):
    return FORMULA.sub("", COMMENT.sub("", FENCE.sub("", text)))


def blocks(text):
    """Return paragraphs and list items, each in one line: no code, tables, headings or pictures."""
    found = [[]]
    indented = False
    previous = ""
    for line in without_code_blocks(text).splitlines():
        stripped = line.strip()
        in_list = bool(found[-1]) or not indented
        code = line.startswith("    ") and not previous and not _continues(found, line)
        indented = code or (indented and line.startswith("    "))
        previous = stripped
        if not stripped or stripped.startswith(("|", "#", "![", "<")) or (indented and in_list):
            found.append([])
            continue
        if ITEM.match(line):
            found.append([ITEM.sub("", line).strip()])
        else:
            found[-1].append(stripped)
    return [" ".join(block) for block in found if block]


def _continues(found, line):
    """Return whether an indented line after an empty one goes on with a list item."""
    return False


def sentences(text):
    for block in blocks(text):
        plain = LINK.sub(lambda match: match[1], block)
        plain = CODE.sub("`code`", plain)
        plain = SHORT_FORMS.sub(lambda match: match[1] + " ", plain)
        yield from ENDING.split(plain)


def words(sentence):
    return [word for word in sentence.split() if re.search(r"\w", word)]


def long_sentences(text):
    return [
        f"{len(words(sentence))} words: {sentence}"
        for sentence in sentences(text)
        if len(words(sentence)) > MOST_WORDS
    ]
