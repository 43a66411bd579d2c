# SPDX-License-Identifier: Apache-2.0
"""A batch of which rows cannot be read back while it is cropped: all of its rows are cut, once."""

import errno
import os

import pytest
import torch
from generation_runs import attached_with
from single_reads import SingleReads
from test_lost_rows import Machine
from tiny_models import TinyModel, prompts

from hillinfer.errors import ColdPoolError

# Rows of 1 KiB, of which a small budget holds few.
LARGE = TinyModel(heads="mha", head_dim=64, layers=3)
LONG, LONG_MASK = prompts([1420, 1500], seed=3)


@torch.no_grad()
def test_rows_that_are_computed_between_are_cut_once(tmp_path, cold_dir):
    """The rows of one sequence are back, and cut, when those of the next one are found lost."""
    ids, further = prompts([150, 150], seed=3)[0], prompts([9, 9], seed=4)[0]

    def cropped(one, left):
        cache = one.hill.new_cache()
        one.model(ids, past_key_values=cache, logits_to_keep=1)
        assert cache.read_from_store.found_tokens == 256
        one.drive.pull_after(left)
        # Into a group of the store, which is read back.
        cache.crop(-50)
        counts = dict(one.drive.counts)
        one.drive.pull_after(None)
        assert cache.get_seq_length() == 100
        assert cache.token_ids == [row[:100].tolist() for row in ids]
        logits = one.model(further, past_key_values=cache).logits
        cache.close()
        return logits, counts

    with Machine(tmp_path / "store", cold_dir, {}, LARGE, {"dram_budget": "24MiB"}) as one:
        for row in ids:
            cache = one.hill.new_cache()
            one.model(row[None], past_key_values=cache, logits_to_keep=1)
            cache.close()
        plain, counts = cropped(one, None)
        # All reads of the first sequence come, and none of the second one's.
        found, lost = cropped(one, counts["reads"] // 2)
    assert lost["lost reads"]
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-2)


class FailsAfter(SingleReads):
    """A drive that gives nothing back from the n-th read of rows on."""

    left, reads = None, 0

    def read_done(self, *args):
        self._check()
        return super().read_done(*args)

    def preadv(self, *args):
        self._check()
        return super().preadv(*args)

    def _check(self):
        self.reads += 1
        if self.left is not None and self.reads > self.left:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("next_use", ["pass", "fork"])
@torch.no_grad()
def test_what_comes_next_cuts_what_a_drive_that_failed_left(next_use, cold_dir):
    """At every read: rows of a batch are as long as each other, whatever comes next."""
    model, calls, further = LARGE.build(), FailsAfter(), prompts([5, 5], seed=4)[0]
    places = LONG_MASK.cumsum(1) - 1

    def go_on(cache):
        """Return logits behind what is left; None where nothing was cut."""
        length = cache.get_seq_length()
        if length == 1500:
            return None
        own = cache.fork() if next_use == "fork" else cache
        told = {"attention_mask": LONG_MASK[:, :1305], "position_ids": places[:, 1300:1305]}
        logits = model(further, past_key_values=own, **told).logits
        assert [len(row) for row in own.token_ids] == [1225, 1305]
        return logits

    with attached_with(
        model, cold_dir, {"calls": calls}, dram_budget="5MiB", pool_policy="paper"
    ) as hill:
        cache = hill.new_cache()
        told = {"attention_mask": LONG_MASK, "position_ids": places.clamp(min=0)}
        model(LONG, past_key_values=cache, **told)
        ends, calls.reads = [], 0
        fork = cache.fork()
        fork.crop(-200)
        total, plain = calls.reads, go_on(fork)
        fork.close()
        for left in range(total):
            fork = cache.fork()
            calls.reads, calls.left = 0, left
            with pytest.raises(ColdPoolError):
                fork.crop(-200)
            calls.left = None
            ends.append(go_on(fork))
            fork.close()
        cache.close()
    # Nothing is cut where the first sequence could not be.
    assert ends[0] is None
    assert ends[-1] is not None
    for found in ends:
        assert found is None or torch.equal(found, plain)
