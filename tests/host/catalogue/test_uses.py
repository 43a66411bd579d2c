# SPDX-License-Identifier: Apache-2.0
"""Uses are what the store counted, fading with time."""

import math

import pytest
import torch
from stored_document import TOKENS, stored_document

from hillinfer.catalogue.records import CatalogueError, KnownDocument, check_stored, document_uses
from hillinfer.store.eviction import HITS_HALF_LIFE
from hillinfer.store.store import Store
from hillinfer.store_namespaces import prefix_ids


@pytest.fixture
def stored(tmp_path):
    Store.create(tmp_path / "store", 64 << 20)
    with Store(tmp_path / "store", clock=lambda: 1000.0) as store:
        yield store, stored_document(store, "llama", torch.float32)


def test_uses_fade_by_half_in_a_half_life(stored):
    store, document = stored
    key, tokens, _ = document.prompts.stored_key(document.ids)
    assert tokens == TOKENS
    # They are written once a second.
    store.room.write_touched()
    now = document_uses(store.database, [key], 1000.0)[key]
    later = document_uses(store.database, [key], 1000.0 + HITS_HALF_LIFE)[key]
    assert now.hits >= 1
    assert later.hits == pytest.approx(now.hits / 2)
    assert now.per_hour == pytest.approx(now.hits * math.log(2) * 3600 / HITS_HALF_LIFE)
    assert (now.last, now.token_bytes) == (1000.0, document.prompts.shape.token_bytes)
    # Each lookup is one more.
    document.prompts.stored_key(document.ids)
    store.room.write_touched()
    assert document_uses(store.database, [key], 1000.0)[key].hits == pytest.approx(now.hits + 1)


def test_a_shorter_prefix_of_what_is_stored_is_found_by_its_key(stored):
    store, document = stored
    key, tokens, _ = document.prompts.stored_key(document.ids[:130])
    assert tokens == 128
    assert prefix_ids(store, key) == document.ids[:128]
    whole, _, _ = document.prompts.stored_key(document.ids)
    assert prefix_ids(store, whole) == document.ids
    assert document_uses(store.database, [key, whole], 1000.0).keys() == {key, whole}


def test_what_is_not_stored_has_no_uses(stored):
    store, document = stored
    missing = KnownDocument(b"\x05" * 32, "lost", "m", b"n", 64, 0.0)
    uses = document_uses(store.database, [missing.key], 0.0)
    assert uses == {}
    with pytest.raises(CatalogueError, match="the rows of 'lost' are gone"):
        check_stored(missing, uses)
    assert document.prompts.stored_key([1, 2, 3]) is None
