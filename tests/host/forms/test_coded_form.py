# SPDX-License-Identifier: Apache-2.0
"""Codes of all keys and values stay in memory, and answers are those of a cache that coded them."""

import pytest
from generation_runs import attached
from stored_document import stored_document
from tiny_models import TinyModel

from hillinfer.errors import SettingsError
from hillinfer.forms.form import FormRates
from hillinfer.forms.probes import ProbeSizes, Probing, recall_probes
from hillinfer.forms.shadowed import CodedForm, ShadowedForm
from hillinfer.generate.answering import Generation
from hillinfer.generate.tokens import Sampling
from hillinfer.model_shape import ModelShape
from hillinfer.store.store import Store

TOKENS = 1280
TINY = TinyModel()
QUESTIONS = ([5, 9, 2, 31, 7], [40, 3, 3, 17])
CODED = {"shadow": "int4", "alpha": 0.5, "exact": 0.05, "exact_floor": 16}


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    place = tmp_path_factory.mktemp("coded") / "store"
    Store.create(place, 64 << 20)
    with Store(place) as store:
        yield stored_document(store, tokens=TOKENS)


def answer(model, cache, ids):
    generation = Generation(model, cache, 64)
    generation.read(ids)
    return list(generation.decode(Sampling(), 6, frozenset()))


def test_it_answers_as_a_cache_that_read_the_document(document, cold_dir):
    model = document.model
    with attached(model, cold_dir, **CODED) as hill:
        expected = []
        for question in QUESTIONS:
            cache = hill.new_cache()
            expected.append(answer(model, cache, [*document.ids, *question]))
            cache.close()
        form = CodedForm(hill)
        assert form.name == "coded-int4"
        made = form.make(model, document.states)
        for question, wanted in zip(QUESTIONS, expected, strict=True):
            opened = made.open()
            assert opened.cache.get_seq_length() == TOKENS
            assert answer(model, opened.cache, question) == wanted
            opened.close()
        # The twin: another question has another answer.
        assert expected[0] != expected[1]
        made.close()


def test_codes_are_there_before_anybody_asks(document, cold_dir, least_budget):
    model = document.model
    arrivals = {}
    # So little a model leaves room in its lists, in which all codes would be hot.
    least = int(0.95 * least_budget(TINY, TOKENS + 64, 2, **CODED))
    for name, budget in (("enough", "24MiB"), ("least", least)):
        with attached(model, cold_dir, **CODED, dram_budget=budget) as hill:
            made = CodedForm(hill).make(model, document.states)
            opened = made.open()
            before = opened.cache.statistics()
            answer(model, opened.cache, QUESTIONS[0])
            done = opened.cache.statistics().minus(before)
            assert done.coded_tokens > 0
            arrivals[name] = done.coded_arrivals
            opened.close()
            made.close()
    # The twin: where the budget has no room for codes, more of them come as rows.
    assert arrivals["enough"] < arrivals["least"] / 2


def test_what_it_takes_is_computed(document, cold_dir):
    model = document.model
    shape = ModelShape.from_config(model.config, model.dtype)
    with attached(model, cold_dir, **CODED) as hill:
        form = CodedForm(hill)
        made = form.make(model, document.states)
        assert made.byte_count == form.byte_count(shape, TOKENS)
        assert form.byte_count(shape, 1024) < made.byte_count < form.byte_count(shape, 2048)
        rates = FormRates(1e6, 1e6, 100.0, 0.01)
        exact = 0.05 * TOKENS * shape.token_bytes
        assert form.seconds(rates, shape, TOKENS).opening == pytest.approx(exact / 1e6, rel=0.05)
        made.close()


def test_an_engine_that_codes_nothing_is_refused(document, cold_dir):
    for changes in ({"exact": 1.0}, {"exact": 0.1, "shadow": "int2"}):
        with (
            attached(document.model, cold_dir, **changes) as hill,
            pytest.raises(SettingsError, match="codes no token: attach with exact below alpha"),
        ):
            CodedForm(hill)


def test_probes_read_answers_token_by_token(document, cold_dir):
    model = document.model
    (probes,) = recall_probes(document.ids, (3,), 0, sizes=ProbeSizes(4, 12))
    probing = Probing(model, document.states, probes)
    found = {}
    for name, changes in (("all", {"alpha": 1.0}), ("few", {"alpha": 0.02, "exact": 1.0})):
        with attached(model, cold_dir, **(CODED | {"exact": 1.0} | changes)) as hill:
            form = ShadowedForm(hill, document.prompts)
            made = form.make(model, document.states)
            opened = made.open()
            found[name] = probing.quality(form, opened)
            assert opened.cache.get_seq_length() == TOKENS
            opened.close()
            made.close()
    # Where all tokens are selected nothing is lost, but for how terms are added up.
    assert found["all"].divergence < 1e-4 < found["few"].divergence
    assert found["all"].tokens == 36
