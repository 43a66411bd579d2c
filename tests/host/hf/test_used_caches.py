# SPDX-License-Identifier: Apache-2.0
"""What a cache says of itself after a broken pass, when it is copied, and in another process."""

import copy
import multiprocessing
import pickle
import re
import threading
from contextlib import closing, suppress

import pytest
import torch
from generation_runs import attached, bits, run
from interrupts import interrupted, interrupted_at
from test_broken_forward import PLACES, Breaks
from tiny_models import TinyModel, prompts

from hillinfer.drive.regions import GroupTable
from hillinfer.errors import CacheUseError
from hillinfer.hf.batch import Batch
from hillinfer.hf.cache import HillInferCache
from hillinfer.kv.rows import SequenceManager
from hillinfer.kv.sequence import Sequence
from hillinfer.kv.sequence_shadows import SequenceShadows
from hillinfer.memory_budget import Part
from hillinfer.shadow.arena import ShadowArena

TINY = TinyModel(layers=3)
IDS, _ = prompts([70])
ENOUGH = 60


@pytest.fixture
def attachment(cold_dir):
    with attached(TINY.build(), cold_dir, alpha=1.0) as hill:
        yield hill


@pytest.fixture
def cache(attachment):
    cache = attachment.new_cache()
    run(attachment.model, cache, IDS)
    yield cache
    cache.close()


# --- after a pass that broke off -----------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["inside layer 1", "in the head"])
def test_a_broken_pass_counts_nowhere(error, place, attachment, cache):
    """A loop that makes positions from the length goes on as if nothing had been."""
    model, length, ids = attachment.model, cache.get_seq_length(), IDS[:, :5]
    positions = torch.arange(length, length + 5)[None]
    expected = model(ids, position_ids=positions, past_key_values=cache.fork()).logits
    hook = PLACES[place](model)(Breaks(error, 0))
    with pytest.raises(error):
        model(ids, past_key_values=cache)
    hook.remove()
    assert cache.get_seq_length() == length
    assert cache.get_mask_sizes(5, 0) == (length + 5, 0)
    assert [layer.get_seq_length() for layer in cache.layers] == [length] * 3
    # What was given to the model is not lost with the pass.
    assert cache.token_ids[0][-5:] == ids[0].tolist()
    fork = cache.fork()
    assert len(fork.token_ids[0]) == fork.get_seq_length() == length
    fork.close()
    start = cache.get_seq_length()
    positions = torch.arange(start, start + 5)[None]
    found = model(ids, position_ids=positions, past_key_values=cache).logits
    assert torch.equal(found, expected)


@pytest.mark.parametrize("after", [0, 1, 4])
def test_after_an_interrupt_between_passes_the_same_call_is_told_what_to_do(after, attachment):
    model = attachment.model

    class Interrupts:
        """Presses Ctrl-C when a token is shown."""

        def __init__(self):
            # The prompt is the first that is shown.
            self.left = after + 1

        def put(self, ids):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt

        def end(self):
            pass

    cache = attachment.new_cache()
    calm = attachment.new_cache()
    expected = run(model, calm, IDS)
    calm.close()
    with pytest.raises(KeyboardInterrupt):
        run(model, cache, IDS, streamer=Interrupts())
    assert cache.get_seq_length() == 70 + after
    with pytest.raises(
        CacheUseError, match=r"does not continue.*call cache\.crop\(-\d+\) first"
    ) as no:
        run(model, cache, IDS)
    cache.crop(int(re.search(r"crop\((-\d+)\)", str(no.value)).group(1)))
    assert torch.equal(run(model, cache, IDS).sequences, expected.sequences)
    cache.close()


def held_by(attachment):
    """Return what is counted, but for hot rows: how many these are depends on which groups are."""
    parts = attachment.accountant.held()
    return {part: count for part, count in parts.items() if part is not Part.HOT}


def known_tokens(cache):
    """Return how many distinct tokens an engine knows of, and in how many sequences."""
    rows = cache.engine.runtime.parts.rows
    return rows.tokens, len(rows.sequences)


