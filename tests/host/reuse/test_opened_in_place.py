# SPDX-License-Identifier: Apache-2.0
"""Rows of a stored prompt stay in the store: caches read them there, and write theirs once."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from generation_runs import SETTINGS
from placement_matrix import Budget, pairs
from placement_matrix import Path as RowPath
from placement_matrix import Way as RowWay
from slow_promotions import slow_promotions
from tiny_models import TinyModel, prompts
from transformers import DynamicCache
from waiting import until

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.files import PAGE_BYTES
from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.engine.runtime import Runtime
from hillinfer.generate.answering import Generation
from hillinfer.generate.tokens import Sampling
from hillinfer.hf.attach import Attachment
from hillinfer.kv.pool_policies import POOL_POLICIES
from hillinfer.memory_budget import Part
from hillinfer.model_shape import ModelShape
from hillinfer.reuse.model_prompts import ModelPrompts
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.reuse.ways import PassRates, Way
from hillinfer.secrecy.key_sources import KeyFile
from hillinfer.settings import Settings
from hillinfer.shadow.store import STREAM_BUFFERS, shadow_bytes
from hillinfer.store.keys import Reuse
from hillinfer.store.maintenance import Parts
from hillinfer.store.store import Store
from hillinfer.values import ByteSize
from hillinfer_model.choices import KeyMode
from hillinfer_model.kernel_spec import GROUP_TOKENS

MIB = 1 << 20
# Few passes: what a pass costs depends little on how many tokens it reads.
CHUNK = 256
# Two chunks of the store, and a tail.
TOKENS, STORED = 2400, 2304
# One chunk, and a tail.
FEW, FEW_STORED = 1300, 1280
NEW = 4


SEALED_TOO = pytest.mark.parametrize("store", ["plain", "encrypted"], indirect=True)


@pytest.fixture
def store(request, tmp_path):
    """A store, with a key where a test wants it so."""
    with created(tmp_path, getattr(request, "param", "plain")) as opened:
        yield opened


def created(folder, kind):
    key = KeyFile(folder / "key") if kind == "encrypted" else None
    Store.create(folder / "store", 64 * MIB, key=key)
    return Store(folder / "store", key=key)


@pytest.fixture(scope="module")
def stores_of_a_prompt(model, tmp_path_factory):
    """Folders with a store, and its key, that hold the long prompt; to be copied."""
    made = {}
    for kind in ("plain", "encrypted"):
        folder = made[kind] = tmp_path_factory.mktemp(kind)
        with created(folder, kind) as store, attached(model, folder) as hill, torch.no_grad():
            generation = through(model, hill, store)
            generation.read(ids_of(TOKENS))
            assert told(generation).stored_tokens == STORED
            generation.close()
    return made


@pytest.fixture
def filled(request, stores_of_a_prompt, tmp_path):
    """A store of one of both kinds that holds the long prompt."""
    folder = shutil.copytree(stores_of_a_prompt[request.param], tmp_path / "filled")
    key = KeyFile(folder / "key") if request.param == "encrypted" else None
    with Store(folder / "store", key=key) as opened:
        yield opened


@pytest.fixture(scope="module")
def model():
    return TinyModel(head_dim=32).build()


def ids_of(tokens, seed=0):
    ids, _ = prompts([tokens])
    return [(one + seed) % 60 for one in ids[0].tolist()]


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, and the bits of the logits that the last of them was taken from."""

    tokens: list[int]
    bits: bytes


def answer(model, generation, ids, tokens=NEW):
    """Read a prompt and answer; the bits are those of one token more."""
    generation.read(ids)
    made = list(generation.decode(Sampling(), tokens, frozenset()))
    with torch.no_grad():
        output = model(torch.tensor([made[-1:]]), past_key_values=generation.cache)
    return Answer(made, output.logits.float().numpy().tobytes())


def small(cold_dir, **changes):
    # Long prompts in short passes: more rows at once than other tests attend to.
    chosen = SETTINGS | {"dram_budget": ByteSize(24 * MIB), "block_rows": 192}
    return Settings().changed(cold_dir=cold_dir, **(chosen | changes))


