# SPDX-License-Identifier: Apache-2.0
"""A program that ends after an error in the middle of a prompt, with rows of it that have no room.

Argument: cold directory.
"""

import ctypes
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from generation_runs import attached
from tiny_models import TinyModel, prompts


def strike(*_):
    raise ZeroDivisionError


# Of a budget this small.
warnings.simplefilter("ignore")
model = TinyModel(head_dim=32, layers=3).build()
ids, _ = prompts([1300], seed=3)
try:
    with attached(model, Path(sys.argv[1]), dram_budget="1500KiB", exact=1) as hill:
        # It outlives the error, as whatever a program has at its outermost level does.
        cache = hill.new_cache()
        with torch.no_grad():
            for number, part in enumerate(ids.split(256, dim=1)):
                if number == 4:
                    model.model.layers[0].register_forward_hook(strike)
                model(input_ids=part, past_key_values=cache, logits_to_keep=1)
except ZeroDivisionError:
    print("broke off", flush=True)
# The interpreter's own end, wherever it was started.
ctypes.pythonapi.Py_Exit(0)