def grown(cache):
    """Return what a cache holds and some tokens more, as a prompt."""
    return torch.cat([torch.tensor(cache.token_ids), IDS[:, :3]], dim=1)


def closed_at(attachment, function, number):
    """Close a cache of its own, with Ctrl-C at a moment of a function's file; False past the last.

    A sibling is used afterwards.
    """
    own, other = attachment.new_cache(), attachment.new_cache()
    run(attachment.model, own, IDS)
    try:
        with interrupted_at(function, number) as interrupt:
            own.close()
    except KeyboardInterrupt:
        # Closed, whatever is still to be freed.
        own.close()
        with pytest.raises(CacheUseError, match="this cache is closed"):
            own.fork()
    other.fork().close()
    other.close()
    return interrupt.left < 0


@pytest.mark.parametrize("function", [SequenceManager.release, Batch.clear])
def test_the_next_use_frees_what_an_interrupt_left_of_a_closed_cache(function, attachment, cache):
    """It would be counted as long as another is open, and leave no room for the next one."""

    closed_at(attachment, function, 10**6)
    before, number = held_by(attachment), 0
    while closed_at(attachment, function, number):
        assert held_by(attachment) == before
        number += 1
    assert number > 5
    # The twin: a cache that is open is counted.
    run(attachment.model, other := attachment.new_cache(), IDS)
    assert held_by(attachment) != before
    other.close()


def test_rows_of_a_fork_that_an_interrupt_broke_off_are_freed(attachment, cache):
    cache.fork().close()
    before, number, has_come = held_by(attachment), 0, True
    while has_come:
        with suppress(KeyboardInterrupt), interrupted_at(HillInferCache.fork, number) as moment:
            cache.fork().close()
        has_come = moment.left < 0
        cache.fork().close()
        assert held_by(attachment) == before
        number += 1
    assert number > 5
    # The twin: a fork that is open is counted.
    fork = cache.fork()
    assert held_by(attachment) != before
    fork.close()


@pytest.mark.parametrize(
    ("function", "event"),
    [
        (SequenceManager.fork, "call"),
        (Sequence.fork, "call"),
        (GroupTable.share, "call"),
        (SequenceShadows.share, "call"),
    ],
)
def test_groups_of_a_fork_that_broke_off_are_its_siblings_alone(function, event, attachment, cache):
    """Given back once too often they would be another prompt's, and never they would stay."""
    cache.fork().close()
    before, tokens = held_by(attachment), known_tokens(cache)
    with pytest.raises(KeyboardInterrupt), interrupted(function, event):
        cache.fork()
    assert held_by(attachment) == before
    # What the budget is planned for, and who shares it.
    assert known_tokens(cache) == tokens
    fork = cache.fork()
    assert known_tokens(cache) != tokens
    fork.close()
    assert known_tokens(cache) == tokens
    model, (others, _) = attachment.model, prompts([70], seed=7)
    expected = bits(run(model, cache.fork(), grown(cache), new_tokens=2))
    run(model, attachment.new_cache(), others, new_tokens=2)
    assert torch.equal(bits(run(model, cache, grown(cache), new_tokens=2)), expected)


def test_groups_that_an_interrupt_keeps_from_being_given_back_are_given_by_the_next(
    attachment, cache
):
    model, (others, _) = attachment.model, prompts([200], seed=7)
    tokens, number, has_come = known_tokens(cache), 0, True
    came = []
    while has_come:
        own = attachment.new_cache()
        run(model, own, others, new_tokens=2)
        try:
            with interrupted_at(GroupTable.give_all, number) as moment:
                own.close()
        except KeyboardInterrupt:
            # The twin: some are not given back yet.
            came.append(known_tokens(cache) != tokens)
        has_come = moment.left < 0
        cache.fork().close()
        run(model, other := attachment.new_cache(), IDS, new_tokens=2)
        other.close()
        assert known_tokens(cache) == tokens
        number += 1
    assert sum(came) > 5


