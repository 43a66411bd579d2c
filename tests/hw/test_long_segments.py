# SPDX-License-Identifier: Apache-2.0
"""More than 65,536 tokens in one launch, and as many as a descriptor allows in one segment."""

import numpy as np
import pytest
from executions import EXECUTIONS, execution_of
from launch_cases import random_launch

from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.golden_launch import run_score_launch
from hillinfer_model.kernel_spec import KernelSpec

LONGEST = 65_536
# Few beats per token; what comes after a full segment must not start at a counter's overflow.
SPEC = KernelSpec(
    64, 1, 1, KeyMode.INT2, Rule.RAW_SUM, segment_tokens=LONGEST, block_tokens=4096
)  # fmt: skip
COMPILED = [entry.name for entry in EXECUTIONS if entry.name != "golden"]


@pytest.mark.parametrize("name", COMPILED)
def test_a_segment_of_65536_tokens_and_one_behind_it(name):
    launch = random_launch(SPEC, Scope.LAYER, [LONGEST, 100])
    golden = run_score_launch(SPEC, launch)
    found = execution_of(name).score(SPEC, launch)
    assert np.array_equal(found.output, golden.output)
    assert np.array_equal(found.status, golden.status)
    counts = found.status[:, 12:16].copy().view("<u4").reshape(-1)
    assert counts.tolist() == [LONGEST, 100]
    # The twin: the last token's tuple is looked at, too.
    golden.output.reshape(-1)[4 * LONGEST - 1] ^= 1
    assert not np.array_equal(found.output, golden.output)
