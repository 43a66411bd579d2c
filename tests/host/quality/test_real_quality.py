# SPDX-License-Identifier: Apache-2.0
"""On the real model and text, better scores give distributions closer to the full cache's."""

from statistics import fmean

import pytest

from hillinfer.settings import Settings
from hillinfer_bench.quality.policies import RecentOnly
from hillinfer_bench.quality.run import evaluate_text
from hillinfer_bench.quality.table import Configuration, Measures, contract_configuration
from hillinfer_bench.quality.texts import TextSample

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("real-model-quality")]

CONTEXT, LAST = 640, 40
# At α = 0.2 the rules differ by a factor of about 1.8 on any text; INT8 and INT4 hardly at all.
SETTINGS = Settings().changed(alpha=0.2)
CONFIGURATIONS = {
    "int8": contract_configuration(SETTINGS.changed(shadow="int8")),
    "int4": contract_configuration(SETTINGS.changed(shadow="int4")),
    "int2": contract_configuration(SETTINGS.changed(shadow="int2")),
    "raw_sum": contract_configuration(SETTINGS.changed(shadow="int8", rule="raw_sum")),
    "recent": Configuration("recent only", lambda shape, settings: RecentOnly(settings), SETTINGS),
    "everything": contract_configuration(SETTINGS.changed(alpha=1.0)),
}
NOISE = 1.15


@pytest.fixture(scope="module")
def measured(real_model, real_ids):
    """Measures of the full cache and of every configuration, one per text."""
    columns = [
        evaluate_text(
            real_model,
            TextSample("pydoc", tuple(ids[: CONTEXT + 1])),
            LAST,
            list(CONFIGURATIONS.values()),
        )
        for ids in real_ids[:1]
    ]
    return dict(zip(["full", *CONFIGURATIONS], zip(*columns, strict=True), strict=True))


def divergence(measures):
    return fmean(one.kl_divergence for one in measures)


def test_rules_in_order(measured):
    weight_sum, raw_sum = divergence(measured["int8"]), divergence(measured["raw_sum"])
    assert 0 < weight_sum < raw_sum < divergence(measured["recent"])


def test_shadows_in_order_within_noise(measured):
    int8, int4, int2 = (divergence(measured[name]) for name in ("int8", "int4", "int2"))
    assert int8 <= int4 * NOISE
    assert int4 <= int2 * NOISE


def test_selecting_everything_is_the_full_cache(measured):
    assert measured["everything"] == measured["full"]
    for one in measured["everything"]:
        assert one == Measures(one.negative_log_likelihood, 0.0, 1.0)


def test_selecting_little_is_not_the_full_cache(measured):
    for one, full in zip(measured["recent"], measured["full"], strict=True):
        assert one.agreement < 1.0
        assert one.negative_log_likelihood > full.negative_log_likelihood
