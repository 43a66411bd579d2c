# SPDX-License-Identifier: Apache-2.0
"""Print a long English text that every machine with Python has: parts of the language reference.

The standard library carries the text of Python's interactive help. The topics below come to about
30,000 characters, and the answer to the question of `make run` stands in the middle of them.
"""

from __future__ import annotations

import sys
from pydoc_data import topics

CHOSEN = (
    "assert",
    "assignment",
    "break",
    "class",
    "continue",
    "del",
    "exceptions",
    "for",
    "global",
    "if",
    "nonlocal",
    "pass",
    "raise",
    "return",
)

# About 7,000 tokens, whatever the version of Python.
MOST_CHARACTERS = 30_000


def main() -> None:
    """Write the document to standard output."""
    text = "\n\n".join(topics.topics[name].strip() for name in CHOSEN)
    sys.stdout.write(text[:MOST_CHARACTERS] + "\n")


if __name__ == "__main__":
    main()
