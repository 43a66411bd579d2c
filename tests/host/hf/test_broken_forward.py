# SPDX-License-Identifier: Apache-2.0
"""A forward pass that raises half-way is forgotten; going on gives what would have come anyway."""

import gc
import os
import weakref
from contextlib import suppress
from itertools import product

import pytest
import torch
from drive_fixtures import in_the_place_of
from generation_runs import attached, run
from test_cache_operations import open_cold_files
from tiny_models import TinyModel, prompts
from waiting import until

from hillinfer.errors import BudgetError, CacheUseError, ColdPoolError

TINY = TinyModel()
PLACES = {
    "before layer 0": lambda model: model.model.layers[0].register_forward_pre_hook,
    "before layer 1": lambda model: model.model.layers[1].register_forward_pre_hook,
    "inside layer 1": lambda model: model.model.layers[1].self_attn.o_proj.register_forward_hook,
    "after layer 1": lambda model: model.model.layers[1].register_forward_hook,
    "in the head": lambda model: model.lm_head.register_forward_hook,
}


class Breaks:
    """Raises once, the given number of calls from now."""

    def __init__(self, error, after):
        self.error = error
        self.left = after

    def __call__(self, *_):
        self.left -= 1
        if self.left == -1:
            raise self.error


@torch.no_grad()
def steps(model, cache, ids, mask, new_ids, retry=None):
    """Read a padded batch in chunks, then tokens one by one; try what raised `retry` once more."""
    length = ids.shape[1]
    full = torch.cat([ids, new_ids], dim=1)
    full_mask = torch.cat([mask, torch.ones_like(new_ids)], dim=1)
    positions = (full_mask.cumsum(1) - 1).clamp(min=0)
    ends = [*range(64, length, 64), *range(length, full.shape[1] + 1)]
    outputs, start = [], 0
    for end in ends:
        call = {
            "input_ids": full[:, start:end],
            "attention_mask": full_mask[:, :end],
            "position_ids": positions[:, start:end],
            "past_key_values": cache,
            "logits_to_keep": 1,
        }
        try:
            out = model(**call)
        except (ZeroDivisionError, KeyboardInterrupt):
            assert retry is not None
            retry.append(end)
            out = model(**call)
        outputs.append(out.logits[:, -1])
        start = end
    return torch.stack(outputs)


# Three calls read the prompt; the fourth is the first that selects.
# Each place with each call, and in turn with what may be raised there.
BROKEN = [
    pytest.param(
        place, call, (ZeroDivisionError, KeyboardInterrupt)[number % 2], id=f"{call}-{name}"
    )
    for number, ((name, place), call) in enumerate(product(PLACES.items(), (0, 1, 3)))
]


@pytest.mark.parametrize(("place", "call", "error"), BROKEN)
def test_trying_again_gives_what_an_undisturbed_run_gives(place, call, error, cold_dir):
    model = TINY.build()
    ids, mask = prompts([150, 60])
    new_ids, _ = prompts([3, 3], seed=1)
    with attached(model, cold_dir) as hill:
        calm, disturbed = hill.new_cache(), hill.new_cache()
        expected = steps(model, calm, ids, mask, new_ids)
        hook = place(model)(Breaks(error, call))
        retried = []
        found = steps(model, disturbed, ids, mask, new_ids, retried)
        hook.remove()
        assert len(retried) == 1
        assert calm.get_seq_length() == disturbed.get_seq_length()
        calm.close()
        disturbed.close()
    assert torch.equal(found, expected)


def test_generate_can_be_called_again_after_an_error_in_a_later_chunk(cold_dir):
    model = TINY.build()
    ids, _ = prompts([150])
    with attached(model, cold_dir) as hill:
        calm, disturbed = hill.new_cache(), hill.new_cache()
        expected = run(model, calm, ids)
        hook = PLACES["after layer 1"](model)(Breaks(ZeroDivisionError, 2))
        with pytest.raises(ZeroDivisionError):
            run(model, disturbed, ids)
        found = run(model, disturbed, ids)
        hook.remove()
        calm.close()
        disturbed.close()
    assert torch.equal(found.sequences, expected.sequences)


