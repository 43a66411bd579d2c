# SPDX-License-Identifier: Apache-2.0
"""Faults in reading a prompt in stages."""

from __future__ import annotations

from mutants.mutant import Mutant

_READING, _RANKERS = "host/hillinfer/pruning/reading.py", "host/hillinfer/pruning/rankers.py"
_READ_TESTS = "tests/host/pruning/test_reading.py"
_RANK_TESTS = "tests/host/pruning/test_rankers.py"
_REFERENCE = f"{_READ_TESTS}::test_a_prompt_keeps_what_the_reference_keeps_and_answers_as_it_does"

PRUNING: tuple[Mutant, ...] = (
    Mutant(
        "forced-blocks-compete",
        "Blocks that stay in any case are not counted among those that are to stay.",
        _RANKERS,
        "left = max(0, count - int(forced.sum()))",
        "left = count",
        (f"{_RANK_TESTS}::test_the_choice_among_blocks",),
    ),
    Mutant(
        "window-is-one-block",
        "Of the blocks that the window reaches into only the last one stays.",
        _RANKERS,
        "forced[blocks - window_blocks :] = True",
        "forced[blocks - 1 :] = True",
        (f"{_RANK_TESTS}::test_the_choice_among_blocks",),
    ),
    Mutant(
        "window-sees-what-comes-later",
        "A query of the window gives weight to tokens behind its own.",
        _RANKERS,
        "triu(tokens - window + 1)",
        "triu(tokens)",
        (f"{_RANK_TESTS}::test_scores_are_those_of_the_restatement",),
    ),
    Mutant(
        "a-chunk-chooses-for-itself",
        "Blocks are chosen when the first chunk comes and not when the prompt is complete.",
        _READING,
        "        if length < now.whole:\n",
        "        if False:\n",
        (f"{_READ_TESTS}::test_chunks_change_no_choice",),
    ),
    Mutant(
        "kept-tokens-move-together",
        "Kept tokens are turned to the places that they have among each other.",
        _READING,
        'own["position_embeddings"] = self._rotary(hidden, places)',
        'own["position_embeddings"] = self._rotary(hidden, torch.arange(len(places)) + start)',
        (_REFERENCE,),
    ),
    Mutant(
        "deeper-chunks-see-ahead",
        "In deeper layers a token sees the next one.",
        _READING,
        "mask.triu(held + 1)",
        "mask.triu(held + 2)",
        (_REFERENCE,),
    ),
    Mutant(
        "deeper-rows-are-not-cut-off",
        "Where a cache was cut off, deeper layers keep rows of what is gone.",
        _READING,
        "                _shorten(layer, len(left))\n",
        "                pass\n",
        (f"{_READ_TESTS}::test_what_is_cut_off_is_cut_off_everywhere",),
    ),
    Mutant(
        "a-broken-stage-leaves-rows",
        "A pass that broke off in a deeper layer leaves rows in those before it.",
        _READING,
        "                _shorten(layer, left)\n",
        "                pass\n",
        (f"{_READ_TESTS}::test_a_pass_that_breaks_off_in_a_stage_can_be_made_again",),
    ),
    Mutant(
        "answers-have-no-boundary-states",
        "A turn that chooses anew knows nothing of the answer before it.",
        _READING,
        "        if is_first or keeps:\n",
        "        if is_first or (keeps and now.is_prompt):\n",
        (f"{_READ_TESTS}::test_a_turn_may_choose_anew",),
    ),
)