def attached(model, cold_dir, **changes):
    return Attachment(model, small(cold_dir, **changes))


def least(model, cold_dir, tokens=TOKENS):
    """Return a budget for two sequences in which no row stays hot."""
    shape = ModelShape.from_config(model.config, model.dtype)
    return ByteSize(Budget.LEAST.byte_count(shape, small(cold_dir), tokens + NEW, 2))


@pytest.fixture(scope="module")
def plain_answer(model):
    """Returns what comes of a prompt without a store, which many tests compare with."""
    known = {}

    def of(hill, ids):
        # All else may be as it likes: see test_placement_invariance.py.
        key = (tuple(ids), hill.settings.alpha, hill.settings.shadow)
        if key not in known:
            generation = Generation(model, hill.new_cache(TOKENS + NEW), CHUNK)
            known[key] = answer(model, generation, ids)
            generation.close()
        return known[key]

    return of


def stored(model, store):
    return StoredPrompts(store, model, reuse=Reuse.EXACT, chunk_tokens=CHUNK)


def through(model, hill, store, *expected):
    """Return a generation over a cache that uses a store."""
    prompts_of = ModelPrompts(store, model, "exact")
    return Generation(model, hill.new_cache(*expected, prompts=prompts_of), CHUNK)


def told(generation):
    """Return what a store did for a generation's prompt."""
    return generation.cache.read_from_store


def attached_in(way, model, cold_dir):
    """Attach as a line of the matrix says."""
    shape = ModelShape.from_config(model.config, model.dtype)

    def opened(shape_, settings, budget, directory, **given):
        if way.path is RowPath.STREAMED:
            budget += STREAM_BUFFERS * shadow_bytes(kernel_spec(shape_, settings))
            given |= {"shadow_limit_bytes": 0}
        return Runtime(shape_, settings, budget, directory, **given)

    settings = way.settings(small(cold_dir))
    budget = ByteSize(way.budget.byte_count(shape, settings, FEW + NEW, 3))
    return Attachment(model, settings.changed(dram_budget=budget), open_runtime=opened)


# A store changes where cold rows are read, so of the policies of hot pools each comes once.
ROW_WAYS = [
    *pairs(batch=(1,), policy=("lru",)),
    *(
        RowWay(Budget.SOME_HOT, policy=policy, path=RowPath.COLD)
        for policy in POOL_POLICIES
        if policy != "lru"
    ),
]
# What opens pages is below all ways, so a third of them shows it.
STORES_AND_WAYS = [
    pytest.param(kind, way, id=f"{kind}-{way}")
    for at, way in enumerate(ROW_WAYS)
    for kind in ["plain" if at % 3 else "encrypted"]
]


@pytest.mark.parametrize(("store", "way"), STORES_AND_WAYS, indirect=["store"])
def test_no_bit_depends_on_the_store(way, model, store, cold_dir, plain_answer):
    ids = ids_of(FEW)
    with attached_in(way, model, cold_dir) as hill, torch.no_grad():
        plain = plain_answer(hill, ids)
        for found in (0, FEW_STORED):
            generation = through(model, hill, store, FEW + NEW)
            assert answer(model, generation, ids) == plain
            facts = told(generation)
            assert (facts.found_tokens, facts.failure) == (found, "")
            generation.close()
    assert store.counts.failures == 0
    assert store.statistics()["leases"] == 0


def test_a_bit_of_a_row_changes_the_bits_of_an_answer(model, store, cold_dir, plain_answer):
    """The twin: rows that are stored with one bit flipped, and checksums of these, are seen."""
    ids = ids_of(1100)
    full = DynamicCache()
    Generation(model, full, CHUNK).read(ids)
    full.layers[0].values.view(torch.int32)[0, 0, 1000, 5] ^= 1 << 25
    with attached(model, cold_dir, alpha=1.0) as hill, torch.no_grad():
        plain = plain_answer(hill, ids)
        prompts_of = stored(model, store)
        assert prompts_of.keep(full, ids) == 1024
        generation = through(model, hill, store)
        assert answer(model, generation, ids).bits != plain.bits
        assert told(generation).found_tokens == 1024
        generation.close()


