# SPDX-License-Identifier: Apache-2.0
"""A store's drive that goes away under open caches costs time, and no pass of whoever makes it."""

import errno
import gc
import itertools
import os
from collections import Counter
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from generation_runs import attached_with, run
from interrupts import interrupted
from single_reads import SingleReads
from stored_ways import NEW_TOKENS, WAYS, Asked, ids_of
from tiny_models import TinyModel, prompts

import hillinfer
from hillinfer.errors import ColdPoolError
from hillinfer.extents.shared_chunks import StoredRowsError
from hillinfer.kv import opened_sequences
from hillinfer.kv.sequence import Sequence
from hillinfer.reuse.model_prompts import ModelPrompts
from hillinfer.store.pool_files import StoreFailedError, insist
from hillinfer.store.store import Store
from hillinfer.values import ByteSize


class Pulled(SingleReads):
    """A machine one of whose drives is pulled out after so many reads of rows in their place.

    Parameters
    ----------
    drive
        Its directory.
    """

    def __init__(self, drive):
        self._drive = str(drive)
        self.left, self._counted = None, "reads"
        self.counts = Counter()

    def move(self, drive):
        """Pull another drive from here on."""
        self._drive = str(drive)

    def pull_after(self, reads, kind="reads"):
        """Let so many reads of rows, or writes, succeed from here on; all of them where None."""
        self.left, self._counted = reads, kind
        self.counts.clear()

    def read_done(self, descriptor, *rest):
        self._count("reads", descriptor)
        return super().read_done(descriptor, *rest)

    def preadv(self, descriptor, *rest):
        self._count("reads", descriptor)
        return super().preadv(descriptor, *rest)

    def pwrite(self, descriptor, *rest):
        self._count("writes", descriptor)
        return super().pwrite(descriptor, *rest)

    def fdatasync(self, descriptor):
        self._check("writes", descriptor)
        super().fdatasync(descriptor)

    def _count(self, kind, descriptor):
        if self._is_there(descriptor):
            self.counts[kind] += 1
            if self.left is not None and kind == self._counted:
                self.left -= 1
        self._check(kind, descriptor)

    def _is_there(self, descriptor):
        return str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(self._drive)

    def _check(self, kind, descriptor):
        if self.left is not None and self.left < 0 and self._is_there(descriptor):
            self.counts[f"lost {kind}"] += 1
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))


# Of the reads, or writes, of an answer, behind which the drive is pulled out: while a prompt is
# looked up or read behind what was found, and in decoding.
MOMENTS = (0.2, 0.3, 0.9)
SMALL = TinyModel()
# Rows of 1 KiB, of which a budget that just works holds few.
LARGE = TinyModel(heads="mha", head_dim=64)


class Streamed:
    """What `generate` gives to a streamer."""

    def __init__(self):
        self.parts = []

    def put(self, value):
        self.parts.append(value.reshape(-1).tolist())

    def end(self):
        pass


def by_streamer(hill):
    """Generate token by token; what came through the streamer is the answer."""
    cache, ids, streamed = hill.new_cache(), ids_of(), Streamed()
    hill.model.generate(
        ids,
        past_key_values=cache,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        streamer=streamed,
    )
    assert streamed.parts[0] == ids[0].tolist()
    return Asked(torch.tensor([[*itertools.chain(*streamed.parts[1:])]]), cache)


@torch.no_grad()
def by_joined_passes(hill):
    """Read prompts into caches one by one, and decode together, pass by pass."""
    caches, rows = [hill.new_cache() for _ in range(3)], []
    for cache, tokens in zip(caches, (150, 140, 131), strict=True):
        found = hill.model(ids_of()[:, :tokens], past_key_values=cache, logits_to_keep=1)
        rows.append(found.logits[:, -1].argmax(-1, keepdim=True))
    tokens = [torch.cat(rows)]
    joined = hill.join(caches)
    for _ in range(NEW_TOKENS):
        logits = hill.model(**joined.inputs(tokens[-1])).logits
        tokens.append(logits[:, -1].argmax(-1, keepdim=True))
    return Asked(torch.cat(tokens, dim=1), *caches)


@torch.no_grad()
def by_cropped(hill):
    """Answer, take the answer back to the middle of a group of the prompt, and go on from there."""
    cache = hill.new_cache()
    hill.model(ids_of(), past_key_values=cache, logits_to_keep=1)
    cache.crop(-50)
    tokens = [hill.model(ids_of()[:, 100:130], past_key_values=cache).logits[:, -1].argmax(-1)]
    for _ in range(NEW_TOKENS):
        logits = hill.model(tokens[-1][None], past_key_values=cache).logits
        tokens.append(logits[:, -1].argmax(-1))
    return Asked(torch.stack(tokens, dim=1), cache)


