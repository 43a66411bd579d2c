# SPDX-License-Identifier: Apache-2.0
"""A stored prompt brings codes of its values: fewer bytes from the first step on, and no other bit.

Damaged, cut or missing codes, and stores without any, cost time and never an answer.
"""

import errno
import os
import shutil
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from generation_runs import attached_with
from tiny_models import TinyModel, prompts

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.files import PAGE_BYTES
from hillinfer.errors import HillInferWarning
from hillinfer.extents.stored_values import DamagedValuesError, LayerValues, ValueSlots
from hillinfer.model_shape import ModelShape
from hillinfer.reuse.described_model import slot_of
from hillinfer.reuse.model_prompts import ModelPrompts
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.secrecy.key_sources import KeyFile
from hillinfer.store.extent import rows_digest
from hillinfer.store.keys import CHUNK_TOKENS, UNIT_BYTES, ExtentShape, group_sums
from hillinfer.store.store import Store
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import KernelSpec

MIB = 1 << 20
CHUNK = 512
# Two chunks of the store; the token behind them is the first that selects.
HELD, STEPS = 2 * CHUNK_TOKENS, 6
IDS, _ = prompts([HELD + STEPS], seed=5)
CODED = {"exact": 0.02, "exact_floor": 10, "alpha": 0.5}
EXACT = {"exact": 1.0, "alpha": 0.5}
# DRAM has no room for all codes, and for all of them.
SMALL, ROOMY = "2.35MiB", "8MiB"


@pytest.fixture(scope="module")
def model():
    return TinyModel().build()


def attached(model, cold_dir, store, **changes):
    return attached_with(model, cold_dir, {"prompts": ModelPrompts(store, model)}, **changes)


def read(model, cache, ids):
    """Read what a cache does not have of a prompt; return how much that was found."""
    found = cache.look_up(ids, chunk_tokens=CHUNK)
    for part in torch.split(ids[:, found:], CHUNK, dim=1):
        model(part, past_key_values=cache, logits_to_keep=1)
    cache.await_stored()
    return found


def stored_in(folder, model, tokens=HELD, key=None, **changes):
    """Make a store that has a prompt, where there is none, and store it."""
    if not folder.exists():
        Store.create(folder, 64 * MIB, key=key)
    cold = folder.parent / "cold"
    cold.mkdir(exist_ok=True)
    with (
        torch.no_grad(),
        Store(folder, key=key) as store,
        attached(model, cold, store, **changes) as hill,
        hill.new_cache(HELD + STEPS) as cache,
    ):
        read(model, cache, IDS[:, : tokens + 1])
        return store.statistics()


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A store whose prompt has codes; nobody changes it."""
    folder = tmp_path_factory.mktemp("whole") / "store"
    stored_in(folder, model, **CODED)
    return folder


@pytest.fixture(scope="module")
def older(model, tmp_path_factory):
    """The same rows, without codes: as stores were filled before, and are where all are exact."""
    folder = tmp_path_factory.mktemp("older") / "store"
    stored_in(folder, model, **EXACT)
    return folder


@pytest.fixture
def own(whole, tmp_path):
    """One of one's own, to be changed."""
    return shutil.copytree(whole, tmp_path / "own")


def steps(folder, model, cold_dir, budget, drive=None, key=None, **changes):
    """Return the bits of steps behind the prompt that a store has, and what they counted."""
    with (
        torch.no_grad(),
        Store(folder, key=key, calls=drive) as store,
        attached(model, cold_dir, store, dram_budget=budget, **(CODED | changes)) as hill,
        hill.new_cache(HELD + STEPS) as cache,
    ):
        assert cache.look_up(IDS[:, : HELD + 1], chunk_tokens=CHUNK) == HELD
        opened = cache.statistics()
        bits = [
            model(one, past_key_values=cache).logits.numpy().tobytes()
            for one in torch.split(IDS[:, HELD:], 1, dim=1)
        ]
        assert store.counts.failures == 0
        return bits, cache.statistics().minus(opened)