# --- what a dense pass brings ---


@pytest.mark.parametrize("has_room", [True, False], ids=["room", "no room"])
def test_rows_that_a_dense_pass_brings_stay_where_there_is_room(
    has_room, model, store, cold_dir, plain_answer
):
    """Otherwise each is read a second time once it is selected, a whole page for one row."""
    ids = ids_of(FEW)
    budget = ByteSize(24 * MIB) if has_room else least(model, cold_dir, FEW)
    with attached(model, cold_dir, dram_budget=budget) as hill, torch.no_grad():
        plain = plain_answer(hill, ids)
        first = through(model, hill, store, FEW + NEW)
        first.read(ids)
        first.close()
        again = through(model, hill, store, FEW + NEW)
        again.read(ids)
        assert told(again).way == Way.STREAMED
        before = again.statistics()
        assert list(again.decode(Sampling(), NEW, frozenset())) == plain.tokens
        after = again.statistics()
        assert (after.cold_rows_read == before.cold_rows_read) is has_room
        if has_room:
            # Every full group came once, and in order.
            shape = ModelShape.from_config(model.config, model.dtype)
            assert after.promoted_rows == FEW_STORED * shape.layers
            assert after.cold_read_bytes <= 1.1 * FEW_STORED * shape.token_bytes
        again.close()


@pytest.mark.parametrize("share", [0.2, 0.7, 1.2])
def test_rows_that_become_hot_late_change_no_bit(
    share, model, store, cold_dir, plain_answer, monkeypatch
):
    """A second cache finds rows hot, cold and on their way; its end passes through 192 at once."""
    shape = ModelShape.from_config(model.config, model.dtype)
    budget = ByteSize(
        (least(model, cold_dir).byte_count or 0) + int(share * TOKENS * shape.token_bytes)
    )
    # Seven blocks of 192 rows: the last one lies where the next layer's first one comes.
    shared, ends = ids_of(FEW), [ids_of(500, seed=seed) for seed in (3, 7)]
    with attached(model, cold_dir, dram_budget=budget) as hill, torch.no_grad():
        plain = [plain_answer(hill, shared + end) for end in ends]
        first = through(model, hill, store, TOKENS + NEW)
        first.read(shared)
        first.close()
        slow_promotions(monkeypatch)
        going = [through(model, hill, store, TOKENS + NEW) for _ in ends]
        for generation, end, expected in zip(going, ends, plain, strict=True):
            assert answer(model, generation, shared + end) == expected
            assert told(generation).found_tokens == FEW_STORED
        assert sum(generation.statistics().promoted_rows for generation in going) > 0
        for generation in going:
            generation.close()
        statistics = hill.statistics()
        assert statistics.dram_peak_bytes <= statistics.dram_budget_bytes


# --- caches that share ---


def opened_pair(model, hill, store, ids):
    """Return two generations that have read the same prompt, both open."""
    found = []
    for _ in range(2):
        generation = through(model, hill, store)
        generation.read(ids)
        # Everything is published once it is told.
        assert told(generation).failure == ""
        found.append(generation)
    return found


@SEALED_TOO
def test_a_second_cache_reads_nothing_and_holds_nothing_twice(model, store, cold_dir, plain_answer):
    ids = ids_of(FEW)
    with attached(model, cold_dir) as hill, torch.no_grad():
        plain = plain_answer(hill, ids)
        one, other = opened_pair(model, hill, store, ids)
        assert told(one).found_tokens == 0
        assert (told(other).found_tokens, told(other).read_bytes) == (FEW_STORED, 0)
        # Only what is behind the prefix is there twice.
        token_bytes = ModelShape.from_config(model.config, model.dtype).token_bytes
        both, alone = hill.statistics().kv_bytes, one.statistics().kv_bytes
        assert both == alone + (FEW - FEW_STORED) * token_bytes
        assert store.statistics()["leases"] == 2
        for generation in (other, one):
            made = list(generation.decode(Sampling(), NEW, frozenset()))
            assert made == plain.tokens
        one.close()
        assert store.statistics()["leases"] == 2
        other.close()
        assert store.statistics()["leases"] == 0
        # The twin: what nobody has open is read.
        third = through(model, hill, store)
        third.read(ids)
        assert told(third).read_bytes > 0
        third.close()


