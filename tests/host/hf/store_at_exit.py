# SPDX-License-Identifier: Apache-2.0
"""A program that ends with a cache open, behind the block that attached its model to a store.

Arguments: cold directory, store.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from generation_runs import attached
from tiny_models import TinyModel, prompts

torch.set_num_threads(1)
model = TinyModel().build()

with attached(model, sys.argv[1], store=Path(sys.argv[2])) as hill, torch.no_grad():
    kept = hill.new_cache()
    model(prompts([300])[0], past_key_values=kept)
