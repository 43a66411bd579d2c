# SPDX-License-Identifier: Apache-2.0
"""Every selection policy, a line each, and inputs to run them on."""

import numpy as np
import torch
from twins.torch_scorer import TorchScorer

from hillinfer.devices.opening import GoldenScorer
from hillinfer.settings import Settings
from hillinfer_bench.quality.policies import (
    ContractSelection,
    FloatWeights,
    LayerQueries,
    Pages,
    RecentOnly,
)
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import KernelSpec

KV_HEADS, GROUP_SIZE, HEAD_DIM = 2, 3, 16


def contract(scorer=TorchScorer, **changes):
    """Return what makes a contract selection of some rule, shadow and scope."""

    def make(settings):
        chosen = settings.changed(**changes)
        spec = KernelSpec(
            HEAD_DIM, KV_HEADS, GROUP_SIZE, chosen.shadow, chosen.rule, segment_tokens=512
        )
        return ContractSelection(scorer(spec, chosen.scope), chosen)

    return make


def float_weights(scope):
    return lambda settings: FloatWeights(settings.changed(scope=scope))


POLICIES = {
    "weight_sum-int8": contract(rule="weight_sum", shadow="int8"),
    "weight_sum-int4": contract(rule="weight_sum", shadow="int4"),
    "weight_sum-int2": contract(rule="weight_sum", shadow="int2"),
    "raw_sum-int8": contract(rule="raw_sum", shadow="int8"),
    "weight_sum-kv_head": contract(rule="weight_sum", shadow="int4", scope="kv_head"),
    "raw_sum-kv_head": contract(rule="raw_sum", shadow="int4", scope="kv_head"),
    "golden": contract(GoldenScorer, rule="weight_sum", shadow="int4"),
    "float-layer": float_weights(Scope.LAYER),
    "float-kv_head": float_weights(Scope.KV_HEAD),
    "pages": Pages,
    "recent-only": RecentOnly,
}
ONE_SET = {name for name in POLICIES if "kv_head" not in name and name != "pages"}


def some_layer(tokens, queries, seed=0):
    """Return random queries of the newest tokens and keys of all; some channels stand out."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-2, 3, (KV_HEADS, HEAD_DIM), generator=generator).float())
    keys = torch.randn(tokens, KV_HEADS, HEAD_DIM, generator=generator) * spread
    asked = torch.randn(queries, KV_HEADS * GROUP_SIZE, HEAD_DIM, generator=generator)
    return LayerQueries(asked, keys.half(), HEAD_DIM**-0.5)


def some_settings(**changes):
    return Settings().changed(**({"alpha": 0.1, "kept_sinks": 2, "kept_recent": 5} | changes))


def assert_same_sets(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)