@SEALED_TOO
def test_prompts_that_part_go_on_by_themselves(model, store, cold_dir, plain_answer):
    # They part in a tail, and each goes on into a chunk of its own.
    shared = ids_of(600)
    ends = [ids_of(700, seed=seed) for seed in (3, 7)]
    with attached(model, cold_dir) as hill, torch.no_grad():
        first = through(model, hill, store)
        first.read(shared)
        assert told(first).stored_tokens == 512
        going = []
        for end in ends:
            generation = through(model, hill, store)
            generation.read(shared + end)
            assert told(generation).found_tokens == 512
            going.append(generation)
        for generation, end in zip(going, ends, strict=True):
            plain = plain_answer(hill, shared + end)
            assert list(generation.decode(Sampling(), NEW, frozenset())) == plain.tokens
        for generation in (first, *going):
            generation.close()
        for end in ends:
            again = through(model, hill, store)
            plain = plain_answer(hill, shared + end)
            assert answer(model, again, shared + end) == plain
            assert told(again).found_tokens == 1280
            again.close()
    assert store.counts.failures == 0
    assert store.statistics()["leases"] == store.statistics()["writing"] == 0


@SEALED_TOO
def test_rows_are_written_once(model, store, cold_dir):
    made = []

    def opened(*given, **named):
        made.append(Runtime(*given, **named))
        return made[-1]

    def own_blocks():
        return sum(os.fstat(file.descriptor).st_blocks for file in made[-1].parts.store.files)

    ids = ids_of(FEW_STORED)
    with Attachment(model, small(cold_dir), open_runtime=opened) as hill, torch.no_grad():
        generation = through(model, hill, store)
        generation.read(ids)
        assert told(generation).stored_tokens == FEW_STORED
        assert own_blocks() == 0
        # The twin: rows made under selection are the cache's own.
        list(generation.decode(Sampling(), 65, frozenset()))
        made[-1].parts.store.settle_all(0)
        assert own_blocks() > 0
        generation.close()


@pytest.mark.parametrize("store", ["encrypted"], indirect=True)
def test_tags_are_counted_as_long_as_a_cache_has_their_rows(model, store, cold_dir):
    made, held = [], []

    def opened(*given, **named):
        made.append(Runtime(*given, **named))
        return made[-1]

    with Attachment(model, small(cold_dir), open_runtime=opened) as hill, torch.no_grad():
        # The engine stays as long as a cache is open.
        other = through(model, hill, store)
        for seed in range(3):
            generation = through(model, hill, store)
            generation.read(ids_of(FEW_STORED, seed))
            assert told(generation).stored_tokens == FEW_STORED
            while_open = made[-1].parts.accountant.held()[Part.OTHER]
            generation.close()
            held.append(made[-1].parts.accountant.held()[Part.OTHER])
            # The twin: they are counted meanwhile.
            assert while_open > held[-1]
        other.close()
    assert len(made) == 1
    assert held[1] == held[0]
    assert held[2] == held[0]


class Filled(DriveCalls):
    """Notes the pages of memory that single reads of whole groups fill."""

    def __init__(self, group_bytes):
        self.pages, self._group_bytes = set(), group_bytes

    def preadv(self, descriptor, into, offset):
        if len(into) % self._group_bytes == 0:
            first = np.frombuffer(into, np.uint8).ctypes.data
            self.pages.update(range(first, first + len(into), PAGE_BYTES))
        return super().preadv(descriptor, into, offset)


