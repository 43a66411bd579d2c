# SPDX-License-Identifier: Apache-2.0
"""A program whose last cache is collected while its thread is in the middle of its store's code.

Arguments: cold directory, store.
"""

import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from generation_runs import attached, run
from stored_ways import ids_of
from tiny_models import TinyModel
from waiting import until

from hillinfer.store.store import Store

torch.set_num_threads(1)
model = TinyModel().build()


def collecting():
    """Give no chunks, and collect garbage where they are asked for."""
    gc.collect()
    yield from ()


def leases():
    return store.statistics()["leases"]


with Store(Path(sys.argv[2])) as store, attached(model, sys.argv[1], store=store) as hill:
    ids = ids_of()
    with hill.new_cache() as stored:
        run(model, stored, ids, new_tokens=2)
    gc.disable()
    cache = hill.new_cache()
    run(model, cache, ids, new_tokens=2)
    cache.itself = cache
    print("leased", leases() > 0)
    del cache
    # As a prompt that is found does.
    store.room.touch(collecting())
    until(lambda: not leases())
    print("given back")
