# SPDX-License-Identifier: Apache-2.0
"""Small work wakes no other thread; large work has many, and the same result."""

import json
import subprocess
import sys

import pytest
import torch
from native_variants import every_variant, native_scorer
from scorer_cases import plain_keys, plain_query, segments_of

from hillinfer.scoring.scorer import StreamedShadow
from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.kernel_spec import KernelSpec

# 256 query heads and 1 MiB of codes a segment: two threads for a segment, and for its L'.
LARGE = KernelSpec(128, 8, 32, KeyMode.INT8)
CHILD = """
import json, os, sys
import numpy as np, torch
from hillinfer_bench.precision.in_place_attention import InPlaceAttention
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.native.structures import row_addresses

torch.set_num_threads(4)
shape = ModelShape(1, 4, 4, 64, StoredType.BFLOAT16, 1 << 20)
attention, query = InPlaceAttention(shape), torch.ones(4, 64)
found = []
for rows in json.loads(sys.argv[1]):
    memory = np.zeros((rows, shape.row_bytes), np.uint8)
    addresses = row_addresses(memory, np.arange(rows))
    before = len(os.listdir("/proc/self/task"))
    attention.attend(query, 1.0, [addresses])
    found.append(len(os.listdir("/proc/self/task")) - before)
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says how many threads run")
def test_few_rows_wake_no_other_thread():
    # Of 1 KiB each: under 1 MiB, between 1 and 1.5 MiB, and enough for all four.
    rows = [900, 1100, 4000]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(rows)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0, 1, 2]


def passing(segments):
    return [
        StreamedShadow(one.base_position, one.tokens, one.statistics, lambda one=one: one.shadow)
        for one in segments
    ]


@every_variant
def test_threads_do_not_change_bits_of_passing_shadows(variant):
    scorer = native_scorer(variant, LARGE, Scope.LAYER)
    segments = segments_of(scorer, plain_keys(1, 1500, 8, 128))
    query = plain_query(1, LARGE)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(scorer.tuples(query, 0.01, passing(segments)))
    finally:
        torch.set_num_threads(before)
    assert all((one == found[0]).all() for one in found)
    query[0, 0] += 1
    assert (scorer.tuples(query, 0.01, passing(segments)) != found[0]).any()