@pytest.mark.parametrize("groups", [4, 12])
def test_rows_whose_checksums_are_taken_come_through_counted_buffers(
    groups, model, store, cold_dir, plain_answer
):
    """A tail has no shadow that has them. Its rows in all layers nobody would count."""
    # The buffers hold six groups together.
    ids, made = ids_of(groups * GROUP_TOKENS + 1), []

    def opened(*given, **named):
        made.append(Runtime(*given, **named))
        return made[-1]

    with Attachment(model, small(cold_dir), open_runtime=opened) as hill, torch.no_grad():
        plain = plain_answer(hill, ids)
        first = through(model, hill, store)
        first.read(ids)
        assert told(first).stored_tokens == len(ids) - 1
        first.close()
        filled = Filled(GROUP_TOKENS * made[-1].shape.row_bytes)
        with Store(store.places.directory, calls=filled) as again:
            generation = through(model, hill, again)
            assert answer(model, generation, ids) == plain
            assert told(generation).found_tokens == len(ids) - 1
            assert again.counts.quarantined_chunks == 0
            buffers = made[-1].parts.buffers.take_both()
            generation.close()
    first = buffers.ctypes.data
    assert filled.pages
    assert filled.pages <= set(range(first, first + buffers.nbytes, PAGE_BYTES))


def test_chunks_are_found_while_the_prompt_is_being_read(model, store, cold_dir):
    ids = ids_of(TOKENS)
    seen = []
    with attached(model, cold_dir) as hill, torch.no_grad():
        generation = through(model, hill, store)
        with Store(store.places.directory) as other:
            space = stored(model, store).namespace

            def held():
                found = other.find(space, ids)
                if found is None:
                    return 0
                with found:
                    return found.tokens

            def look(done):
                if done == STORED:
                    # What is whole is published behind what is queued.
                    until(lambda: held() >= 2048)
                    seen.append(held())

            generation.read(ids, look)
        generation.close()
    # The tail comes at the end of the prompt.
    assert seen == [2048]


@SEALED_TOO
def test_the_next_turn_of_a_conversation_goes_on_in_the_store(model, store, cold_dir, plain_answer):
    question = ids_of(1100)
    with attached(model, cold_dir) as hill, torch.no_grad():
        first = through(model, hill, store)
        first.read(question)
        said = list(first.decode(Sampling(), 100, frozenset()))
        assert told(first).stored_tokens == 1024
        first.close()
        # What was said is read densely now, whatever rows it left behind.
        turn = question + said + ids_of(300, seed=9)
        plain = plain_answer(hill, turn)
        second = through(model, hill, store)
        assert answer(model, second, turn) == plain
        facts = told(second)
        assert (facts.found_tokens, facts.stored_tokens) == (1024, 1280 - 1024)
        assert facts.way == "streamed"
        second.close()
    # The tail went on in its place.
    assert store.statistics()["chunks"] == 2


@SEALED_TOO
def test_a_session_is_saved_from_a_store(model, store, cold_dir, tmp_path, plain_answer):
    ids = ids_of(FEW)
    with attached(model, cold_dir) as hill, torch.no_grad():
        plain = plain_answer(hill, ids)
        for _ in range(2):
            generation = through(model, hill, store)
            generation.read(ids[:-1])
            assert told(generation).failure == ""
            cache = generation.cache
        cache.save_session(tmp_path / "saved")
        resumed = Generation(model, hill.load_session(tmp_path / "saved"), CHUNK)
        # One token alone is selected for; so is the unbroken run's, read likewise.
        expected = Generation(model, hill.new_cache(), CHUNK)
        expected.read(ids[:-1])
        assert answer(model, resumed, ids[-1:]) == answer(model, expected, ids[-1:])
        assert plain.tokens
        # The twin: another token gives another answer.
        other = Generation(model, hill.load_session(tmp_path / "saved"), CHUNK)
        assert answer(model, other, [ids[-1] ^ 1]) != answer(model, generation, ids[-1:])


def test_tokens_are_read_singly_where_that_is_sooner(model, store, cold_dir):
    ids = ids_of(FEW)
    with attached(model, cold_dir) as hill, torch.no_grad():
        first = Generation(model, hill.new_cache(prompts=ModelPrompts(store, model)), CHUNK)
        first.read(ids)
        first.close()
        for rates, way in (
            (PassRates(1e3, 1e-3), Way.IN_PLACE),
            (PassRates(1e12, 1.0), Way.STREAMED),
        ):
            own = ModelPrompts(store, model, rates=rates)
            generation = Generation(model, hill.new_cache(prompts=own), CHUNK)
            generation.read(ids)
            assert told(generation).way == str(way)
            assert generation.cache.get_seq_length() == FEW
            generation.close()