def test_an_interrupted_generate_keeps_nothing_alive(tmp_path):
    """Neither the cache nor what its caller has; nobody waits for the garbage collector.

    A thread that was writing rows when the interrupt came lets go of their files when it is done.
    The directory is this test's own: what another test left to the collector stays open here.
    """
    model = TINY.build()
    ids, _ = prompts([150])

    class Large:
        pass

    def interrupted(hill):
        cache, held = hill.new_cache(), Large()
        hook = PLACES["inside layer 1"](model)(Breaks(KeyboardInterrupt, 2))
        with suppress(KeyboardInterrupt):
            run(model, cache, ids)
        hook.remove()
        return weakref.ref(cache), weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        with attached(model, tmp_path) as hill:
            assert [one() for one in interrupted(hill)] == [None, None]
            until(lambda: open_cold_files(tmp_path) == [])
    finally:
        gc.enable()


def test_another_prompt_after_a_broken_first_chunk(cold_dir):
    """Nothing was read, so nothing is continued: any prompt will do, in any batch size."""
    model = TINY.build()
    ids, mask = prompts([150, 60])
    other, _ = prompts([150], seed=7)
    with attached(model, cold_dir) as hill:
        calm, disturbed = hill.new_cache(), hill.new_cache()
        expected = run(model, calm, other)
        hook = PLACES["inside layer 1"](model)(Breaks(ZeroDivisionError, 0))
        with pytest.raises(ZeroDivisionError):
            run(model, disturbed, ids, mask)
        found = run(model, disturbed, other)
        hook.remove()
        calm.close()
        disturbed.close()
    assert torch.equal(found.sequences, expected.sequences)


def test_a_budget_that_runs_out_is_an_error_each_time_and_never_a_deadlock(cold_dir, least_budget):
    model = TINY.build()
    ids, _ = prompts([400])
    budget = least_budget(TINY, 100)
    with attached(model, cold_dir, dram_budget=budget) as hill:
        calm = hill.new_cache()
        expected = run(model, calm, ids[:, :100])
        calm.close()
        cache = hill.new_cache()
        rows = ids.repeat(40, 1)
        rows[:, 0] = torch.arange(40) + 1
        for _ in range(6):
            with pytest.raises(BudgetError, match=r"raise --dram-budget"):
                run(model, cache, rows)
        # What fits is served afterwards.
        assert torch.equal(run(model, cache, ids[:, :100]).sequences, expected.sequences)
        cache.close()


def test_parts_of_a_model_do_not_reach_the_cache(cold_dir):
    model = TINY.build()
    ids, _ = prompts([40])
    with attached(model, cold_dir) as hill, torch.no_grad():
        cache = hill.new_cache()
        with pytest.raises(CacheUseError, match="call the model that was attached"):
            model.model(ids, past_key_values=cache)
        model(ids, past_key_values=cache)
        with pytest.raises(CacheUseError, match="call the model that was attached"):
            model.model(ids, past_key_values=cache)
        cache.close()


def test_a_drive_that_fails_while_writing_stops_generation(cold_dir):
    model = TINY.build()
    ids, _ = prompts([400])
    with attached(model, cold_dir) as hill:
        cache = hill.new_cache()
        file = cache.engine.runtime.parts.store.files[1]
        # What is open for reading only: the kernel itself refuses the write.
        with (
            in_the_place_of(file, cold_dir, os.O_RDONLY),
            pytest.raises(ColdPoolError, match=r"could not write .*--cold-dir|check the drive"),
        ):
            run(model, cache, ids)
        for _ in range(2):
            with pytest.raises(ColdPoolError, match="could not write"):
                run(model, cache, ids)
        cache.close()


class FailsToEnd:
    """A recording of rows whose end fails once, as where a shadow cannot be read back for it."""

    is_ended = is_done = False

    def elsewhere(self, layer, first, groups):
        return None

    def awaits(self, tokens):
        return False

    def finish(self, made):
        self.is_ended = True
        raise ColdPoolError("a shadow cannot be read back")

    def settle(self):
        pass


@torch.no_grad()
def test_a_step_that_fails_before_its_first_layer_leaves_no_token(cold_dir):
    """Token ids stay as many as rows, so that later checks and sessions have the right ones."""
    model, ids = TINY.build(), prompts([150])[0]
    with attached(model, cold_dir) as hill:
        cache = hill.new_cache()
        cache.record(lambda side, fresh: FailsToEnd())
        model(ids[:, :140], past_key_values=cache, logits_to_keep=1)
        with pytest.raises(ColdPoolError, match="a shadow"):
            model(ids[:, 140:141], past_key_values=cache)
        model(ids[:, 140:141], past_key_values=cache)
        assert cache.token_ids == ids[:, :141].tolist()
        assert cache.get_seq_length() == 141
        cache.close()