def test_a_stored_prompt_brings_its_codes(whole, older, model, cold_dir):
    """From the first step on, codes come in the place of rows."""
    expected, without = steps(older, model, cold_dir, SMALL)
    bits, small = steps(whole, model, cold_dir, SMALL)
    assert bits == expected
    assert small.coded_arrivals > 0
    # Where buffers are in use a few come as rows.
    assert small.coded_reads > 0.9 * small.coded_arrivals
    assert without.coded_reads < 0.9 * without.coded_arrivals
    assert small.cold_read_bytes < without.cold_read_bytes
    # They are written to the cold pool before the first step, and by none.
    assert small.code_write_bytes == 0 < without.code_write_bytes
    # Where all fit they are in DRAM at once.
    (bits, large), (_, without) = (steps(one, model, cold_dir, ROOMY) for one in (whole, older))
    assert bits == expected
    assert large.coded_arrivals == 0 < without.coded_arrivals


def test_a_prompt_that_was_just_read_has_codes_of_all_its_groups(model, cold_dir, tmp_path):
    """The last group of each pass is there too, though it is still in the tail."""
    Store.create(tmp_path / "store", 64 * MIB)
    with (
        torch.no_grad(),
        Store(tmp_path / "store") as store,
        attached(model, cold_dir, store, dram_budget=SMALL, **CODED) as hill,
        hill.new_cache(HELD + STEPS) as cache,
    ):
        read(model, cache, IDS[:, :HELD])
        before = cache.statistics()
        for one in torch.split(IDS[:, HELD:], 1, dim=1):
            model(one, past_key_values=cache)
        counted = cache.statistics().minus(before)
    assert counted.coded_arrivals > 0
    assert counted.coded_reads > 0.9 * counted.coded_arrivals


# --- what lies behind the planes ---


class Extras:
    """What lies behind the planes of a store's chunks, to be looked at and changed."""

    def __init__(self, folder, model):
        self.slots = slot_of(ModelShape.from_config(model.config, model.dtype)).values
        with Store(folder) as store:
            found = store.find(StoredPrompts(store, model).namespace, IDS[0].tolist())
            with found:
                self.chunks = found.chunks
                self.files = [file.path for file in store.files]

    def at(self, chunk):
        span = chunk.record.span
        return self.files[span.drive], span.offset + chunk.shape.extra_at

    def content(self, chunk):
        path, at = self.at(chunk)
        return np.fromfile(path, np.uint8, self.slots.byte_count, offset=at)

    def write(self, chunk, data):
        path, at = self.at(chunk)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(data.tobytes())

    def sealed(self, chunk, slots):
        """Return content with checksums that fit, as somebody who knows the format would."""
        sums = [int(one) for one in group_sums(slots, np.zeros(len(slots), np.uint32))]
        sheet = chunk.sheet
        page = self.slots.page(rows_digest(sheet.header.key, sheet.row_sums), sums)
        return np.concatenate([page, slots.reshape(-1)])


def test_codes_of_a_store_are_what_is_attended_to(own, model, cold_dir):
    """The twin of all that says that bits are the same: with other codes they are not."""
    expected, _ = steps(own, model, cold_dir, SMALL)
    extras = Extras(own, model)
    for chunk in extras.chunks:
        slots = extras.content(chunk)[PAGE_BYTES:].reshape(-1, extras.slots.slot_bytes).copy()
        assert np.array_equal(extras.sealed(chunk, slots), extras.content(chunk))
        slots[:, -20 * PAGE_BYTES :] ^= 0x11
        extras.write(chunk, extras.sealed(chunk, slots))
    for budget in (SMALL, ROOMY):
        assert steps(own, model, cold_dir, budget)[0] != expected


def flipped(data, other):
    data[PAGE_BYTES + 70_001] ^= 4


def flipped_page(data, other):
    data[20] ^= 4


def missing(data, other):
    data[:] = 0