@SEALED_TOO
def test_caches_of_another_shadow_share_rows(model, store, cold_dir, plain_answer):
    ids = ids_of(FEW)
    for shadow in (KeyMode.INT4, KeyMode.INT8, KeyMode.INT8):
        with attached(model, cold_dir, shadow=shadow) as hill, torch.no_grad():
            plain = plain_answer(hill, ids)
            generation = through(model, hill, store)
            assert answer(model, generation, ids) == plain
            found = told(generation).found_tokens
            generation.close()
    assert found == FEW_STORED


@SEALED_TOO
def test_a_tail_is_filled_by_one(model, store, cold_dir, plain_answer):
    shared = ids_of(300)
    both = [shared + ids_of(300, seed=seed) for seed in (3, 7)]
    with attached(model, cold_dir) as hill, torch.no_grad():
        prompts_of = stored(model, store)
        first = through(model, hill, store)
        first.read(shared)
        first.close()
        # Both find the tail before either goes on from it.
        caches = [hill.new_cache() for _ in both]
        readings = [prompts_of.open(*one) for one in zip(caches, both, strict=True)]
        for cache, ids, reading in zip(caches, both, readings, strict=True):
            assert reading.found_tokens == 256
            Generation(model, cache, CHUNK).read(ids[256:])
            cache.end_recording()
            assert reading.facts().stored_tokens == 512 - 256
            cache.close()
        for ids in both:
            plain = plain_answer(hill, ids)
            again = through(model, hill, store)
            assert answer(model, again, ids) == plain
            assert told(again).found_tokens == 512
            again.close()
    assert store.verify(Parts.ALL).wrong == store.counts.failures == 0


def test_rows_made_under_selection_are_not_stored(model, store, cold_dir):
    ids = ids_of(1600)
    with attached(model, cold_dir) as hill, torch.no_grad():
        prompts_of = stored(model, store)
        cache = hill.new_cache()
        reading = prompts_of.open(cache, ids)
        generation = Generation(model, cache, CHUNK)
        generation.read(ids[:1280])
        generation.read_singly(ids[1280:1340])
        generation.read(ids[1340:])
        cache.end_recording()
        assert reading.facts().stored_tokens == 1280
        cache.close()
        # The twin: read at once, they are.
        again = through(model, hill, store)
        again.read(ids)
        assert told(again).stored_tokens == 1536 - 1280
        again.close()


# --- what fails ---


def test_an_extent_that_is_read_stays(model, store, cold_dir, plain_answer):
    ids = ids_of(FEW)
    failing = FailingCalls("none", 0)
    budget = least(model, cold_dir, FEW)
    with attached(model, cold_dir, dram_budget=budget) as hill, torch.no_grad():
        plain = plain_answer(hill, ids)
        with Store(store.places.directory, calls=failing) as own:
            failing.left = {"fdatasync": 0}
            generation = through(model, hill, own)
            generation.read(ids)
            assert told(generation).stored_tokens == 0
            assert own.statistics()["writing"] > 0
            assert list(generation.decode(Sampling(), NEW, frozenset())) == plain.tokens
            failing.left = {}
            generation.close()
            assert own.statistics()["writing"] == 0


def flip(store, unit_offset, bit=3):
    with store.places.files[0][0].open("r+b") as file:
        file.seek(unit_offset)
        byte = file.read(1)[0]
        file.seek(unit_offset)
        file.write(bytes([byte ^ 1 << bit]))


# Where in a chunk, and how many tokens are found then.
FLIPS = {
    "codes": (0, lambda shape: shape.shadow_at(1) + 99, 0),
    "codes of the second": (1, lambda shape: shape.shadow_at(0) + 99, 1024),
    "checksums of rows": (1, lambda shape: shape.shadow_at(2) - 77, 1024),
    "rows": (0, lambda shape: shape.rows_at(1, 5) + 1234, STORED),
    "rows of the tail": (2, lambda shape: shape.rows_at(0, 2) + 7, 2048),
    "nothing": (2, lambda shape: shape.byte_count - 1, STORED),
}


