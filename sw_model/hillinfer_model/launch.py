# SPDX-License-Identifier: Apache-2.0
"""Everything of the launch format in one namespace (contract, section 10)."""

from hillinfer_model.beats import Beats, beat_count
from hillinfer_model.descriptor import (
    Descriptor,
    check_score_descriptor,
    check_shadow_descriptor,
)
from hillinfer_model.golden_launch import run_score_launch, run_shadow_launch
from hillinfer_model.launch_error import ErrorCode, LaunchError
from hillinfer_model.launch_result import STATUS_FILL, LaunchResult
from hillinfer_model.query_block import QueryBlock, make_query_block
from hillinfer_model.score_launch import SCOPE_NUMBERS, ScoreLaunch, scope_number
from hillinfer_model.score_tuples import (
    cut_blocks,
    make_tuples,
    pack_score_array,
    ranking_keys,
    unpack_score_array,
)
from hillinfer_model.shadow_launch import ShadowLaunch
from hillinfer_model.statistics_block import pack_statistics, unpack_statistics
from hillinfer_model.status_beat import StatusBeat

__all__ = [
    "SCOPE_NUMBERS",
    "STATUS_FILL",
    "Beats",
    "Descriptor",
    "ErrorCode",
    "LaunchError",
    "LaunchResult",
    "QueryBlock",
    "ScoreLaunch",
    "ShadowLaunch",
    "StatusBeat",
    "beat_count",
    "check_score_descriptor",
    "check_shadow_descriptor",
    "cut_blocks",
    "make_query_block",
    "make_tuples",
    "pack_score_array",
    "pack_statistics",
    "ranking_keys",
    "run_score_launch",
    "run_shadow_launch",
    "scope_number",
    "unpack_score_array",
    "unpack_statistics",
]
