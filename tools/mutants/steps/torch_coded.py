# SPDX-License-Identifier: Apache-2.0
"""Faults in coded attention in torch, and in the figures of a partial softmax."""

from __future__ import annotations

from mutants.mutant import Mutant

_ATTENTION = "host/hillinfer/attention"
_TORCH = "tests/host/attention/test_torch_coded.py"
_FIGURES = "tests/sw_model/test_partial_softmax_figures.py"

TORCH_CODED = (
    Mutant(
        "torch-fma-rounds-twice",
        "A fused multiply-add in torch is rounded to float64 first.",
        f"{_ATTENTION}/torch_coded.py",
        "torch.where((lost > 0) == (total > 0), 1, -1)",
        "torch.zeros_like(even, dtype=torch.int64)",
        (f"{_TORCH}::test_fused_multiply_add_rounds_once",),
    ),
    Mutant(
        "torch-lanes-in-another-order",
        "Neighbouring lanes of an inner product are added first.",
        f"{_ATTENTION}/torch_coded.py",
        "sums[..., :half] + sums[..., half:]",
        "sums[..., ::2] + sums[..., 1::2]",
        (f"{_TORCH}::test_attention_over_both",),
    ),
    Mutant(
        "torch-fills-blocks-up-with-tokens",
        "What fills the last block up counts when its largest X is taken.",
        f"{_ATTENTION}/torch_coded.py",
        "_NO_TOKEN = -(2**40)",
        "_NO_TOKEN = 0",
        (f"{_TORCH}::test_coded_blocks",),
    ),
    Mutant(
        "torch-first-segment-means",
        "Blocks of all segments take the means of the first one.",
        f"{_ATTENTION}/torch_coded.py",
        "torch.stack([one.means for one in segments])[own]",
        "torch.stack([one.means for one in segments])[own * 0]",
        (f"{_TORCH}::test_attention_over_both",),
    ),
    Mutant(
        "torch-segments-overlap",
        "Tokens of a segment are looked for where those of the first one lie.",
        f"{_ATTENTION}/torch_coded.py",
        "begins = np.cumsum([0, *counts])[numbers][:, None]",
        "begins = np.zeros((len(numbers), 1), np.int64)",
        (f"{_TORCH}::test_attention_over_both",),
    ),
    Mutant(
        "torch-adds-what-is-far-below",
        "Blocks far below the largest are added.",
        f"{_ATTENTION}/torch_coded.py",
        "moved = torch.where(counts[..., None], moved, -0.0)",
        "moved = moved + 0",
        (f"{_TORCH}::test_blocks_far_below_the_largest_add_nothing",),
    ),
    Mutant(
        "torch-values-round-down",
        "Halves of value codes do not go to even.",
        "tests/host/twins/torch_values.py",
        "(values + half - 1 + odd) >> shift",
        "(values + half - 1) >> shift",
        (f"{_TORCH}::test_values_are_coded_as_golden_codes_them",),
    ),
    Mutant(
        "card-keeps-products-for-nothing",
        "A scoring launch that keeps L' writes none of it.",
        "sw_model/hillinfer_model/cycle_model.py",
        "return heapq.merge(kept, scores, key=lambda burst: burst.after_beat)",
        "return iter(scores)",
        (_FIGURES,),
    ),
    Mutant(
        "partial-softmax-without-its-heads",
        "R, W and marks of a partial softmax are not counted.",
        "sw_model/hillinfer_model/coded_cycles.py",
        "    return beat_count(HEAD_BYTES * spec.query_heads) + beat_count(",
        "    return beat_count(",
        (_FIGURES,),
    ),
)