ALL_WAYS = WAYS | {
    "streamer": by_streamer,
    "joined passes": by_joined_passes,
    "cropped": by_cropped,
}


class Machine:
    """A model, a store on a drive of its own, and that drive.

    Parameters
    ----------
    directory
        Of the store.
    cold_dir
        Of the cold pool, on a drive that stays.
    given
        For the store.
    tiny
        The model.
    settings
        Of the attachment, changed.
    """

    def __init__(self, directory, cold_dir, given, tiny, settings):
        if not directory.exists():
            Store.create(directory, 64 << 20)
        self.drive = Pulled(directory)
        self.model = tiny.build()
        self.store = Store(directory, calls=self.drive, **given)
        parts = {"prompts": ModelPrompts(self.store, self.model), "calls": self.drive}
        # Rows that a prompt's pass has brought stay cold, so that those of answers are lost.
        kept = {"pool_policy": "paper"} | settings
        self.hill = attached_with(self.model, cold_dir, parts, **kept)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.drive.pull_after(None)
        # Caches of an answer that ended with an error are to be closed before their store.
        gc.collect()
        self.hill.detach()
        self.store.close()

    def ask(self, way, left=None, kind="reads"):
        """Answer in a way while the drive is pulled out after so many reads, or writes."""
        self.drive.pull_after(left, kind)
        return ALL_WAYS[way](self.hill)


@pytest.fixture
def machine(tmp_path, cold_dir):
    """Return a function that makes a machine over one store, again and again."""

    def made(given=MappingProxyType({}), tiny=SMALL, **settings):
        return Machine(tmp_path / "store", cold_dir, given, tiny, settings)

    return made


@pytest.mark.parametrize("way", ALL_WAYS)
def test_a_drive_that_is_pulled_out_costs_no_token(way, machine):
    """While rows are needed, and before: where a prompt is looked up, in turn over the ways."""
    early = MOMENTS[list(ALL_WAYS).index(way) % 2]
    with machine() as one:
        one.ask(way)
        plain = one.ask(way)
        assert plain.found
        assert not plain.failures
        total = one.drive.counts["reads"]
        last = asked_while_pulled(one, way, int(total * MOMENTS[-1]), plain)
    with machine() as one:
        # What was lost before is stored again.
        again = one.ask(way)
        assert torch.equal(again.tokens, plain.tokens)
        asked_while_pulled(one, way, int(total * early), plain)
    # Looking up reads the first; the last are rows that passes need.
    assert last.found == plain.found


def asked_while_pulled(one, way, left, plain):
    """Ask while the drive goes away after so many reads."""
    asked = one.ask(way, left)
    assert one.drive.counts["lost reads"]
    assert torch.equal(asked.tokens, plain.tokens)
    assert one.store.counts.failures
    # A fork tells nothing of the prompt that it began with.
    assert asked.failures or way == "forks"
    return asked


@pytest.mark.parametrize(
    ("chunk", "moment"), [(100, 0.0), (None, 0.3), (100, 0.6), (100, 0.95), (None, 0.95)]
)
def test_a_prompt_behind_lost_rows_is_read_in_stages_as_without(chunk, moment, machine):
    """Lost rows are computed for every layer, and not in stages; what follows them is."""
    ids = prompts([500], seed=4)[0]
    with machine(tiny=TinyModel(layers=4)) as one:
        one.ask("generate")
        ids[:, :150] = ids_of()

        def answer(left):
            with hillinfer.prune(one.model, "1:50%,3:25%") as pruning:
                cache = one.hill.new_cache()
                one.drive.pull_after(left)
                out = run(one.model, cache, ids, prefill_chunk_size=chunk, new_tokens=NEW_TOKENS)
                read, asked = pruning.read_of(cache), Asked(out.sequences[:, 500:], cache)
                return read.brought, read.tokens, asked

        brought, kept, plain = answer(None)
        assert brought == plain.found == 128
        assert kept == [500, 128 + 180, 128 + 180, 128 + 116]
        found = answer(int(one.drive.counts["reads"] * moment))
        assert one.drive.counts["lost reads"]
        assert found[2].failures
        if found[2].found == plain.found:
            assert found[:2] == (brought, kept)
            assert torch.equal(found[2].tokens, plain.tokens)


