# SPDX-License-Identifier: Apache-2.0
"""What is refused before a rival starts, and what a rival refuses to take."""

import pytest
import torch
from rival_cases import SHAPE, make_setup

from hillinfer.errors import CacheUseError, SettingsError
from hillinfer_bench.rivals.table import RIVALS, make_rival


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch": 0}, "batch=0"),
        ({"context": 0}, "context=0"),
        ({"alpha": 0.0}, "alpha=0.0"),
        ({"alpha": 1.1}, "alpha=1.1"),
        ({"budget_bytes": -1}, "budget_bytes=-1"),
        ({"kept_sinks": -1}, "kept_sinks=-1"),
        ({"block_rows": 0}, "block_rows=0"),
    ],
)
def test_settings_are_checked(cold_dir, change, said):
    with pytest.raises(SettingsError, match=said):
        make_setup(cold_dir, **change)


def test_an_unknown_rival_is_refused_with_the_names(cold_dir):
    with pytest.raises(SettingsError, match=r"rival='flexgen': choose one of full-memory"):
        make_rival("flexgen", make_setup(cold_dir))


@pytest.mark.parametrize("name", RIVALS)
def test_wrong_states_are_refused(cold_dir, name):
    with make_rival(name, make_setup(cold_dir, context=100)) as rival:
        good = torch.zeros(SHAPE.kv_heads, 90, SHAPE.head_dim, dtype=torch.float16)
        with pytest.raises(CacheUseError, match="both must be"):
            rival.fill(0, 0, good.float(), good)
        with pytest.raises(CacheUseError, match="both must be"):
            rival.fill(0, 0, good[:1], good[:1])
        rival.fill(0, 0, good, good)
        with pytest.raises(CacheUseError, match=r"180 tokens in sequence 0, but context=100"):
            rival.fill(0, 0, good, good)
