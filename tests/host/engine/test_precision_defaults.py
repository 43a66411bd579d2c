# SPDX-License-Identifier: Apache-2.0
"""Which tokens are selected and how precise they are where nobody chose it."""

import pytest

from hillinfer.settings import Settings


def defaults(**changes):
    made = Settings().changed(**changes)
    return made.importance_rate, made.exact_share, made.has_coded_tokens


def test_a_fifth_is_selected_and_most_of_it_comes_as_codes():
    assert defaults() == (0.2, 0.02, True)
    assert Settings().exact_floor == 128
    assert defaults(alpha="auto", exact="auto") == defaults()


@pytest.mark.parametrize("exact", [1, "1", "1.0"])
def test_exact_alone_is_what_was_before(exact):
    assert defaults(exact=exact) == (0.1, 1.0, False)


@pytest.mark.parametrize("alpha", [0.1, "0.1", 0.3, 1])
def test_an_alpha_that_was_chosen_means_what_it_meant(alpha):
    assert defaults(alpha=alpha) == (float(alpha), 1.0, False)
    assert defaults(alpha=alpha, exact=0.02) == (float(alpha), 0.02, True)


def test_as_large_an_exact_share_as_is_selected_leaves_nothing_to_code():
    assert defaults(alpha=0.05, exact=0.05) == (0.05, 0.05, False)
    # The twins: more is selected, and of a short context one token more than is kept.
    assert defaults(alpha=0.06, exact=0.05) == (0.06, 0.05, True)
    kept = Settings().kept_tokens
    assert defaults(alpha=0.05, exact=0.05, exact_floor=kept) == (0.05, 0.05, True)
    assert defaults(alpha=0.05, exact=0.05, exact_floor=kept + 1) == (0.05, 0.05, False)


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "core"},
        {"device": "csim"},
        {"device": "xrt"},
        {"shadow": "int2"},
    ],
)
def test_where_codes_gain_nothing_all_tokens_are_exact(changes):
    made = Settings().changed(**changes)
    assert (made.importance_rate, made.has_coded_tokens) == (0.1, False)
    # Twin: where it is asked for, codes come; keys of 2 bits are never attended to.
    assert made.changed(exact=0.02).has_coded_tokens == ("shadow" not in changes)


def test_a_model_on_a_gpu_has_all_exact():
    assert Settings().computed_on("cpu") == Settings()
    assert Settings().computed_on("cuda").importance_rate == 0.1
    assert not Settings().computed_on("cuda").has_coded_tokens
    chosen = Settings().changed(exact=0.05)
    assert chosen.computed_on("cuda") == chosen
