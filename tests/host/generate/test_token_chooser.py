# SPDX-License-Identifier: Apache-2.0
"""No token is chosen from logits that are no numbers."""

import pytest
import torch

from hillinfer.errors import CacheUseError, SettingsError
from hillinfer.generate.tokens import Sampling, TokenChooser

SAMPLINGS = (Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=3, top_p=0.5))


def chosen(logits, sampling):
    return TokenChooser(sampling, torch.device("cpu")).choose(torch.tensor(logits))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", range(3))
def test_one_logit_that_is_no_number_is_refused(sampling, odd, place):
    logits = [0.5, 20.0, -3.0]
    logits[place] = odd
    with pytest.raises(CacheUseError, match="not finite: its weights"):
        chosen(logits, sampling)


def test_the_lowest_temperature_takes_the_likeliest_token_and_less_is_refused():
    assert chosen([0.5, 1e8, -1e8], Sampling(temperature=1e-30)) == 1
    for less in (9.9e-31, 1e-40, 5e-324):
        with pytest.raises(SettingsError, match=r"temperature=.* use 0, which"):
            Sampling(temperature=less)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_tokens_that_a_model_rules_out_are_no_fault(sampling):
    nothing = float("-inf")
    assert chosen([nothing, 20.0, nothing], sampling) == 1
    with pytest.raises(CacheUseError):
        chosen([nothing] * 3, sampling)
