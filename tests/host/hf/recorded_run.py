# SPDX-License-Identifier: Apache-2.0
"""A child process: three prompts and a session; prints digests of all logits as JSON.

Its argument is a folder for cold files and sessions.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from generation_runs import bits, run
from tiny_models import TinyModel, prompts

import hillinfer

# Where rows lie changes no bit: with less than all of them in DRAM, and with more.
BUDGETS = {"25%": (1100, 2300), "400%": (150,)}
OF_SESSION = "25%"


def digest(output):
    return hashlib.sha256(bits(output).numpy().tobytes()).hexdigest()[:16]


def of_session(model, hill, folder):
    cache = hill.new_cache(1200)
    ids, _ = prompts([1090], seed=4)
    run(model, cache, ids, new_tokens=1)
    cache.save_session(folder)
    cache.close()
    cache = hill.load_session(folder, 1200)
    longer = torch.cat([torch.tensor(cache.token_ids), ids[:, :70]], 1)
    found = digest(run(model, cache, longer, new_tokens=12))
    cache.close()
    return found


def main(scratch):
    torch.set_num_threads(1)
    model = TinyModel(head_dim=32, layers=4).build()
    told = {}
    for budget, lengths in BUDGETS.items():
        settings = {"dram_budget": budget, "cold_dir": scratch, "block_rows": 64}
        # The default of when they were recorded.
        settings |= {"alpha": 0.1, "exact": 1}
        with hillinfer.attach(model, **settings) as hill:
            for length in lengths:
                ids, _ = prompts([length], seed=length)
                cache = hill.new_cache(length + 24)
                told[f"{length}"] = digest(run(model, cache, ids, new_tokens=12))
                cache.close()
            if budget == OF_SESSION:
                told["session"] = of_session(model, hill, scratch / "session")
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
