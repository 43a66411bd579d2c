# SPDX-License-Identifier: Apache-2.0
"""Pages of a cold pool come back as they were sealed last, at their place, or not at all."""

import numpy as np
import pytest

from hillinfer.drive.files import aligned_buffer
from hillinfer.errors import BudgetError
from hillinfer.memory_budget import Accountant, Part
from hillinfer.secrecy.cold_pages import TABLE_BYTES, PoolKey, table_bytes
from hillinfer.secrecy.library import WrongTagError

PAGE = 4096


@pytest.fixture
def accountant():
    return Accountant(1 << 20)


@pytest.fixture
def key(accountant):
    return PoolKey(accountant)


def covered(key, pages=8):
    made = key.file()
    made.cover(pages * PAGE)
    return made


def random_pages(count, seed=0):
    data = aligned_buffer(count * PAGE)[: count * PAGE]
    data[:] = np.random.default_rng(seed).integers(0, 256, len(data), np.uint8)
    return data


def sealed(pages, at, data):
    copy = aligned_buffer(len(data))[: len(data)]
    copy[:] = data
    pages.seal(at, copy)
    return copy


def opened(pages, at, data):
    copy = aligned_buffer(len(data))[: len(data)]
    copy[:] = data
    pages.open(at, copy)
    return copy


def test_what_was_sealed_is_opened(key):
    pages, data = covered(key), random_pages(4)
    closed = sealed(pages, 2 * PAGE, data)
    assert (closed != data).mean() > 0.9
    assert np.array_equal(opened(pages, 2 * PAGE, closed), data)
    assert np.array_equal(opened(pages, 3 * PAGE, closed[PAGE : 3 * PAGE]), data[PAGE : 3 * PAGE])


def test_no_two_pages_are_sealed_alike(key, accountant):
    """Equal bytes at two places, in two files, under two keys, and twice at one place."""
    zeros = np.zeros(2 * PAGE, np.uint8)
    pages, other, foreign = covered(key), covered(key), covered(PoolKey(accountant))
    made = [sealed(one, at, zeros) for one in (pages, other, foreign) for at in (0, 2 * PAGE)]
    made += [sealed(pages, 0, zeros) for _ in range(3)]
    halves = [half.tobytes() for one in made for half in np.split(one, 2)]
    assert len(set(halves)) == len(halves)


@pytest.mark.parametrize("bit", [0, 8 * PAGE - 1, 8 * PAGE, 16 * PAGE - 1])
def test_a_flipped_bit_is_found(key, bit):
    pages = covered(key)
    closed = sealed(pages, 0, random_pages(2))
    closed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WrongTagError, match=f"page {bit // 8 // PAGE}"):
        opened(pages, 0, closed)


def test_a_page_of_an_older_write_another_place_or_file_does_not_open(key):
    pages, other, data = covered(key), covered(key), random_pages(1)
    old = sealed(pages, 0, data)
    elsewhere, beside = sealed(pages, PAGE, data), sealed(other, 0, data)
    new = sealed(pages, 0, data)
    for one in (old, elsewhere, beside):
        with pytest.raises(WrongTagError):
            opened(pages, 0, one)
    assert np.array_equal(opened(pages, 0, new), data)


def test_what_was_never_written_does_not_open(key):
    with pytest.raises(WrongTagError):
        opened(covered(key), 0, np.zeros(PAGE, np.uint8))


def test_tags_stay_while_tables_grow_and_are_counted(key, accountant):
    pages, data = covered(key, 64), random_pages(64)
    assert accountant.held()[Part.OTHER] == table_bytes(64 * PAGE) == 64 * TABLE_BYTES
    closed = sealed(pages, 0, data)
    before = pages.seals
    pages.cover(1000 * PAGE)
    assert accountant.held()[Part.OTHER] == table_bytes(1000 * PAGE)
    assert np.array_equal(opened(pages, 0, closed), data)
    # Whoever reads with the old tables goes on.
    assert before.count == 1
    with pytest.raises(BudgetError):
        pages.cover(1 << 30)
    assert accountant.held()[Part.OTHER] == table_bytes(1000 * PAGE)
    assert np.array_equal(opened(pages, 0, closed), data)


def test_an_erased_key_opens_nothing(key):
    pages = covered(key)
    closed = sealed(pages, 0, random_pages(1))
    key.erase()
    with pytest.raises(WrongTagError):
        opened(pages, 0, closed)


def test_half_pages_and_places_without_tags_are_refused(key):
    pages = covered(key, 64)
    for at, size in ((0, 100), (100, PAGE), (64 * PAGE, PAGE)):
        with pytest.raises(ValueError, match="whole pages"):
            pages.seal(at, np.zeros(size, np.uint8))
