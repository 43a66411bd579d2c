# SPDX-License-Identifier: Apache-2.0
"""A tiny model and a document of it that a store holds."""

import pytest
import torch
from stored_document import stored_document

from hillinfer.store.store import Store


@pytest.fixture(scope="session")
def document(tmp_path_factory):
    """A document of 256 tokens of a tiny Llama in BF16, as the store gives it back."""
    place = tmp_path_factory.mktemp("store") / "store"
    Store.create(place, 64 << 20)
    with Store(place) as store:
        yield stored_document(store, "llama", torch.bfloat16)
