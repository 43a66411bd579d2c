# SPDX-License-Identifier: Apache-2.0
"""What a drive returns otherwise than it was written is an error, and never another answer."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fault_scenarios import StreamingAttachment
from generation_runs import SETTINGS, attached
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import TinyModel, prompts

from hillinfer.drive.checksums import sums_of
from hillinfer.engine.budget_plan import BudgetPlan
from hillinfer.errors import ColdPoolError, HillInferError
from hillinfer.model_shape import ModelShape
from hillinfer.settings import Settings
from hillinfer.values import ByteSize

IDS, _ = prompts([1300], seed=21)
NEXT, _ = prompts([64], seed=22)
LAYERS = 2
OPTIONS = SETTINGS | {"shadow": "int4"}


def least_budget(model):
    """What leaves nearly no row hot, so that nearly all are read, with room for a fork."""
    options = {name: value for name, value in OPTIONS.items() if name != "dram_budget"}
    chosen = replace(Settings().changed(**options), dram_budget=ByteSize(byte_count=1))
    shape = ModelShape.from_config(model.config, model.dtype)
    return BudgetPlan.with_whole_shadow(shape, chosen, 1400, 2).required_bytes


def small(model, folder):
    return attached(model, folder, shadow="int4", dram_budget=least_budget(model))


# Rows of 1 KiB: what the budget does not use otherwise holds few of them.
TINY = TinyModel(heads="mha", head_dim=64)


@pytest.fixture(scope="module")
def model():
    return TINY.build()


@torch.no_grad()
def read(model, cache, ids, chunk=256):
    for part in torch.split(ids, chunk, dim=1):
        out = model(input_ids=part, past_key_values=cache, logits_to_keep=1)
    return out.logits.view(torch.int32).clone()


def dense(model, cache):
    """A pass over all stored rows; the cache is as before then."""
    fork = cache.fork()
    try:
        return read(model, fork, NEXT)
    finally:
        fork.close()


def decode(model, cache):
    """Steps that gather single rows."""
    fork = cache.fork()
    try:
        steps = [read(model, fork, NEXT[:, at : at + 1]) for at in range(3)]
        return torch.cat(steps)
    finally:
        fork.close()


class OpenFile:
    """A file of this process, changed behind its back."""

    def __init__(self, link):
        self.descriptor = os.open(link, os.O_RDWR)
        self.size = os.fstat(self.descriptor).st_size

    def flip(self, place, bit):
        (byte,) = os.pread(self.descriptor, 1, place)
        os.pwrite(self.descriptor, bytes([byte ^ 1 << bit]), place)
        os.fsync(self.descriptor)

    def close(self):
        os.close(self.descriptor)


def files_in(folder):
    """The open files of the cold pool, whose names are gone, or of a session."""
    found = {}
    for link in sorted(Path("/proc/self/fd").iterdir(), key=lambda one: int(one.name)):
        if link.is_symlink() and str(link.readlink()).startswith(str(folder)):
            file = OpenFile(link)
            if file.size:
                found[str(link.readlink())] = file
            else:
                file.close()
    return list(found.values())


def flips(files, count, seed=0):
    """Places spread over whole files."""
    numbers = np.random.default_rng(seed)
    for _ in range(count):
        file = files[numbers.integers(len(files))]
        yield file, int(numbers.integers(file.size)), int(numbers.integers(8))


def outcomes(files, use, expected, count):
    """How many flips were errors, changed nothing, and gave something else."""
    errors, same, other = [], 0, 0
    for file, place, bit in flips(files, count):
        file.flip(place, bit)
        try:
            found = use()
        except HillInferError as error:
            errors.append(error)
        else:
            same += torch.equal(found, expected)
            other += not torch.equal(found, expected)
        finally:
            file.flip(place, bit)
    return errors, same, other


def assert_clear(errors, what):
    for error in errors:
        assert isinstance(error, ColdPoolError)
        line = str(error)
        assert "bytes at" in line
        assert what in line
        assert "the drive gave other bytes, or somebody changed the file" in line
        assert "weights" not in line
        assert len(line.splitlines()) == 1


@pytest.fixture(scope="module")
def cold(tmp_path_factory):
    """A model, a cache of it whose rows lie on the drive, and the files that they lie in.

    Who changes a file makes it as it was.
    """
    model, folder = TINY.build(), tmp_path_factory.mktemp("cold")
    with small(model, folder) as hill:
        cache = hill.new_cache(expected_tokens=1400, sequences=2)
        read(model, cache, IDS)
        # So that all writes have ended.
        dense(model, cache)
        files = files_in(folder)
        assert len(files) == LAYERS
        assert cache.statistics().cold_read_bytes > 0
        yield model, cache, files
        for file in files:
            file.close()
        cache.close()


@pytest.mark.parametrize("use", [dense, decode])
def test_rows_of_the_cold_pool(cold, use):
    model, cache, files = cold
    expected = use(model, cache)
    errors, same, other = outcomes(files, lambda: use(model, cache), expected, 16)
    assert other == 0
    assert_clear(errors, "of rows of layer")
    assert len(errors) >= (4 if use is dense else 2)
    assert len(errors) + same == 16
    # Once the bytes are right again, so is the answer.
    assert torch.equal(use(model, cache), expected)


def test_without_checksums_flips_give_another_answer(cold, without_checksums):
    """The twin: nobody looks, and many a flip comes through."""
    model, cache, files = cold
    expected = dense(model, cache)
    without_checksums()
    _, _, other = outcomes(files, lambda: dense(model, cache), expected, 16)
    assert other > 2


def test_rows_are_not_saved_that_the_drive_has_lost(cold, tmp_path):
    _, cache, files = cold
    # In the middle of a page, a row and a group.
    files[1].flip(files[1].size // 3 + 77, 3)
    with pytest.raises(ColdPoolError, match=r"rows of layer 1 .* not what was written"):
        cache.save_session(tmp_path / "session")
    assert not (tmp_path / "session").exists()
    files[1].flip(files[1].size // 3 + 77, 3)
    cache.save_session(tmp_path / "session")


def test_pages_of_another_place_are_an_error(cold):
    """As from a drive that mixes up addresses: every byte was written once, elsewhere.

    So many pages that not all of their rows are hot.
    """
    model, cache, files = cold
    pages = 64 * 4096
    first, second = (os.pread(files[0].descriptor, pages, at * pages) for at in (1, 3))
    os.pwrite(files[0].descriptor, second, pages)
    os.fsync(files[0].descriptor)
    with pytest.raises(ColdPoolError, match="not what was written"):
        dense(model, cache)
    os.pwrite(files[0].descriptor, first, pages)
    os.fsync(files[0].descriptor)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """A session; who changes a file of it makes it as it was."""
    tmp_path = tmp_path_factory.mktemp("saved")
    with small(model, tmp_path) as hill:
        cache = hill.new_cache(expected_tokens=1400, sequences=2)
        read(model, cache, IDS)
        cache.save_session(tmp_path / "session")
        cache.close()
    return tmp_path / "session"


def test_rows_of_a_session_in_use(model, saved, tmp_path):
    with small(model, tmp_path) as hill:
        cache = hill.load_session(saved)
        expected = dense(model, cache)
        files = [OpenFile(saved / f"rows-{layer:04}.bin") for layer in range(LAYERS)]
        errors, _, other = outcomes(files, lambda: dense(model, cache), expected, 12)
        assert other == 0
        assert_clear(errors, f"of the session {saved}")
        assert len(errors) >= 3
        for file in files:
            file.close()
        cache.close()


@pytest.mark.parametrize("where", ["cold pool", "session"])
def test_shadows_that_are_streamed(model, saved, tmp_path, where):
    """Of the session where it holds them, else of the cold pool."""
    folder = tmp_path / "streamed"
    folder.mkdir()
    chosen = OPTIONS | {"dram_budget": least_budget(model), "cold_dir": folder}
    with StreamingAttachment(model, Settings().changed(**chosen)) as hill:
        if where == "session":
            cache = hill.load_session(saved)
            files = [OpenFile(saved / "shadow.bin")]
        else:
            cache = hill.new_cache(expected_tokens=1400, sequences=2)
            read(model, cache, IDS)
            decode(model, cache)
            files = files_in(folder)[LAYERS:]
        assert len(files) == 1
        expected = decode(model, cache)
        assert cache.statistics().shadow_read_bytes > 0
        errors, _, other = outcomes(files, lambda: decode(model, cache), expected, 8)
        assert other == 0
        assert_clear(errors, "shadow")
        assert errors
        files[0].close()
        cache.close()


# --- the sum itself -----------------------------------------------------------------------------


def rows_of(seed, count, row_bytes):
    return np.random.default_rng(seed).integers(0, 256, (count, row_bytes), np.uint8)


def test_every_flip_and_every_exchange_changes_a_sum():
    @settings(max_examples=40, deadline=None)
    @given(
        row_bytes=st.sampled_from([64, 128, 768, 4160]),
        seed=st.integers(0, 1000),
        place=st.integers(0, 1 << 20),
    )
    def check(row_bytes, seed, place):
        rows = rows_of(seed, 5, row_bytes)
        order = np.random.default_rng(seed).permutation(5)
        sums = sums_of(rows, order)
        assert sums.dtype == np.uint32
        assert len(set(sums.tolist())) == 5
        assert (sums_of(rows[order].copy(), np.arange(5)) == sums).all()
        changed = rows.copy()
        changed.reshape(-1)[place % changed.size] ^= 1 << place % 8
        assert (sums_of(changed, order) != sums).sum() == 1
        # The same words elsewhere in the row.
        moved = np.roll(rows.reshape(5, -1, 64), 1, axis=1).reshape(5, row_bytes)
        assert row_bytes == 64 or (sums_of(moved, order) != sums).all()
        assert (sums_of(np.zeros_like(rows), order) != sums).all()

    check()


def test_a_sum_is_what_the_native_header_says():
    step, mix, word = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, (1 << 64) - 1
    rows = rows_of(1, 3, 320)
    for row, found in zip(rows, sums_of(rows, np.arange(3)).tolist(), strict=True):
        keys = [mix * (2 * lane + 1) & word for lane in range(8)]
        lanes, plain = list(keys), list(keys)
        for at, own in enumerate(row.view("<u8").tolist()):
            lane = at % 8
            keyed = own ^ keys[lane]
            lanes[lane] = lanes[lane] + (keyed & 0xFFFFFFFF) * (keyed >> 32) & word
            plain[lane] = plain[lane] + own & word
            keys[lane] = keys[lane] + step & word
        total = 0
        for pair in range(0, 8, 2):
            for lane in (*lanes[pair : pair + 2], *plain[pair : pair + 2]):
                total = (total ^ lane) * mix & word
                total ^= total >> 29
        assert (total * step & word) >> 32 == found
