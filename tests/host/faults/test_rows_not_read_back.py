# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch that cannot be read back are not stored, and the answer comes all the same."""

import errno
import os

import pytest
import torch
from generation_runs import attached, attached_with
from single_reads import SingleReads
from tiny_models import TinyModel, prompts

from hillinfer.reuse.model_prompts import ModelPrompts
from hillinfer.store.store import Store

# More rows than the hot pools hold.
TINY, TOKENS, FEW = TinyModel(heads="mha", head_dim=64, layers=3), 1500, {"dram_budget": "4MiB"}


class Silent(SingleReads):
    """A drive that takes what is written, and gives nothing back while it is told so."""

    fails = False

    def read_done(self, *args):
        self._check()
        return super().read_done(*args)

    def preadv(self, *args):
        self._check()
        return super().preadv(*args)

    def _check(self):
        if self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("fails", [True, False])
@torch.no_grad()
def test_rows_that_cannot_be_read_back_cost_no_answer(tmp_path, cold_dir, fails):
    # Rows of a batch are copied when it is read; those of one prompt go to the store at once.
    model, ids, calls = TINY.build(), prompts([TOKENS])[0].repeat(2, 1), Silent()
    Store.create(tmp_path / "store", 64 << 20)
    with attached(model, cold_dir, **FEW) as hill:
        cache = hill.new_cache()
        plain = model(ids, past_key_values=cache, logits_to_keep=1).logits
        cache.close()
    with Store(tmp_path / "store") as store:
        given = {"prompts": ModelPrompts(store, model), "calls": calls}
        with attached_with(model, cold_dir, given, **FEW) as hill:
            cache = hill.new_cache()
            calls.fails = fails
            logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
            calls.fails = False
            assert torch.equal(logits, plain)
            told = cache.read_from_store
            assert told.stored_tokens == (0 if fails else TOKENS // 64 * 64)
            assert bool(told.failure) is fails
            cache.close()
