# SPDX-License-Identifier: Apache-2.0
"""A program that ends while a runtime's own thread is about to collect its last cache.

Arguments: cold directory, file of the pool timeline.
"""

import concurrent.futures.thread as futures
import ctypes
import gc
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from generation_runs import attached_with
from tiny_models import TinyModel, prompts

from hillinfer.drive.calls import DriveCalls
from hillinfer.kv.pool_policies import PoolPolicy


class CollectsAtExit(PoolPolicy):
    """Ranks once the interpreter is about to end, and collects first."""

    def __init__(self):
        self.entered = threading.Event()

    def worth(self, rows):
        if threading.current_thread().name.startswith("hillinfer-pool"):
            self.entered.set()
            deadline = time.monotonic() + 60
            while not futures._shutdown and time.monotonic() < deadline:
                time.sleep(0.01)
            print("collected", gc.collect() > 0, flush=True)
        return super().worth(rows)


class SlowToClose(DriveCalls):
    """Has the runtime's end take longer than that of an interpreter that does not wait for it."""

    def close(self, descriptor):
        time.sleep(0.5)
        super().close(descriptor)


def main():
    torch.set_num_threads(1)
    model, policy = TinyModel().build(), CollectsAtExit()
    ids, _ = prompts([150])
    timeline = Path(sys.argv[2])
    given = {"calls": SlowToClose()}
    with attached_with(model, sys.argv[1], given, pool_timeline=timeline) as hill, torch.no_grad():
        cache = hill.new_cache()
        model(ids, past_key_values=cache)
        pools = cache.engine.runtime.parts.pools
        for pool in pools.layers:
            pool.forget(0, 128)
        pools.layers[-1].policy = policy
        model(ids[:, :1], past_key_values=cache)
        assert policy.entered.wait(60)
        gc.disable()
        cache.itself = cache


main()
# The interpreter's own end, wherever it was started.
ctypes.pythonapi.Py_Exit(0)
