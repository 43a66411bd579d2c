# SPDX-License-Identifier: Apache-2.0
"""A child process: three prompts and a session; prints digests of all logits as JSON.

Each with little DRAM and with more than enough, all tokens exact and some coded. Its argument is a
folder for cold files and sessions.
"""

import hashlib
import json
import sys
from itertools import chain
from pathlib import Path

import torch
from generation_runs import bits, run
from tiny_models import TinyModel, prompts

import hillinfer

LENGTHS = (150, 1100, 2300)
# With less than all rows in DRAM, and with more.
BUDGETS = ("25%", "256MiB")
SETTINGS = {
    # The default of when they were recorded.
    "exact": {"alpha": 0.1, "exact": 1},
    # That of today, with a floor that leaves some tokens of a short prompt to be coded.
    "coded": {"alpha": 0.2, "exact": 0.02, "exact_floor": 8},
}

# What was recorded first was read in small pieces.
OPTIONS = {"exact": {}, "coded": {"prefill_chunk_size": 512}}


def digest(found):
    return hashlib.sha256(found.numpy().tobytes()).hexdigest()[:16]


def of_session(model, hill, folder, options):
    cache = hill.new_cache(1200)
    ids, _ = prompts([1090], seed=4)
    run(model, cache, ids, new_tokens=1, **options)
    cache.save_session(folder)
    cache.close()
    cache = hill.load_session(folder, 1200)
    longer = torch.cat([torch.tensor(cache.token_ids), ids[:, :70]], 1)
    yield "session", cache, bits(run(model, cache, longer, new_tokens=12, **options))


def of_prompts(model, hill, options):
    for length in LENGTHS:
        ids, _ = prompts([length], seed=length)
        cache = hill.new_cache(length + 24)
        yield str(length), cache, bits(run(model, cache, ids, new_tokens=12, **options))


def main(scratch):
    torch.set_num_threads(1)
    model = TinyModel(head_dim=32, layers=4).build()
    runs = []
    for setting, chosen in SETTINGS.items():
        for budget in BUDGETS:
            given = {"dram_budget": budget, "cold_dir": scratch, "block_rows": 64}
            with hillinfer.attach(model, **given, **chosen) as hill:
                options, folder = OPTIONS[setting], scratch / f"{setting}-{budget}"
                each = of_prompts(model, hill, options), of_session(model, hill, folder, options)
                for name, cache, found in chain(*each):
                    counted = cache.statistics()
                    told = {"setting": setting, "budget": budget, "name": name}
                    told |= {"digest": digest(found), "coded": counted.coded_tokens}
                    found.view(-1)[-1] ^= 1
                    told |= {"flipped": digest(found), "cold": counted.cold_rows_read}
                    runs.append(told)
                    cache.close()
    print(json.dumps(runs))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