def cut(data, other):
    data[len(data) // 2 :] = 0


def of_other_rows(data, other):
    data[:] = other


@pytest.mark.parametrize("damage", [flipped, flipped_page, missing, cut, of_other_rows])
def test_damaged_codes_cost_time_and_no_answer(damage, own, whole, model, cold_dir):
    expected, right = steps(whole, model, cold_dir, SMALL)
    extras = Extras(own, model)
    first, second = (extras.content(chunk) for chunk in extras.chunks)
    damage(first, second)
    extras.write(extras.chunks[0], first)
    with pytest.warns(HillInferWarning, match="codes of values in the store .* are left out"):
        bits, damaged = steps(own, model, cold_dir, SMALL)
    assert bits == expected
    assert damaged.cold_read_bytes > right.cold_read_bytes
    # Its rows are whole, and so everybody finds it.
    with Store(own) as store:
        assert store.statistics()["quarantined"] == 0


class ExtraLost(DriveCalls):
    """A drive that does not read from some byte of a file on, to some other."""

    def __init__(self, first, stop):
        self.first, self.stop = first, stop

    def preadv(self, descriptor, into, offset):
        if self.first <= offset < self.stop:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(descriptor, into, offset)

    def read_many(self, way, reads, address):
        done = super().read_many(way, reads, address)
        at = reads.file_offsets
        if done is not None:
            done[(at >= self.first) & (at < self.stop)] = -errno.EIO
        return done


@pytest.mark.parametrize("at", [0, PAGE_BYTES], ids=["page", "slots"])
def test_codes_that_cannot_be_read_cost_no_answer(at, own, model, cold_dir):
    expected, _ = steps(own, model, cold_dir, SMALL)
    extras = Extras(own, model)
    _, start = extras.at(extras.chunks[1])
    drive = ExtraLost(start + at, start + extras.slots.byte_count)
    with (
        torch.no_grad(),
        Store(own, calls=drive) as store,
        attached(model, cold_dir, store, dram_budget=SMALL, **CODED) as hill,
        hill.new_cache(HELD + STEPS) as cache,
    ):
        with pytest.warns(HillInferWarning, match="they cannot be read"):
            assert cache.look_up(IDS[:, : HELD + 1], chunk_tokens=CHUNK) == HELD
        for one, bits in zip(torch.split(IDS[:, HELD:], 1, dim=1), expected, strict=True):
            assert model(one, past_key_values=cache).logits.numpy().tobytes() == bits


class WholePages(DriveCalls):
    """A drive whose file system says nothing of sectors."""

    def read_unit(self, descriptor):
        return PAGE_BYTES


def test_single_rows_of_a_plain_store_come_in_sectors(older, model, cold_dir):
    with Store(older) as store:
        if store.files[0].read_unit == PAGE_BYTES:
            pytest.skip("this file system asks for whole pages")
    bits, sectors = steps(older, model, cold_dir, SMALL, **EXACT)
    expected, pages = steps(older, model, cold_dir, SMALL, WholePages(), **EXACT)
    assert bits == expected
    assert sectors.cold_read_bytes < pages.cold_read_bytes


# --- stores of several kinds ---


def test_a_prompt_without_codes_goes_on_with_some(whole, model, cold_dir, tmp_path):
    """What an older version stored is found as ever; what follows it has codes."""
    expected, right = steps(whole, model, cold_dir, SMALL)
    stored_in(tmp_path / "store", model, CHUNK_TOKENS, **EXACT)
    stored_in(tmp_path / "store", model, HELD, **CODED)
    first, second = Extras(tmp_path / "store", model).chunks
    assert first.shape.extra_bytes == 0 < second.shape.extra_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error", HillInferWarning)
        bits, mixed = steps(tmp_path / "store", model, cold_dir, SMALL)
    assert bits == expected
    assert mixed.cold_read_bytes > right.cold_read_bytes


def test_all_exact_leaves_codes_in_the_store(whole, older, model, cold_dir):
    bits, counted = steps(whole, model, cold_dir, SMALL, **EXACT)
    assert bits == steps(older, model, cold_dir, SMALL, **EXACT)[0]
    assert counted.coded_tokens == 0


def test_an_encrypted_store_keeps_no_codes(older, model, cold_dir, tmp_path):
    key = KeyFile(tmp_path / "key")
    stored_in(tmp_path / "store", model, key=key, **CODED)
    with Store(tmp_path / "store", key=key) as store:
        found = store.find(StoredPrompts(store, model).namespace, IDS[0].tolist())
        with found:
            assert [chunk.shape.extra_bytes for chunk in found.chunks] == [0, 0]
    bits, _ = steps(tmp_path / "store", model, cold_dir, SMALL, key=key)
    assert bits == steps(older, model, cold_dir, SMALL)[0]


@pytest.mark.parametrize("kind", ["codes", "none", "mixed"])
def test_an_index_that_is_made_anew_knows_the_room_of_codes(kind, model, cold_dir, tmp_path):
    """Extents of either size lie one behind the other, and are found by their headers."""
    folder = tmp_path / "store"
    if kind != "codes":
        stored_in(folder, model, CHUNK_TOKENS, **EXACT)
    told = stored_in(folder, model, **(EXACT if kind == "none" else CODED))
    before = Extras(folder, model)
    for left in folder.glob("index.sqlite*"):
        left.unlink()
    with Store(folder) as store:
        again = store.statistics()
        names = "chunks", "tokens", "chunk_bytes", "waste_bytes", "free_bytes"
        assert [again[name] for name in names] == [told[name] for name in names]
    after = Extras(folder, model)
    for one, other in zip(before.chunks, after.chunks, strict=True):
        assert one.record.span == other.record.span
        assert one.shape == other.shape
    with warnings.catch_warnings():
        warnings.simplefilter("error", HillInferWarning)
        steps(folder, model, cold_dir, SMALL)


def test_codes_count_in_the_size_of_a_store_and_not_as_waste(whole, older, model):
    with Store(whole) as store, Store(older) as other:
        own, without = store.statistics(), other.statistics()
    extras = Extras(whole, model)
    sizes = {chunk.shape.byte_count for chunk in extras.chunks}
    plain = {chunk.shape.byte_count for chunk in Extras(older, model).chunks}
    assert own["chunk_bytes"] == sum(sizes) * 2
    assert sum(sizes) >= sum(plain) + extras.slots.byte_count - UNIT_BYTES
    assert own["waste_bytes"] == without["waste_bytes"]


# --- the format ---

# A head size whose exponents end at no multiple of four.
SPEC = KernelSpec(64, 3, 3)


def values(seed):
    random = np.random.default_rng(seed)
    codes = random.integers(0, 256, (CHUNK_TOKENS, 99), np.uint8)
    exponents = random.integers(-14, 17, (3, 64)).astype(np.int8)
    means = random.integers(-(1 << 22), 1 << 22, (3, 64)).astype(np.int32)
    return LayerValues(codes, ChannelStatistics(exponents, means))


def test_a_slot_gives_back_what_it_was_given():
    slots, own = ValueSlots(SPEC, 2), values(1)
    memory = np.full(slots.slot_bytes, 255, np.uint8)
    slots.pack(own, memory)
    found = slots.unpack(memory)
    assert np.array_equal(found.codes, own.codes)
    assert np.array_equal(found.statistics.exponents, own.statistics.exponents)
    assert np.array_equal(found.statistics.means, own.statistics.means)
    # The twin.
    memory[slots.slot_bytes // 2] ^= 1
    assert not np.array_equal(slots.unpack(memory).codes, own.codes)


def test_a_page_tells_sums_of_its_rows_alone():
    slots = ValueSlots(SPEC, 2)
    digest, other = bytes(range(32)), bytes(range(1, 33))
    page = slots.page(digest, [7, 1 << 31])
    assert slots.sums(page, digest) == [7, 1 << 31]
    assert slots.sums(slots.page(digest, []), digest) == []
    for told, wanted in ((page, other), (ValueSlots(SPEC, 3).page(digest, [1, 2, 3]), digest)):
        with pytest.raises(DamagedValuesError):
            slots.sums(told, wanted)
    for place in (0, 9, 41, 45, 50, PAGE_BYTES - 1):
        changed = page.copy()
        changed[place] ^= 1
        with pytest.raises(DamagedValuesError):
            slots.sums(changed, digest)


@pytest.mark.parametrize("layers", [1000, 1100])
def test_more_layers_than_a_page_has_sums_of_have_no_room(layers):
    slots = ValueSlots(SPEC, layers)
    assert bool(slots.byte_count) == (layers == 1000)
    with nullcontext() if layers == 1000 else pytest.raises(ValueError, match="broadcast"):
        slots.page(bytes(32), [0] * layers)


def test_extents_with_extra_room_have_all_planes_where_others_have_them():
    plain = ExtentShape(2, 768, PAGE_BYTES)
    extra = ExtentShape(2, 768, PAGE_BYTES, 0, 5 * UNIT_BYTES)
    assert extra.units == plain.units + 5
    assert (extra.rows_at(1, 3), extra.tags_at) == (plain.rows_at(1, 3), plain.tags_at)