# Tags of an encrypted store take the place of checksums of codes and of rows.
SEALED_FLIPS = ("codes of the second", "checksums of rows", "rows", "nothing")


@pytest.mark.parametrize(
    ("filled", "name"),
    [*(("plain", name) for name in FLIPS), *(("encrypted", name) for name in SEALED_FLIPS)],
    indirect=["filled"],
)
def test_a_flipped_bit_reaches_no_token(name, model, filled, cold_dir, plain_answer):
    number, place, found = FLIPS[name]
    store, ids = filled, ids_of(TOKENS)
    with attached(model, cold_dir) as hill, torch.no_grad():
        plain = plain_answer(hill, ids)
        with store.find(stored(model, store).namespace, ids) as prefix:
            flip(store, prefix.chunks[number].record.span.offset + place(prefix.shape))
        again = through(model, hill, store)
        assert answer(model, again, ids) == plain
        assert told(again).found_tokens == found
        again.close()
        assert store.counts.quarantined_chunks == (name != "nothing")
        if found < STORED:
            # What was wrong is stored again, and so is what came behind it.
            with store.find(stored(model, store).namespace, ids) as prefix:
                assert prefix.tokens == STORED
    assert store.statistics()["leases"] == 0


def test_what_one_store_has_wrong_is_not_told_of_another(model, store, cold_dir, tmp_path):
    """Chunks of two stores lie at one place of a drive of each."""
    ids, budget = ids_of(FEW), least(model, cold_dir, TOKENS)
    Store.create(tmp_path / "other", 64 * MIB)
    with Store(tmp_path / "other") as other, attached(model, cold_dir, dram_budget=budget) as hill:
        opened = []
        for one, seed in ((store, 0), (other, 1)):
            with closing(through(model, hill, one)) as first, torch.no_grad():
                first.read(ids_of(FEW, seed))
            opened.append(through(model, hill, one))
            opened[-1].read(ids_of(FEW, seed))
            assert told(opened[-1]).found_tokens == FEW_STORED
        os.truncate(store.places.files[0][0], 128 * 1024)
        list(opened[0].decode(Sampling(), NEW, frozenset()))
        assert store.counts.quarantined_chunks
        assert other.counts.quarantined_chunks == 0
        for one in opened:
            one.close()
        with other.find(stored(model, other).namespace, ids_of(FEW, 1)) as found:
            assert found.tokens == FEW_STORED
    # The twin: the one whose drive is gone has nothing.
    assert store.find(stored(model, store).namespace, ids) is None


@SEALED_TOO
@pytest.mark.parametrize("found", [0, FEW_STORED])
def test_a_drive_that_goes_away_costs_no_bit(found, model, store, cold_dir, plain_answer):
    # Room for the long prompt's shadow, because tags of an encrypted store take memory too.
    ids, budget = ids_of(FEW), least(model, cold_dir, TOKENS)
    with attached(model, cold_dir, dram_budget=budget) as hill, torch.no_grad():
        plain = plain_answer(hill, ids)
        first = None
        if found:
            first = through(model, hill, store)
            first.read(ids)
            assert told(first).stored_tokens >= found
        generation = through(model, hill, store)
        generation.read(ids)
        fork = generation.fork()
        assert told(generation).found_tokens == found
        if first is not None:
            first.close()
        os.truncate(store.places.files[0][0], 128 * 1024)
        for one in (generation, fork):
            assert list(one.decode(Sampling(), NEW, frozenset())) == plain.tokens
            one.close()
    assert store.counts.quarantined_chunks


