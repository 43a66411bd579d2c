# SPDX-License-Identifier: Apache-2.0
"""A child process: thirty sessions of a model of 8 layers at once, with few descriptors.

Its argument is a folder for cold files and sessions. Prints what came of it as JSON.
"""

import hashlib
import json
import os
import resource
import shutil
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from generation_runs import attached, bits, run
from tiny_models import TinyModel, prompts

from hillinfer.errors import HillInferError

SESSIONS, THIRD, CHANGED = 30, 3, 7
QUESTION, _ = prompts([5], seed=77)


def count():
    return len([*Path("/proc/self/fd").iterdir()]), threading.active_count()


def ask(model, cache, new_tokens=2):
    """Return a digest of the logits of an answer on a fork of a cache."""
    fork = cache.fork()
    ids = torch.cat([torch.tensor(cache.token_ids), QUESTION], 1)
    digest = hashlib.sha256(bits(run(model, fork, ids, new_tokens=new_tokens)).numpy().tobytes())
    fork.close()
    return digest.hexdigest()[:16]


def tried(model, cache):
    """Return the answer, or the error."""
    try:
        return ask(model, cache)
    except HillInferError as error:
        return str(error)


def touched(file):
    os.utime(file, ns=(1, 1))


def copied(file):
    shutil.copyfile(file, file.with_name("copy"))
    file.with_name("copy").rename(file)


def gone(file):
    file.unlink()


def cut(file):
    os.truncate(file, file.stat().st_size - 64)


CHANGES = {1: touched, 2: copied, 3: gone, 4: cut}


def main(folder):
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    model = TinyModel(layers=8).build()
    places = [folder / f"session-{number}" for number in range(SESSIONS)]
    told = {"counts": [], "alone": []}
    with attached(model, folder, dram_budget="25%") as hill:
        for seed, place in enumerate(places):
            cache = hill.new_cache(80)
            run(model, cache, prompts([70 + seed], seed)[0], new_tokens=1)
            cache.save_session(place)
            cache.close()
        for place in places[::THIRD]:
            cache = hill.load_session(place)
            told["alone"].append(ask(model, cache))
            told["counts"].append(count())
            cache.close()
        told["before"] = count()
        caches = [hill.load_session(place) for place in places]
        told["open"] = count()
        told["together"] = [ask(model, cache) for cache in caches]
        told["asked"] = count()
        statistics = hill.statistics()
        told["held"] = statistics.dram_peak_bytes <= statistics.dram_budget_bytes
        for number, change in CHANGES.items():
            change(places[number] / "rows-0007.bin")
        told["changed"] = [tried(model, cache) for cache in caches[:CHANGED]]
        for cache in caches:
            cache.close()
        told["after"] = count()
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
