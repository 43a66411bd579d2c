# SPDX-License-Identifier: Apache-2.0
"""Rows of vLLM's KV blocks: whatever way a block lies, rows come back as they went there."""

import os

import numpy as np
import pytest
import torch

from hillinfer.drive.calls import DriveCalls, Reads
from hillinfer.native.library import native_library
from hillinfer.native.structures import ReadWay
from hillinfer_vllm.kv_blocks import FIELDS, KvBlocks, UnknownBlocksError

BLOCK, HEADS, DIM = 32, 3, 16


def by_rows(keys, values, key_half, value_half, slots):
    """As on s390x: tokens one behind the other."""
    for states, half in ((keys, key_half), (values, value_half)):
        for state, slot in zip(states, slots.tolist(), strict=True):
            half[slot // BLOCK, :, slot % BLOCK] = state


def by_columns(keys, values, key_half, value_half, slots):
    """As with AVX-512: keys are transposed, values are not."""
    for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
        block, at = divmod(slot, BLOCK)
        columns = key_half[block].view(HEADS, DIM, BLOCK)
        columns[:, :, at] = key
        value_half[block, :, at] = value


def by_pairs(keys, values, key_half, value_half, slots):
    """As with AMX: pairs of channels of 16 tokens together, and pairs of tokens of values."""
    for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
        block, at = divmod(slot, BLOCK)
        tiles = key_half[block].view(HEADS, BLOCK // 16, DIM // 2, 16, 2)
        tiles[:, at // 16, :, at % 16] = key.view(HEADS, DIM // 2, 2)
        pairs = value_half[block].view(HEADS, BLOCK // 2, DIM, 2)
        pairs[:, at // 2, :, at % 2] = value


def lossy(keys, values, key_half, value_half, slots):
    """As no one does: the last channel is gone."""
    by_rows(keys, values, key_half, value_half, slots)
    key_half[..., -1] = 0


LAYOUTS = {"rows": by_rows, "columns": by_columns, "pairs": by_pairs}
TYPES = [torch.bfloat16, torch.float16, torch.float32]
# First token and how many: whole blocks, parts of one, and over a border.
PARTS = [(0, 128), (32, 64), (0, 16), (20, 50), (96, 64)]
NUMBERS = (7, 2, 5, 0, 9)


def blocks_of(put, dtype):
    blocks = torch.zeros((10, HEADS, BLOCK, 2 * DIM), dtype=dtype)
    return blocks, KvBlocks(blocks, put)


def random_rows(count, row_bytes, dtype, seed=0):
    states = torch.randn((count, 2 * HEADS * DIM), generator=torch.Generator().manual_seed(seed))
    rows = np.zeros((count, row_bytes), np.uint8)
    codes = states.to(dtype).view(torch.uint8).numpy()
    rows[:, : codes.shape[1]] = codes
    return rows


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("first", "count"), PARTS)
@pytest.mark.parametrize("put", LAYOUTS.values(), ids=LAYOUTS)
def test_rows_come_back_as_they_went(put, first, count, dtype):
    blocks, own = blocks_of(put, dtype)
    rows = random_rows(count, own.row_bytes, dtype)
    own.scatter(rows, first, NUMBERS)
    found = np.ones_like(rows)
    own.gather(first, NUMBERS, found)
    assert np.array_equal(found, rows)
    # The twin: one bit of one block, and the rows are others.
    codes = blocks[NUMBERS[first // BLOCK]].view(torch.uint8)
    codes.view(-1)[:] ^= 1
    own.gather(first, NUMBERS, found)
    assert not np.array_equal(found, rows)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("put", LAYOUTS.values(), ids=LAYOUTS)
def test_blocks_are_as_the_engine_writes_them_itself(put, dtype):
    """Attention reads what was loaded where it looks for what it computed."""
    blocks, own = blocks_of(put, dtype)
    rows = random_rows(2 * BLOCK, own.row_bytes, dtype)
    own.scatter(rows, BLOCK, NUMBERS)
    expected = torch.zeros_like(blocks)
    codes = torch.from_numpy(rows).view(dtype)[:, : 2 * HEADS * DIM]
    keys, values = codes.view(-1, 2, HEADS, DIM).unbind(1)
    halves = expected.view(10, HEADS, 2 * BLOCK, DIM).chunk(2, dim=2)
    slots = torch.tensor([NUMBERS[1 + at // BLOCK] * BLOCK + at % BLOCK for at in range(2 * BLOCK)])
    put(keys, values, *halves, slots)
    assert torch.equal(blocks, expected)
    expected[NUMBERS[1], 0, 0, 0] += 1
    assert not torch.equal(blocks, expected)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("put", LAYOUTS.values(), ids=LAYOUTS)
def test_groups_are_checked_as_they_land_and_only_what_is_wanted_does(put, dtype):
    _, own = blocks_of(put, dtype)
    rows = random_rows(128, own.row_bytes, dtype)
    salts = np.array([5, 77], np.uint32)
    # Of a prompt's tokens 64 to 191 the blocks from 96 up to 160 alone.
    wide = (*NUMBERS, 1)
    sums = own.land(rows, 64, range(96, 160), wide, salts)
    expected = native_library().crc32c(rows.reshape(2, -1), salts)
    assert np.array_equal(sums, expected)
    found = np.zeros_like(rows)
    own.gather(64, wide, found)
    assert np.array_equal(found[32:96], rows[32:96])
    assert not found[:32].any()
    assert not found[96:].any()
    # The twin: another bit, another sum; the other group keeps its own.
    rows[3, 5] ^= 1
    other = own.land(rows, 64, range(96, 160), wide, salts)
    assert other[0] != sums[0]
    assert other[1] == sums[1]


def wide_blocks(dtype):
    """Blocks whose lines are whole lines of a processor's cache, keys by columns."""

    def put(keys, values, key_half, value_half, slots):
        for key, value, at in zip(keys, values, slots.tolist(), strict=True):
            columns = key_half[at // 128].view(HEADS, 64, 128)
            columns[:, :, at % 128] = key
            value_half[at // 128, :, at % 128] = value

    blocks = torch.zeros((10, HEADS, 128, 128), dtype=dtype)
    return blocks, KvBlocks(blocks, put)


def wide_rows(count, dtype):
    states = torch.randn((count, 2, HEADS, 64), generator=torch.Generator().manual_seed(0))
    return states.to(dtype)


def wide_found(blocks, first, count):
    """Return what lies in blocks, as rows: (tokens, 2, heads, channels)."""
    halves = blocks[list(NUMBERS)].view(len(NUMBERS), HEADS, 2, -1)
    keys = halves[:, :, 0].reshape(-1, HEADS, 64, 128).permute(0, 3, 1, 2)
    values = halves[:, :, 1].reshape(-1, HEADS, 128, 64).permute(0, 2, 1, 3)
    rows = torch.stack([one.reshape(-1, HEADS, 64) for one in (keys, values)], 1)
    return rows[first : first + count]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("first", "count"), [(0, 256), (64, 192), (32, 320)])
def test_lines_that_go_past_the_cache_are_where_others_are(first, count, dtype):
    blocks, own = wide_blocks(dtype)
    states = wide_rows(count, dtype)
    own.scatter(states.view(torch.uint8).reshape(count, -1).numpy(), first, NUMBERS)
    assert torch.equal(wide_found(blocks, first, count), states)
    assert not wide_found(blocks, first + count, 1000).any()
    states[70, 1, 2, 5] += 1
    assert not torch.equal(wide_found(blocks, first, count), states)


@pytest.mark.parametrize("groups", [(2, 2, 2, 1), (3, 1, 1, 2)], ids=["alike", "one is longest"])
def test_threads_that_read_place_what_they_read(tmp_path, groups):
    blocks, own = wide_blocks(torch.bfloat16)
    count = 64 * sum(groups)
    states = wide_rows(count, torch.bfloat16)
    rows = states.view(torch.uint8).reshape(count, -1).numpy()
    path = tmp_path / "rows"
    path.write_bytes(rows.tobytes())
    ends = np.cumsum(groups)
    starts = ends - np.array(groups)
    unit = 64 * own.row_bytes
    reads = Reads(starts * unit, starts * unit, np.array(groups) * unit)
    salts = np.arange(sum(groups), dtype=np.uint32)
    sums = np.zeros_like(salts)
    numbers = np.array(NUMBERS, np.int64)
    given = np.stack([own.fields(range(64, count), numbers)] * len(groups))
    memory = np.zeros(count * own.row_bytes, np.uint8)
    for name, amounts in (
        ("rows", starts * unit + memory.ctypes.data),
        ("tokens", 64 * np.array(groups)),
        ("position", 64 * starts),
        ("salts", 4 * starts + salts.ctypes.data),
        ("sums", 4 * starts + sums.ctypes.data),
    ):
        given[:, FIELDS[name]] = amounts

    def read():
        calls = DriveCalls()
        descriptor = calls.open(path, os.O_RDONLY)
        way = ReadWay(descriptor=descriptor, threads=3)
        results = calls.read_to_blocks(way, reads, memory.ctypes.data, given.copy())
        calls.close(descriptor)
        assert results.tolist() == (np.array(groups) * unit).tolist()
        return sums.copy()

    expected = native_library().crc32c(rows.reshape(len(salts), -1), salts)
    assert np.array_equal(read(), expected)
    assert torch.equal(wide_found(blocks, 64, count - 64), states[64:])
    assert not wide_found(blocks, 0, 64).any()
    # The twin: a bit of the second read, and the sum of its first group.
    with path.open("r+b") as file:
        file.seek(groups[0] * unit)
        file.write(bytes([rows[64 * groups[0], 0] ^ 1]))
    assert np.flatnonzero(read() != expected).tolist() == [groups[0]]


@pytest.mark.parametrize(
    ("numbers", "first"), [((7, 2), 64), ((7, -1, 5), 32), ((7, 10, 5), 32), ((), 0)]
)
def test_rows_go_to_no_block_that_is_not_there(numbers, first):
    _, own = blocks_of(by_columns, torch.bfloat16)
    rows = random_rows(BLOCK, own.row_bytes, torch.bfloat16)
    own.scatter(rows, 32, (7, 2))
    with pytest.raises(IndexError, match="block"):
        own.scatter(rows, first, numbers)
    with pytest.raises(IndexError, match="block"):
        own.gather(first, numbers, rows)


def test_what_does_not_come_back_is_refused():
    with pytest.raises(UnknownBlocksError, match="do not come back"):
        blocks_of(lossy, torch.bfloat16)


@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [
        ((4, BLOCK, DIM), torch.bfloat16, "of shape"),
        ((4, HEADS, BLOCK, 2 * DIM), torch.uint8, "type torch.uint8"),
        ((1, 1, 512, 2 * DIM), torch.bfloat16, "256 at most"),
    ],
)
def test_other_blocks_are_refused(shape, dtype, said):
    with pytest.raises(UnknownBlocksError, match=said):
        KvBlocks(torch.zeros(shape, dtype=dtype), by_rows)
