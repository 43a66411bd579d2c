# SPDX-License-Identifier: Apache-2.0
"""Documents that were read once and come back from a store."""

from dataclasses import dataclass
from typing import Any

import torch
from tiny_models import TinyModel, prompts
from transformers import DynamicCache

from hillinfer.forms.form import DocumentStates
from hillinfer.forms.whole import stored_states
from hillinfer.generate.answering import Generation
from hillinfer.reuse.stored_prompts import StoredPrompts

TOKENS = 256


@dataclass(frozen=True)
class StoredDocument:
    """A model, a document's states from the store, and the cache that read it."""

    model: Any
    states: DocumentStates
    full: Any
    prompts: StoredPrompts

    @property
    def ids(self):
        return list(self.states.ids)


def stored_document(store, family="llama", dtype=torch.float32, tokens=TOKENS, head_dim=32):
    heads = {"heads": "mha"} if family == "opt" else {}
    model = TinyModel(family, dtype=dtype, head_dim=head_dim, **heads).build()
    ids = prompts([tokens])[0][0].tolist()
    full = DynamicCache()
    Generation(model, full, 64).read(ids)
    stored = StoredPrompts(store, model)
    assert stored.keep(full, ids) == tokens
    return StoredDocument(model, stored_states(stored, ids), full, stored)


def logits(model, opened, ids):
    """Return logits of a chunk behind a document, (tokens, vocabulary) in float32."""
    with torch.no_grad():
        for start in (*opened.unread,):
            model(input_ids=torch.tensor([[start]]), past_key_values=opened.cache)
        output = model(input_ids=torch.tensor([ids]), past_key_values=opened.cache)
    return output.logits[0].float()