def test_rows_of_a_batch_that_an_interrupt_kept_from_being_freed_are_freed(attachment, cache):
    batch = torch.cat([IDS, prompts([70], seed=7)[0]])
    model = attachment.model
    before = held_by(attachment)
    own = attachment.new_cache()
    run(model, own, batch, new_tokens=2)
    whole = held_by(attachment)
    with pytest.raises(KeyboardInterrupt), interrupted(SequenceManager.release, "call"):
        own.batch_select_indices(torch.tensor([0]))
    assert len(own.token_ids) == 1
    # The twin: the other row is still counted.
    assert held_by(attachment) == whole
    own.batch_select_indices(torch.tensor([0]))
    assert held_by(attachment) != whole
    own.close()
    cache.fork().close()
    assert held_by(attachment) == before


def test_a_shadow_that_an_interrupt_kept_from_being_made_is_not_counted(cold_dir):
    with attached(TINY.build(), cold_dir, alpha=0.2) as hill, closing(hill.new_cache()) as calm:
        run(hill.model, calm, IDS)
        before = held_by(hill)
        broken = hill.new_cache()
        with pytest.raises(KeyboardInterrupt), interrupted(ShadowArena.take):
            run(hill.model, broken, IDS)
        broken.close()
        assert held_by(hill) == before
        # The twin: a shadow that is there is counted.
        run(hill.model, whole := hill.new_cache(), IDS)
        assert held_by(hill)[Part.SHADOW] > before[Part.SHADOW] > 0
        whole.close()


@pytest.mark.parametrize("leaves", ["close", "reset", "crop"])
def test_no_cache_has_rows_of_one_that_an_interrupt_left_half_freed(leaves, attachment, cache):
    """Numbers of groups are used again, and hot rows are known by them."""
    model, (others, _) = attachment.model, prompts([70], seed=7)
    calm = attachment.new_cache()
    expected = bits(run(model, calm, others, new_tokens=2))
    calm.close()
    number, has_come = 0, True
    while has_come:
        own, next_one = attachment.new_cache(), attachment.new_cache()
        given = bits(run(model, own, IDS, new_tokens=2))
        leave = {"close": own.close, "reset": own.reset, "crop": lambda own=own: own.crop(-70)}
        with suppress(KeyboardInterrupt), interrupted_at(SequenceManager.release, number) as moment:
            leave[leaves]()
        has_come = moment.left < 0
        assert torch.equal(bits(run(model, next_one, others, new_tokens=2)), expected)
        # The twin: the rows that were there are another prompt's.
        assert not torch.equal(given, expected)
        next_one.close()
        own.close()
        number += 1
    assert number > 5


# --- in the middle of a pass of a fork -----------------------------------------------------


@torch.no_grad()
def test_a_fork_is_looked_at_and_closed_in_a_pass_of_its_sibling(attachment, cache):
    """Of one thread: neither has to wait for the pass."""
    model, fork, seen = attachment.model, cache.fork(), []
    alone = cache.fork()
    expected = model(IDS[:, :3], past_key_values=alone).logits
    alone.close()

    def look(*ignored):
        seen.append(fork.statistics().dram_budget_bytes)
        fork.close()
        with pytest.raises(CacheUseError, match="a forward pass is under way in this thread"):
            cache.close()

    hook = PLACES["inside layer 1"](model)(look)
    found = model(IDS[:, :3], past_key_values=cache).logits
    hook.remove()
    assert torch.equal(found, expected)
    assert seen == [cache.statistics().dram_budget_bytes]
    with pytest.raises(CacheUseError, match="this cache is closed"):
        fork.fork()


