# SPDX-License-Identifier: Apache-2.0
"""Work that is done before another thread would wake is done by its caller alone."""

import subprocess
import sys

import pytest

from hillinfer.native.library import Variant, native_library

_ATTEND = """
rows = Rows(shape_of(4, 2, 128), count)
attention = NativeAttention(shape_of(4, 2, 128))
attention.attend(rows.query, rows.scaling, [rows.addresses])
"""
_CHOOSE = """
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
scorer.choose(query, 0.1, [segment], 0, Wanted(count // 5, 4, 64))
"""
_PROGRAM = """
import os, sys
import numpy as np, torch
from native_cases import Rows, shape_of
from hillinfer.attention.native import NativeAttention
from hillinfer.scoring.scorer import SegmentShadow
from hillinfer.scoring.native import NativeScorer
from hillinfer.scoring.scorer import Wanted
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import KernelSpec
count, group_size = int(sys.argv[1]), int(sys.argv[2])
# What torch starts for itself is there before.
torch.set_num_threads(2)
torch.randn(512, 512) @ torch.randn(512, 512)
names = lambda: len(os.listdir("/proc/self/task"))
before = names()
{work}
print(names() - before)
"""


@pytest.mark.parametrize("work", [_ATTEND, _CHOOSE], ids=["attend", "choose"])
def test_little_work_starts_no_thread(work):
    # A row has 2 KiB, and a quarter of one of shadow.
    assert _started(work, 450) == 0
    assert _started(work, 20_000) == 1


def test_many_query_heads_are_much_work():
    """Each takes all codes, so as many bytes of shadow take longer."""
    if native_library().variants[0] is Variant.PORTABLE:
        pytest.skip("without vectors all of it is much work")
    assert _started(_CHOOSE, 2000) == 0
    assert _started(_CHOOSE, 2000, group_size=16) == 1


def _started(work, count, group_size=1):
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.replace("{work}", work), str(count), str(group_size)],
        capture_output=True,
        text=True,
        check=False,
        cwd=__file__.rpartition("/")[0],
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