class FailingCalls(DriveCalls):
    """An operating system one kind of whose calls fails from some call on."""

    def __init__(self, kind, first, number=errno.EIO):
        self.left = {kind: first}
        self.number = number

    def _count(self, kind):
        if kind in self.left:
            self.left[kind] -= 1
            if self.left[kind] < 0:
                raise OSError(self.number, os.strerror(self.number))

    def pwrite(self, descriptor, data, offset):
        self._count("pwrite")
        return super().pwrite(descriptor, data, offset)

    def preadv(self, descriptor, into, offset):
        self._count("preadv")
        return super().preadv(descriptor, into, offset)

    def read_many(self, way, reads, address):
        self._count("read_many")
        return super().read_many(way, reads, address)

    def fdatasync(self, descriptor):
        self._count("fdatasync")
        super().fdatasync(descriptor)

    def allocate(self, descriptor, offset, byte_count):
        self._count("allocate")
        super().allocate(descriptor, offset, byte_count)


# A chunk is 18 calls of `pwrite`, and two once it has settled; the tail is 4 and two.
FAILURES = [
    *(("pwrite", first, errno.EIO) for first in (0, 9, 18, 25)),
    ("pwrite", 20, errno.ENOSPC),
    *(("fdatasync", first, errno.EIO) for first in (0, 1)),
    *(("allocate", first, errno.ENOSPC) for first in (0, 1)),
    *(("read_many", first, errno.EIO) for first in (0, 1)),
    *(("preadv", first, errno.EIO) for first in (0, 1)),
]


@pytest.mark.parametrize(("kind", "first", "number"), FAILURES)
def test_a_call_that_fails_costs_no_answer(
    kind, first, number, model, store, cold_dir, plain_answer
):
    ids = ids_of(FEW)
    place = store.places.directory
    with attached(model, cold_dir) as hill, torch.no_grad():
        plain = plain_answer(hill, ids)
        failing = FailingCalls("none", 0)
        with Store(place, calls=failing) as own:
            failing.left, failing.number = {kind: first}, number
            for _ in range(2):
                generation = through(model, hill, own)
                assert answer(model, generation, ids) == plain
                generation.close()
            assert failing.left[kind] < 0, f"{kind} was called {first - failing.left[kind]} times"
            failing.left = {}
        with Store(place) as own:
            facts = own.statistics()
            assert facts["writing"] == facts["leases"] == 0
            assert own.verify(Parts.ALL).wrong == 0
            generation = through(model, hill, own)
            assert answer(model, generation, ids) == plain
            generation.close()
            assert own.counts.failures == 0


# --- processes that are killed ---

READER = """
import os, signal, sys
sys.path[:0] = sys.argv[3].split(":")
import torch
from test_opened_in_place import CHUNK, FEW, FailingCalls, Store, TinyModel, attached, ids_of
from test_opened_in_place import through
from pathlib import Path

class Killing(FailingCalls):
    def _count(self, kind):
        try:
            super()._count(kind)
        except OSError:
            os.kill(os.getpid(), signal.SIGKILL)

model = TinyModel(head_dim=32).build()
kind, first = sys.argv[4:6]
calls = Killing("none", 0)
with attached(model, Path(sys.argv[2])) as hill, torch.no_grad():
    with Store(sys.argv[1], calls=calls) as store:
        calls.left = {kind: int(first)}
        generation = through(model, hill, store)
        generation.read(ids_of(FEW))
        generation.close()
"""


@pytest.mark.parametrize(("kind", "first"), [("pwrite", 22), ("fdatasync", 1)])
def test_a_killed_reader_leaves_the_store_whole(
    kind, first, model, store, cold_dir, plain_answer, warm_python
):
    ids, place = ids_of(FEW), store.places.directory
    arguments = [str(place), str(cold_dir), ":".join(sys.path), kind, str(first)]
    ended = subprocess.run([*warm_python, "-c", READER, *arguments], check=False)
    assert ended.returncode == -signal.SIGKILL
    with Store(place) as own:
        facts = own.statistics()
        assert facts["writing"] == facts["leases"] == 0
        assert own.verify(Parts.ALL).wrong == 0
        with attached(model, cold_dir) as hill, torch.no_grad():
            plain = plain_answer(hill, ids)
            generation = through(model, hill, own)
            assert answer(model, generation, ids) == plain
            generation.close()
        assert own.counts.failures == 0
