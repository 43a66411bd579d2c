# SPDX-License-Identifier: Apache-2.0
"""A child process: thirty sessions of a model of 32 layers at once, with few descriptors.

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
from generation_runs import CODED, attached, bits, run
from tiny_models import TinyModel, prompts

from hillinfer.errors import HillInferError

# Every fifth is asked for a token more, which is decoded over some codes.
SESSIONS, TEXTS, FIFTH, CHANGED = 30, 6, 5, 6


def count():
    return len([*Path("/proc/self/fd").iterdir()]), threading.active_count()


def ask(model, cache, number):
    """Return a digest of the logits of a session's answer, on a fork of its cache."""
    fork, (question, _) = cache.fork(), prompts([5], seed=number)
    ids = torch.cat([torch.tensor(cache.token_ids), question], 1)
    answer = bits(run(model, fork, ids, new_tokens=1 if number % FIFTH else 2))
    digest = hashlib.sha256(answer.numpy().tobytes())
    fork.close()
    return digest.hexdigest()[:16]


def tried(model, cache, number):
    """Return the answer, or the error."""
    try:
        return ask(model, cache, number)
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
    model = TinyModel(layers=32).build()
    places = [folder / f"session-{number}" for number in range(SESSIONS)]
    told = {"counts": [], "alone": []}
    with attached(model, folder, dram_budget="25%", **CODED) as hill:
        for number in range(TEXTS):
            cache, (ids, _) = hill.new_cache(80), prompts([70 + number], number)
            run(model, cache, ids, new_tokens=1, prefill_chunk_size=100)
            cache.save_session(places[number])
            cache.close()
        # Each copy has files of its own, stands beside other texts, and is asked something else.
        for number in range(TEXTS, SESSIONS):
            shutil.copytree(places[number % TEXTS], places[number])
        for number in range(0, SESSIONS, FIFTH):
            cache = hill.load_session(places[number])
            told["alone"].append(ask(model, cache, number))
            told["counts"].append(count())
            cache.close()
        told["before"] = count()
        caches = [hill.load_session(place) for place in places]
        told["open"] = count()
        told["together"] = [ask(model, cache, number) for number, cache in enumerate(caches)]
        told["asked"] = count()
        statistics = hill.statistics()
        told["held"] = statistics.dram_peak_bytes <= statistics.dram_budget_bytes
        told["coded"], told["filed"] = statistics.coded_tokens, statistics.code_write_bytes
        for number, change in CHANGES.items():
            change(places[number] / "rows-0007.bin")
        changed = enumerate(caches[:CHANGED])
        told["changed"] = [tried(model, cache, number) for number, cache in changed]
        for cache in caches:
            cache.close()
        told["after"] = count()
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
