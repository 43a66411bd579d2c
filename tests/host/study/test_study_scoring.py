# SPDX-License-Identifier: Apache-2.0
"""How answers are scored, by cases that are worked out by hand."""

import math

import pytest
import torch

from hillinfer_bench.study.scoring import Expected, best_choice, rouge_l


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("a b c", "a b c", 1.0),
        # Two of two words, two of four: 2 * 1 * 0.5 / 1.5.
        ("the cat", "the cat sat down", 2 / 3),
        # In order: "a c" of "a b c" and of "c a c".
        ("a b c", "c a c", 2 / 3),
        # The other order leaves one word in common.
        ("b a", "a b", 0.5),
        # A word counts once.
        ("a", "a a", 2 / 3),
        ("The CAT", "the cat", 1.0),
        ("", "the cat", 0.0),
        ("dog", "", 0.0),
        ("dog", "cat", 0.0),
    ],
)
def test_rouge_is_the_longest_common_subsequence_of_words(answer, reference, expected):
    assert rouge_l(answer, reference) == pytest.approx(expected)
    assert rouge_l(reference, answer) == pytest.approx(expected)


def test_rouge_falls_with_a_word_that_is_taken_away():
    words = ["one", "two", "three", "four", "five"]
    whole = " ".join(words)
    for number in range(len(words)):
        fewer = " ".join(words[:number] + words[number + 1 :])
        # 2 * (4/4) * (4/5) / (4/4 + 4/5)
        assert rouge_l(fewer, whole) == pytest.approx(8 / 9)


def test_the_choice_is_that_of_the_largest_likelihood_per_byte():
    # -1, -0.5 and -0.75 a byte: the sum would choose the first.
    assert best_choice([-4.0, -10.0, -6.0], [4, 20, 8]) == 1
    assert best_choice([-4.0, -10.0, -6.0], [4, 10, 8]) == 2
    assert best_choice([-1.0, -1.0], [1, 1]) == 0


def test_forced_tokens_are_scored_where_it_is_asked():
    # Probabilities 1/4 and 3/4 of two tokens, twice, then the other way round.
    logits = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)], [math.log(3), 0.0]])
    found = Expected.of(logits, [1, 0, 0], [0, 2])
    assert found.right
    assert found.nll == pytest.approx(math.log(4 / 3))
    assert found.likelihood == pytest.approx(2 * math.log(3 / 4))
    other = Expected.of(logits, [1, 0, 0], [0, 1])
    assert not other.right
    assert other.likelihood == pytest.approx(math.log(3 / 16))
