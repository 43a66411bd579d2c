# SPDX-License-Identifier: Apache-2.0
"""Key shadows stay in memory, and each answer reads what it selects where the store has it."""

from functools import partial

import pytest
from generation_runs import attached
from stored_document import stored_document
from tiny_models import prompts

from hillinfer.errors import CacheUseError, SettingsError
from hillinfer.forms.form import DocumentStates, FormRates
from hillinfer.forms.shadowed import LeadForm, ShadowedForm
from hillinfer.generate.answering import Generation
from hillinfer.generate.tokens import Sampling
from hillinfer.model_shape import ModelShape
from hillinfer.store.store import Store

TOKENS = 1280
KINDS = (ShadowedForm, partial(LeadForm, share=0.2))
QUESTIONS = ([5, 9, 2, 31, 7], [40, 3, 3, 17], [5, 9, 2, 31, 7])


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    place = tmp_path_factory.mktemp("shadowed") / "store"
    Store.create(place, 64 << 20)
    with Store(place) as store:
        yield stored_document(store, tokens=TOKENS)


def answer(model, cache, ids):
    generation = Generation(model, cache, 64)
    generation.read(ids)
    return list(generation.decode(Sampling(), 6, frozenset()))


@pytest.fixture(scope="module")
def expected(document, cold_dir):
    """Answers of caches that read the document: to a question, and to another."""
    model, found = document.model, []
    with attached(model, cold_dir, shadow="int4") as hill:
        for question in QUESTIONS[:2]:
            cache = hill.new_cache()
            found.append(answer(model, cache, [*document.ids, *question]))
            cache.close()
    return found


@pytest.mark.parametrize("kind", KINDS, ids=("shadowed", "lead"))
def test_it_answers_as_a_cache_that_read_the_document(document, cold_dir, kind, expected):
    model = document.model
    with attached(model, cold_dir, shadow="int4") as hill:
        form = kind(hill, document.prompts)
        made = form.make(model, document.states)
        answers = []
        for question in QUESTIONS:
            opened = made.open()
            assert opened.cache.get_seq_length() == TOKENS
            answers.append(answer(model, opened.cache, question))
            opened.close()
        assert answers == [*expected, expected[0]]
        # The twin: another question has another answer.
        assert expected[0] != expected[1]
        # An opening goes on when the form has gone.
        opened = made.open()
        made.close()
        assert answer(model, opened.cache, QUESTIONS[0]) == expected[0]
        opened.close()


def test_it_takes_the_shadows_of_its_segments(document, cold_dir):
    model = document.model
    shape = ModelShape.from_config(model.config, model.dtype)
    with attached(model, cold_dir, shadow="int4") as hill:
        form = ShadowedForm(hill, document.prompts)
        assert form.name == "shadow-int4"
        made = form.make(model, document.states)
        opened = made.open()
        assert made.byte_count == form.byte_count(shape, TOKENS)
        # What an ordinary cache stored has no shadows: they are made with the first answer.
        answer(model, opened.cache, QUESTIONS[0])
        beside = opened.cache.statistics().shadow_bytes - made.byte_count
        assert 0 <= beside <= made.byte_count // 20
        rates = FormRates(1e6, 1e6, 100.0, 0.01)
        seconds = form.seconds(rates, shape, TOKENS)
        assert seconds.opening == pytest.approx(0.2 * TOKENS * shape.token_bytes / 1e6)
        assert seconds.token == pytest.approx(0.01 + seconds.opening)
        opened.close()
        made.close()
    assert form.byte_count(shape, 1024) * 2 == form.byte_count(shape, 1025) == made.byte_count


def missed(document, hill, form):
    """Return the rows that a question read token by token misses, and what is answered."""
    made = form.make(document.model, document.states)
    opened = made.open()
    before = opened.cache.statistics().cold_rows_read
    generation = Generation(document.model, opened.cache)
    generation.read_singly(QUESTIONS[0])
    tokens = list(generation.decode(Sampling(), 6, frozenset()))
    rows = opened.cache.statistics().cold_rows_read - before
    opened.close()
    made.close()
    return rows, tokens


def test_what_leads_is_missed_by_no_question(document, cold_dir):
    forms = (ShadowedForm, partial(LeadForm, share=0.05), partial(LeadForm, share=1.0))
    found = []
    for kind in forms:
        with attached(document.model, cold_dir, shadow="int4") as hill:
            found.append(missed(document, hill, kind(hill, document.prompts)))
    rows = [one for one, _ in found]
    assert rows[0] > rows[1] > rows[2]
    assert len({tuple(tokens) for _, tokens in found}) == 1


def test_a_lead_says_what_it_takes_and_how_soon_it_is(document, cold_dir):
    shape = ModelShape.from_config(document.model.config, document.model.dtype)
    rates = FormRates(1e6, 1e6, 100.0, 0.01)
    with attached(document.model, cold_dir, shadow="int4") as hill:
        shadowed, lead = ShadowedForm(hill, document.prompts), LeadForm(hill, document.prompts, 0.1)
        assert lead.name == "lead-0.1"
        more = lead.byte_count(shape, TOKENS) - shadowed.byte_count(shape, TOKENS)
        assert more == int(0.1 * shape.token_bytes * TOKENS)
        # Half of what α selects is there.
        seconds = [one.seconds(rates, shape, TOKENS).opening for one in (lead, shadowed)]
        assert seconds[0] == pytest.approx(seconds[1] / 2)
        for share in (0.0, -0.1, 1.5):
            with pytest.raises(SettingsError, match=rf"lead={share} is no share above 0"):
                LeadForm(hill, document.prompts, share)


def test_a_document_that_the_store_lost_is_refused(document, cold_dir):
    ids = prompts([TOKENS], seed=5)[0][0].tolist()
    with attached(document.model, cold_dir, shadow="int4") as hill:
        form = ShadowedForm(hill, document.prompts)
        other = DocumentStates((*document.ids[:1024], *ids[1024:]), document.states.layers)
        with pytest.raises(CacheUseError, match="has 1024 of the document's 1280 tokens"):
            form.make(document.model, other)