@pytest.mark.parametrize("way", ["generate", "streamer", "own chunks", "joined batch"])
def test_where_a_store_is_to_be_strict_that_ends_the_answer(way, machine):
    """The twin: rows are lost in the middle indeed, which is told where nothing computes them."""
    with machine() as one:
        one.ask(way)
        one.ask(way)
        total = one.drive.counts["reads"]
    told = ""
    with machine({"raising": insist}) as one:
        try:
            one.ask(way, int(total * MOMENTS[-1]))
        except StoreFailedError as error:
            # No trace of it is kept, which would keep caches open behind their store.
            told = str(error)
    assert "the store failed: cannot read" in told


@pytest.mark.parametrize("way", ["chunked prefill", "streamer", "own chunks", "joined passes"])
def test_a_drive_that_is_pulled_out_while_a_prompt_is_stored_costs_no_token(way, machine, tmp_path):
    with machine() as one:
        plain = one.ask(way)
        total = one.drive.counts["writes"]
    # One of the early ones, in turn.
    for moment in (MOMENTS[len(way) % 2], MOMENTS[-1]):
        (tmp_path / "store").rename(tmp_path / f"store before {moment}")
        with machine() as one:
            asked = one.ask(way, int(total * moment), "writes")
            assert one.drive.counts["lost writes"]
            assert torch.equal(asked.tokens, plain.tokens)
            # Nothing wrong was stored.
            again = one.ask(way)
            assert torch.equal(again.tokens, plain.tokens)


def test_rows_that_change_under_an_open_cache_cost_no_token(machine, tmp_path):
    """All bytes of all rows of a chunk, between two tokens of a loop of one's own."""
    with machine() as one, torch.no_grad():
        one.ask("forward")
        plain = one.ask("forward")
        cache, tokens = one.hill.new_cache(), []
        logits = one.model(ids_of(), past_key_values=cache, logits_to_keep=1).logits
        assert cache.read_from_store.found_tokens == plain.found == 128
        spoil(tmp_path / "store" / "pool-0.kv")
        for _ in range(NEW_TOKENS):
            tokens.append(logits[:, -1].argmax(-1, keepdim=True))
            logits = one.model(tokens[-1], past_key_values=cache).logits
        assert torch.equal(torch.cat(tokens, dim=1), plain.tokens)
        assert "not what was written there" in cache.read_from_store.failure
        cache.close()


def spoil(file):
    """Turn every byte of a file around, as far as it is written."""
    with file.open("r+b") as opened:
        data = np.frombuffer(opened.read(), np.uint8)
        opened.seek(0)
        opened.write((~data).tobytes())


@torch.no_grad()
def test_what_is_computed_anew_is_there_for_every_cache_of_the_prompt(machine):
    """And what was decoded is not decoded again: bits and tokens are kept."""
    with machine() as one:
        one.ask("forward")
        one.drive.pull_after(None)
        caches = [one.hill.new_cache()]
        logits = one.model(ids_of(), past_key_values=caches[0], logits_to_keep=1).logits
        caches += [caches[0].fork(), one.hill.new_cache()]
        one.model(ids_of(), past_key_values=caches[2], logits_to_keep=1)
        token = logits[:, -1].argmax(-1, keepdim=True)
        one.drive.pull_after(0)
        passes = Passes()
        noted = (
            one.model.get_decoder().layers[0].register_forward_pre_hook(passes, with_kwargs=True)
        )
        found = [one.model(token, past_key_values=cache).logits for cache in caches]
        noted.remove()
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
        # A pass that broke off, one over the prompt as it was read, and one for each cache.
        assert sorted(passes.tokens) == [1, 1, 1, 1, 150]
        for cache in caches:
            assert cache.get_seq_length() == 151
            cache.close()


@torch.no_grad()
def test_rows_that_another_cache_had_computed_are_back_for_all(machine):
    """As where two threads meet the loss at once: the second finds nothing left to compute."""
    with machine() as one:
        one.ask("forward")
        one.drive.pull_after(None)
        cache = one.hill.new_cache()
        logits = one.model(ids_of(), past_key_values=cache, logits_to_keep=1).logits
        fork = cache.fork()
        token = logits[:, -1].argmax(-1, keepdim=True)
        one.drive.pull_after(0)
        lost = StoredRowsError("rows are lost")
        assert cache.regain(lost, one.model)
        assert fork.regain(lost, one.model)
        before = one.drive.counts["lost reads"]
        found = [one.model(token, past_key_values=own).logits for own in (cache, fork)]
        assert torch.equal(*found)
        assert one.drive.counts["lost reads"] == before
        for own in (cache, fork):
            own.close()


