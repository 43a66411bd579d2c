# SPDX-License-Identifier: Apache-2.0
"""Parts of a long table, so that several machines or sittings can run it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Shard:
    """Every so manieth line of a table, as `2/4` says it: the second of four parts.

    Parameters
    ----------
    number
        Which part, from 1.
    of
        How many there are.
    """

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `NUMBER/OF`.

        Raises
        ------
        argparse.ArgumentTypeError
            Where it is none.
        """
        number, _, count = text.partition("/")
        if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
            raise argparse.ArgumentTypeError(f"{text!r} is no part like 2/4")
        return cls(int(number), int(count))

    def part(self, table: Sequence[_Item]) -> list[_Item]:
        """Return this part; all parts together are the table, and none has a line twice."""
        return list(table[self.number - 1 :: self.of])


def add_shard(parser: argparse.ArgumentParser) -> None:
    """Add the option `--shard`; without it the whole table runs."""
    parser.add_argument(
        "--shard", type=Shard.parse, default=Shard(1, 1), metavar="2/4", help="part of the table"
    )
