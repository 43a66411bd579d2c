# SPDX-License-Identifier: Apache-2.0
"""Work that is done before another thread would wake is done by its caller alone."""

import json
import subprocess

import pytest

from hillinfer.native.library import Variant, native_library

# Each case is a fork of one process that has imported all: a library's threads stay once started.
_PROGRAM = """
import json, os, sys
import numpy as np, torch
from native_cases import Rows, shape_of
from hillinfer_bench.precision.in_place_attention import InPlaceAttention
from hillinfer.native.library import native_library
from hillinfer.scoring.scorer import SegmentShadow
from hillinfer.scoring.native import NativeScorer
from hillinfer.scoring.scorer import Wanted
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import KernelSpec


def attend(count, group_size):
    rows = Rows(shape_of(4, 2, 128), count)
    attention = InPlaceAttention(shape_of(4, 2, 128))
    attention.attend(rows.query, rows.scaling, [rows.addresses])


def choose(count, group_size):
    generator = torch.Generator().manual_seed(1)
    spec = KernelSpec(128, 4, group_size, segment_tokens=65_536)
    scorer = NativeScorer(spec, Scope.LAYER)
    keys = torch.randn((count, 4, 128), generator=generator).half()
    torch.set_num_threads(1)
    statistics = scorer.statistics(keys, 0, None)
    shadow = np.zeros((spec.segment_bytes // 64, 64), np.uint8)
    scorer.encode(keys, statistics, shadow, 0)
    torch.set_num_threads(2)
    segment = SegmentShadow(0, count, shadow, statistics)
    query = torch.randn((4 * group_size, 128), generator=generator)
    scorer.choose(query, 0.1, [segment], 0, [Wanted(count // 5, 4, 64)])[0]


def threads():
    return len(os.listdir("/proc/self/task"))


def started(work, count, group_size):
    # What torch starts for itself is there before.
    torch.set_num_threads(2)
    torch.randn(512, 512) @ torch.randn(512, 512)
    before = threads()
    {"attend": attend, "choose": choose}[work](count, group_size)
    return threads() - before


native_library()
for case in json.loads(sys.argv[1]):
    out, into = os.pipe()
    if os.fork() == 0:
        os.write(into, str(started(*case)).encode())
        os._exit(0)
    os.close(into)
    os.wait()
    print(os.read(out, 9).decode())
"""
ATTEND, CHOOSE = "attend", "choose"
# What is done, of how many tokens, with how many query heads of a KV head; and its threads.
CASES = {
    # A row has 2 KiB, and a quarter of one of shadow.
    (ATTEND, 450, 1): 0,
    (ATTEND, 20_000, 1): 1,
    (CHOOSE, 450, 1): 0,
    (CHOOSE, 20_000, 1): 1,
    # Each query head takes all codes, so as many bytes of shadow take longer.
    (CHOOSE, 2000, 1): 0,
    (CHOOSE, 2000, 16): 1,
}


@pytest.fixture(scope="module")
def started(warm_python):
    """How many threads each case started, each in a process that had none."""
    done = subprocess.run(
        [*warm_python, "-c", _PROGRAM, json.dumps(list(CASES))],
        capture_output=True,
        text=True,
        check=False,
        cwd=__file__.rpartition("/")[0],
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(int, done.stdout.split()), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_little_work_starts_no_thread(case, started):
    if case[1] == 2000 and native_library().variants[0] is Variant.PORTABLE:
        pytest.skip("without vectors all of it is much work")
    assert started[case] == CASES[case]