@torch.no_grad()
def test_an_interrupt_before_rows_are_computed_again_leaves_no_sequence(machine):
    with machine() as one:
        one.ask("forward")
        one.drive.pull_after(None)
        cache = one.hill.new_cache()
        logits = one.model(ids_of(), past_key_values=cache, logits_to_keep=1).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        one.drive.pull_after(0)
        parts = cache.engine.runtime.parts
        held = len(parts.rows.sequences)
        place = opened_sequences.__file__
        with interrupted(Sequence.append_groups, "call", place), pytest.raises(KeyboardInterrupt):
            one.model(token, past_key_values=cache)
        assert len(parts.rows.sequences) == held
        # The twin: without one they are computed, by a sequence that is there meanwhile.
        one.model(token, past_key_values=cache)
        assert cache.get_seq_length() == 151
        assert len(parts.rows.sequences) == held
        cache.close()


class StopHereError(Exception):
    """Breaks a pass off."""


@torch.no_grad()
@pytest.mark.parametrize("act", ["forward", "fork", "generate"])
def test_a_pass_that_broke_off_is_taken_back_where_the_drive_is_gone(act, machine, least_budget):
    """What comes next goes on from before it, over rows that are computed again."""
    whole = ids_of(1300)
    first, rest = whole[:, :1180], whole[:, 1180:]
    # Few rows are hot.
    budget = ByteSize(least_budget(LARGE, 1500) + (1 << 20))

    def stop(*given):
        raise StopHereError

    def ended(one, cache):
        if act == "generate":
            return one.model.generate(
                whole, past_key_values=cache, max_new_tokens=2, do_sample=False, pad_token_id=0
            )
        own = cache.fork() if act == "fork" else cache
        return one.model(rest, past_key_values=own, logits_to_keep=1).logits

    found, lost = [], []
    # What the first round stores the others find, which rounds as they do.
    for is_gone in (False, False, True):
        with machine(tiny=LARGE, dram_budget=budget) as one:
            one.drive.pull_after(None)
            cache = one.hill.new_cache()
            one.model(first, past_key_values=cache, logits_to_keep=1)
            hook = one.model.lm_head.register_forward_pre_hook(stop)
            with pytest.raises(StopHereError):
                one.model(rest, past_key_values=cache, logits_to_keep=1)
            hook.remove()
            cache.await_stored()
            if is_gone:
                one.drive.pull_after(0)
            found.append(ended(one, cache))
            lost.append(one.drive.counts["lost reads"])
            gc.collect()
    # Rows that are computed in other passes are rounded otherwise.
    torch.testing.assert_close(found[2], found[1], rtol=0, atol=1e-2)
    assert lost[2] > lost[1] == 0


class Passes:
    """Notes how many tokens the passes bring to a layer."""

    def __init__(self):
        self.tokens = []

    def __call__(self, layer, given, named):
        self.tokens.append(given[0].shape[1])


@torch.no_grad()
def test_a_session_is_saved_where_the_drive_is_gone(machine, tmp_path):
    with machine() as one:
        one.ask("forward")
        one.drive.pull_after(None)
        cache = one.hill.new_cache()
        logits = one.model(ids_of(), past_key_values=cache, logits_to_keep=1).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        one.drive.pull_after(0)
        cache.save_session(tmp_path / "saved")
        assert one.drive.counts["lost reads"]
        resumed = one.hill.load_session(tmp_path / "saved")
        found = [one.model(token, past_key_values=own).logits for own in (cache, resumed)]
        assert torch.equal(*found)
        cache.close()
        resumed.close()


@torch.no_grad()
def test_a_cold_pool_that_fails_is_an_error_as_ever(machine, cold_dir, least_budget):
    """Its drive has rows that nobody else has; the store's is whole."""
    with machine(tiny=LARGE, dram_budget=ByteSize(least_budget(LARGE, 1500) + (1 << 20))) as one:
        one.ask("forward")
        one.drive.pull_after(None)
        cache = one.hill.new_cache()
        one.model(ids_of(), past_key_values=cache, logits_to_keep=1)
        ids = ids_of(1300)
        one.model(ids[:, :1200], past_key_values=cache, logits_to_keep=1)
        one.drive.move(cold_dir)
        one.drive.pull_after(0)
        with pytest.raises(ColdPoolError, match="of the cold pool"):
            one.model(ids[:, 1200:], past_key_values=cache)
        cache.close()
