# SPDX-License-Identifier: Apache-2.0
"""Faults in the study of the paper's tables."""

from __future__ import annotations

from mutants.mutant import Mutant

_STUDY = "tools/hillinfer_bench/study"
_TESTS = "tests/host/study"

STUDY = (
    Mutant(
        "rouge-of-the-last-row",
        "ROUGE-L counts a common word wherever it stands.",
        f"{_STUDY}/scoring.py",
        "before + 1 if word == other",
        "lengths[place - 1] + 1 if word == other",
        (f"{_TESTS}/test_study_scoring.py",),
    ),
    Mutant(
        "choice-by-the-sum",
        "A choice's likelihood is not that of a byte.",
        f"{_STUDY}/scoring.py",
        "[one / size for one, size in zip(likelihoods, sizes, strict=True)]",
        "list(likelihoods)",
        (f"{_TESTS}/test_study_scoring.py",),
    ),
    Mutant(
        "h2o-takes-back",
        "H2O ranks tokens that it dropped among those that it holds.",
        f"{_STUDY}/rules.py",
        "ranked = self._weights[:, :length].masked_fill(~self._held[:, :length], -torch.inf)",
        "ranked = self._weights[:, :length]",
        (f"{_TESTS}/test_study_rules.py",),
    ),
    Mutant(
        "leoam-splits-all",
        "LeoAM ranks the pages of all chunks.",
        f"{_STUDY}/rules.py",
        "split = min(-(-CANDIDATES * wanted // _SPLIT), chunks.shape[-1])",
        "split = chunks.shape[-1]",
        (f"{_TESTS}/test_study_rules.py",),
    ),
    Mutant(
        "h2o-sees-no-prompt",
        "H2O is shown no queries of the prompt.",
        f"{_STUDY}/reading.py",
        "count = min(way.observed, len(self._ids) - 1)",
        "count = 0",
        (f"{_TESTS}/test_study_command.py::test_a_way_that_selects_everything_is_the_full_cache",),
    ),
    Mutant(
        "partial-keys-take-no-room",
        "The prefetch-based system keeps partial keys nowhere.",
        f"{_STUDY}/modelled.py",
        "ranking_held = RATIO / 2",
        "ranking_held = 0.0",
        (f"{_TESTS}/test_study_modelled.py",),
    ),
    Mutant(
        "streamed-weights-for-nothing",
        "Weights that the GPU has no room for come in no time.",
        f"{_STUDY}/modelled.py",
        "attending + self.streaming)",
        "attending)",
        (f"{_TESTS}/test_study_modelled.py",),
    ),
    Mutant(
        "skew-the-other-way",
        "The card's pool has what tends to be wanted.",
        f"{_STUDY}/modelled.py",
        "min(1.0, hits * selected / hosted) if hosted",
        "min(1.0, (1 - hits) * selected / hosted) if hosted",
        (f"{_TESTS}/test_study_modelled.py",),
    ),
    Mutant(
        "known-ways-answer-again",
        "A run that goes on asks every way again.",
        f"{_STUDY}/accuracy.py",
        'if way.title not in before["scores"]]',
        "]",
        (f"{_TESTS}/test_study_command.py::test_a_run_goes_on_with_what_is_known",),
    ),
    Mutant(
        "ways-of-other-bytes-are-known",
        "Answers stand for a way that reads other bytes now.",
        f"{_STUDY}/run.py",
        'if one in facts["ways"]}',
        "}",
        (f"{_TESTS}/test_study_command.py::test_only_ways_that_are_not_known_answer",),
    ),
    Mutant(
        "beside-full-means-of-one-alone",
        "A way's own loss is told for what it loses beside the full cache.",
        f"{_STUDY}/beside_full.py",
        'own["nll"] - other["nll"] for own',
        'own["nll"] for own',
        (
            f"{_TESTS}/test_study_command.py::test_ways_are_compared_with_the_full_cache_question_by_question",
        ),
    ),
)
