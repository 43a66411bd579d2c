# SPDX-License-Identifier: Apache-2.0
"""Parts of a long table: together the whole, each line once."""

import argparse

import pytest

from hillinfer_hw.shard import Shard, add_shard

TABLE = [f"row {number}" for number in range(11)]


@pytest.mark.parametrize("count", [1, 2, 4, 11, 20])
def test_the_parts_are_the_table(count):
    parts = [Shard(number + 1, count).part(TABLE) for number in range(count)]
    assert sorted(row for part in parts for row in part) == sorted(TABLE)
    # The twin: without one of the parts they are not.
    assert sorted(row for part in parts[1:] for row in part) != sorted(TABLE)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_option_reads_a_part_and_without_it_the_table_is_whole():
    parser = argparse.ArgumentParser()
    add_shard(parser)
    assert parser.parse_args(["--shard", "2/4"]).shard == Shard(2, 4)
    assert parser.parse_args([]).shard.part(TABLE) == TABLE


@pytest.mark.parametrize("text", ["0/4", "5/4", "2", "2/", "/2", "a/b", "-1/2", "1/0"])
def test_what_is_no_part_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="no part like 2/4"):
        Shard.parse(text)