def test_a_generate_in_a_generate_of_the_same_cache_gives_it_back(attachment):
    """The other thread is refused as long as the outer one goes on."""
    model, cache, told = attachment.model, attachment.new_cache(), []

    class Asks:
        """Generates two tokens more at the second token."""

        def __init__(self):
            self.left = 2

        def put(self, ids):
            self.left -= 1
            if self.left:
                return
            again = torch.tensor(cache.token_ids)
            run(model, cache, torch.cat([again, IDS[:, :2]], 1), new_tokens=2)
            thread = threading.Thread(target=self.intrude)
            thread.start()
            thread.join()

        def intrude(self):
            with pytest.raises(CacheUseError) as error:
                model(IDS[:, :1], past_key_values=cache)
            told.append(str(error.value))

        def end(self):
            pass

    # Whatever comes of the outer one, whose cache went on.
    with suppress(CacheUseError):
        run(model, cache, IDS, streamer=Asks())
    assert len(told) == 1
    assert "another thread is generating with this cache" in told[0]
    cache.close()


# --- copies --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda one: copy.deepcopy({1: one})[1]])
def test_a_copy_of_a_cache_is_a_fork(way, attachment, cache):
    """As transformers recommends for prompts that begin alike."""
    model = attachment.model
    longer = [torch.cat([torch.tensor(cache.token_ids), IDS[:, :n]], 1) for n in (3, 4)]
    alone = cache.fork()
    expected = run(model, alone, longer[0])
    twin = way(cache)
    other = run(model, twin, longer[1])
    assert torch.equal(bits(run(model, cache, longer[0])), bits(expected))
    assert twin.token_ids[0] == other.sequences[0, :-1].tolist()
    twin.close()
    alone.close()


def test_two_mentions_of_a_cache_stay_one(cache):
    first, second = copy.deepcopy([cache, cache])
    assert first is second is not cache
    first.close()


def test_a_cache_in_the_middle_of_a_pass_is_not_copied(attachment, cache):
    refused = []

    def inside(*_):
        with pytest.raises(CacheUseError, match="forward pass is under way in this thread"):
            copy.deepcopy(cache)
        refused.append(1)

    hook = attachment.model.model.layers[1].mlp.register_forward_hook(inside)
    with torch.no_grad():
        attachment.model(IDS[:, :1], past_key_values=cache)
    hook.remove()
    assert refused


def test_pickling_a_cache_names_sessions(cache):
    for save in (pickle.dumps, lambda one: torch.save({"cache": one}, "/dev/null")):
        with pytest.raises(CacheUseError, match=r"cannot be pickled.*save_session\(directory\)"):
            save(cache)


# --- another process -----------------------------------------------------------------------

USES = {
    "forward": lambda hill, cache: hill.model(IDS[:, :1], past_key_values=cache),
    "generate": lambda hill, cache: run(hill.model, cache, torch.cat([IDS, IDS], 1)),
    "fork": lambda hill, cache: cache.fork(),
    "deepcopy": lambda hill, cache: copy.deepcopy(cache),
    "crop": lambda hill, cache: cache.crop(-1),
    "reset": lambda hill, cache: cache.reset(),
    "statistics": lambda hill, cache: cache.statistics(),
    "save": lambda hill, cache: cache.save_session("nowhere"),
}


def child(hill, cache, pipe):
    said = {}
    for name, use in USES.items():
        try:
            with torch.no_grad():
                use(hill, cache)
            said[name] = "nothing"
        except CacheUseError as error:
            said[name] = str(error)
    said["tokens"] = cache.token_ids, cache.get_seq_length()
    # Neither hangs, and neither may take anything away from the parent.
    cache.close()
    pipe.send(said)
    pipe.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_leaves_the_cache_to_its_parent(attachment, cache):
    before = cache.token_ids, cache.get_seq_length()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=child, args=(attachment, cache, theirs), daemon=True
    )
    process.start()
    assert ours.poll(ENOUGH), "the child hangs"
    said = ours.recv()
    assert said.pop("tokens") == before
    for name, line in said.items():
        assert re.search(r"belongs to the process that made it.*load_session", line), (name, line)
    process.join(ENOUGH)
    assert process.exitcode == 0
    # The parent's threads, files and rows are as they were.
    longer = torch.cat([torch.tensor(cache.token_ids), IDS[:, :3]], 1)
    fork = cache.fork()
    expected = run(attachment.model, fork, longer)
    assert torch.equal(bits(run(attachment.model, cache, longer)), bits(expected))
    fork.close()
