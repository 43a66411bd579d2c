# SPDX-License-Identifier: Apache-2.0
"""A store whose failure is to be an error keeps neither caches nor what is behind them."""

import gc

import pytest
import torch
from test_lost_rows import Machine
from tiny_models import TinyModel, prompts

from hillinfer.store.pool_files import StoreFailedError, insist

LARGE = TinyModel(heads="mha", head_dim=64)
IDS, _ = prompts([1400], seed=3)


def told(act, *given):
    """Return what an act tells of the store; no exception, which would keep caches."""
    try:
        act(*given)
    except StoreFailedError as error:
        return str(error)
    return ""


@torch.no_grad()
def read(model, cache):
    """Read most of a prompt in chunks, the rows of which go to the store meanwhile."""
    cache.look_up(IDS, chunk_tokens=100)
    for chunk in IDS[:, :1300].split(100, dim=1):
        model(chunk, past_key_values=cache, logits_to_keep=1)


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("end", ["close", "reset", "drop", "drop beside another"])
def test_a_cache_whose_rows_could_not_be_stored_ends(end, fails, tmp_path, cold_dir):
    given = {"raising": insist} if fails else {}
    with Machine(tmp_path / "store", cold_dir, given, LARGE, {"dram_budget": "24MiB"}) as one:
        other = one.hill.new_cache() if end == "drop beside another" else None
        cache = one.hill.new_cache()
        one.drive.pull_after(0, "writes")
        failed = told(read, one.model, cache)
        assert one.drive.counts["lost writes"]
        assert bool(failed) is fails
        engine = cache.engine
        if end == "reset":
            # Twice: what is freed is not freed again.
            told(cache.reset)
            told(cache.reset)
            assert one.hill.statistics().kv_bytes == 0
        if end in ("close", "reset"):
            told(cache.close)
        del cache
        gc.collect()
        if other is not None:
            assert engine.open_caches == 1
            # What the dropped cache had is freed by whoever comes next.
            told(other.reset)
            assert one.hill.statistics().kv_bytes == 0
            told(other.close)
        assert engine.is_closed
