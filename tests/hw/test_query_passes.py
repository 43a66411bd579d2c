# SPDX-License-Identifier: Apache-2.0
"""Four queries a pass score 3.8 times the tokens of one, in simulated RTL of Llama-3.1-8B."""

import pytest

from hillinfer_hw.memory_model import MEMORIES
from hillinfer_hw.toolchain import MissingToolError
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.kernel_figures import launch_segments
from hillinfer_model.pass_figures import pass_figures
from hillinfer_model.presets import preset_spec
from query_passes import GOAL, GOAL_PRESET, limit_of, row_of

SEGMENTS = 4


@pytest.mark.kernels
def test_four_queries_a_pass_reach_the_goal():
    memory, rows = MEMORIES["realistic"], []
    for queries in (1, 4):
        spec = preset_spec(GOAL_PRESET, KeyMode.INT4, Rule.WEIGHT_SUM, queries)
        try:
            rows.append(row_of(spec, Scope.LAYER, memory, SEGMENTS))
        except MissingToolError as missing:
            pytest.skip(str(missing))
    one, four = rows
    for row in rows:
        assert (row["wrong_beats"], row["faults"]) == (0, [])
    gain = four["scores_per_cycle"] / one["scores_per_cycle"]
    assert gain >= GOAL
    assert gain <= 1.01 * limit_of(one, four, memory)
    spec = preset_spec(GOAL_PRESET, KeyMode.INT4, Rule.WEIGHT_SUM)
    shapes = launch_segments(SEGMENTS * spec.segment_tokens, spec)
    modelled = pass_figures(spec, Scope.LAYER, shapes, memory, 4)
    assert modelled.gain == pytest.approx(gain, rel=0.02)
    assert modelled.cycles == pytest.approx(four["cycles"], rel=0.02)
