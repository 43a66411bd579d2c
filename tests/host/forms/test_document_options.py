# SPDX-License-Identifier: Apache-2.0
"""From a stored document to a form that placement chose: measured, placed, made and opened."""

import pytest
from stored_document import TOKENS, logits

from hillinfer.errors import SettingsError
from hillinfer.forms.form import FormRates
from hillinfer.forms.probes import FormQuality, ProbeSizes, measure_forms, recall_probes
from hillinfer.forms.table import document_options, make_form
from hillinfer.model_shape import ModelShape
from hillinfer.placement.options import FirstTokenUtility, Tier
from hillinfer.placement.placing import Placing
from hillinfer.placement.policies import make_placement_policy

NAMES = ("held", "int8", "int4", "knorm-0.2")
RATES = {
    "dram": FormRates(1e9, 1e12, 50.0, 0.01),
    "drive": FormRates(1e6, 1e12, 50.0, 0.01),
    "rest": FormRates(1e6, 1e12, 50.0, 0.01),
}


def tiers(dram, drive=0):
    return Tier("dram", dram), Tier("drive", drive), Tier("rest")


@pytest.fixture(scope="module")
def measured(document):
    (probes,) = recall_probes(document.ids, (6,), 0, sizes=ProbeSizes(4, 12))
    forms = [make_form(name) for name in NAMES]
    return forms, measure_forms(document.model, document.states, forms, probes)


def test_a_document_is_measured_placed_made_and_opened(document, measured):
    forms, qualities = measured
    shape = ModelShape.from_config(document.model.config, document.model.dtype)
    held = make_form("held").byte_count(shape, TOKENS)
    chosen = {}
    for share in (1.0, 0.6, 0.3, 0.0):
        budgets = tiers(int(share * held))
        placed = Placing(budgets, make_placement_policy("hulls"), FirstTokenUtility(0.2))
        placed.put("a", document_options(forms, qualities, RATES, budgets, shape, TOKENS), 0.0)
        chosen[share] = placed.stock.option("a").form
        assert placed.stock.used("dram") <= int(share * held)
    assert chosen == {1.0: "held", 0.6: "int8", 0.3: "int4", 0.0: "rows"}
    opened = make_form(chosen[0.3]).make(document.model, document.states).open()
    assert logits(document.model, opened, [5, 9, 2]).isfinite().all()


def test_options_count_the_lower_end_and_rest_takes_no_budget(document, measured):
    forms, qualities = measured
    shape = ModelShape.from_config(document.model.config, document.model.dtype)
    options = document_options(forms, qualities, RATES, tiers(1, 1), shape, TOKENS)
    by_place = {option.place: option for option in options}
    assert len(by_place) == 2 + 2 * len(NAMES)
    text, rows = by_place["text", "rest"], by_place["rows", "rest"]
    assert (text.byte_count, rows.byte_count) == (0, 0)
    assert text.first_token == TOKENS / 50.0
    assert rows.first_token == by_place["held", "drive"].first_token
    assert by_place["held", "dram"].quality == 1.0
    assert by_place["int4", "dram"].quality == qualities["int4"].lower < qualities["int4"].mean
    assert by_place["int4", "dram"].first_token < by_place["int4", "drive"].first_token


def test_what_was_not_measured_is_named(document):
    shape = ModelShape.from_config(document.model.config, document.model.dtype)
    known = {"int8": FormQuality((1.0,), 0.0, 8)}
    forms = [make_form("int8"), make_form("int4")]
    with pytest.raises(SettingsError, match="form int4 was not measured for this document"):
        document_options(forms, known, RATES, tiers(1), shape, TOKENS)
    with pytest.raises(SettingsError, match="no rates of tier drive, rest: measure them first"):
        document_options([], {}, {"dram": RATES["dram"]}, tiers(1), shape, TOKENS)
