# SPDX-License-Identifier: Apache-2.0
"""Stored rows take no memory until a document is opened, and answer as all rows do."""

import pytest
import torch
from stored_document import logits, stored_document
from tiny_models import prompts

from hillinfer.errors import CacheUseError
from hillinfer.forms.form import DocumentStates, FormRates
from hillinfer.forms.table import make_form
from hillinfer.forms.whole import StoredRowsForm
from hillinfer.model_shape import ModelShape
from hillinfer.store.store import Store

QUESTION = [5, 9, 2, 31, 7]


@pytest.fixture
def document(tmp_path):
    Store.create(tmp_path / "store", 64 << 20)
    with Store(tmp_path / "store") as store:
        yield stored_document(store, "llama", torch.float32)


def test_it_answers_as_all_rows(document):
    made = StoredRowsForm(document.prompts).make(document.model, document.states)
    held = make_form("held").make(document.model, document.states).open()
    expected = logits(document.model, held, QUESTION)
    for _ in range(2):
        opened = made.open()
        assert opened.unread == ()
        torch.testing.assert_close(logits(document.model, opened, QUESTION), expected)
        opened.close()
    # The twin: another question's are others.
    other = logits(document.model, made.open(), [5, 9, 2, 31, 8])
    assert not torch.allclose(other, expected)


def test_it_takes_nothing_and_the_time_of_all_rows(document):
    form = StoredRowsForm(document.prompts)
    shape = ModelShape.from_config(document.model.config, document.model.dtype)
    made = form.make(document.model, document.states)
    assert (form.name, form.byte_count(shape, 256), made.byte_count) == ("rows", 0, 0)
    rates = FormRates(1e6, 1e6, 100.0, 0.01)
    held = make_form("held")
    assert form.seconds(rates, shape, 256) == held.seconds(rates, shape, 256)


def test_rows_that_went_are_told_when_it_is_opened(document):
    ids = prompts([256], seed=5)[0][0].tolist()
    other = DocumentStates(tuple(ids), document.states.layers)
    made = StoredRowsForm(document.prompts).make(document.model, other)
    with pytest.raises(CacheUseError, match="has no rows of this document of 256 tokens any more"):
        made.open()
    # What is there of it is taken, and the rest is still to be read.
    half = DocumentStates((*document.ids[:128], *ids[128:]), document.states.layers)
    opened = StoredRowsForm(document.prompts).make(document.model, half).open()
    assert opened.unread == tuple(ids[128:])
    assert opened.cache.get_seq_length() == 128
    opened.close()
