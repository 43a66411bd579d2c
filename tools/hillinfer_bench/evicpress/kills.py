# SPDX-License-Identifier: Apache-2.0
"""Kills processes while forms move, and looks whether every document still opens with its tokens.

A small model of random weights reads some documents into a store. A child process moves their
forms in a loop and is killed at a random moment. Then all documents are opened from what the
catalogue says, and their answers are compared with those of before. Nothing is open meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from hillinfer.catalogue.catalogue import Catalogue
from hillinfer.catalogue.form_cache import FormCache
from hillinfer.catalogue.measuring import ProbeWishes, measure_document
from hillinfer.catalogue.records import KnownDocument
from hillinfer.forms.probes import ProbeSizes
from hillinfer.forms.table import make_form
from hillinfer.generate.answering import Generation
from hillinfer.generate.tokens import Sampling
from hillinfer.memory_budget import Accountant
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.store.store import Store

_TOKENS, _WORDS, _ANSWER = 256, 199, 8
_FORMS = ("held", "int8", "rows", "int4", "text")
_EXACT = ("held", "rows", "text")
_QUESTION = (5, 9, 2, 31, 7)
_LONGEST_SECONDS = 0.08


def small_model() -> Any:
    """Return a Llama of random weights, the same in each process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_hidden_layers=2,
        vocab_size=_WORDS,
    )
    return LlamaForCausalLM(config).eval()


class Killing:
    """Documents in a store, a child that moves their forms, and what answers must be.

    Parameters
    ----------
    place
        Of the store, which is made here.
    documents
        How many.
    """

    def __init__(self, place: Path, documents: int) -> None:
        self._place, self._model = place, small_model()
        self._keys: list[bytes] = []
        self._expected: dict[tuple[bytes, str], list[int]] = {}
        Store.create(place, 64 << 20)
        with Store(place) as store, Catalogue(store.places) as catalogue:
            prompts = StoredPrompts(store, self._model)
            for number in range(documents):
                draw = torch.Generator().manual_seed(number)
                ids = torch.randint(0, _WORDS, (_TOKENS,), generator=draw).tolist()
                cache = DynamicCache()
                Generation(self._model, cache, 64).read(ids)
                prompts.keep(cache, ids)
                stored = prompts.stored_key(ids)
                assert stored is not None, "it was just kept"
                forms = [make_form(name) for name in ("held", "int8", "int4")]
                wishes = ProbeWishes(2, sizes=ProbeSizes(4, 12))
                found = measure_document(self._model, prompts, ids, forms, wishes)
                digest = prompts.namespace.digest
                document = KnownDocument(
                    stored[0], f"d{number}", "random", digest, stored[1], float(number)
                )
                catalogue.put(replace(document, resting=found.resting, measured=found.forms))
                self._keys.append(stored[0])
            form_cache = FormCache(self._model, prompts, store, catalogue, Accountant(1 << 30))
            for form in _FORMS:
                for key in self._keys:
                    catalogue.pin(key, form)
                form_cache.settle()
                for key in self._keys:
                    self._expected[key, form] = self._answer(form_cache, key)[1]
            form_cache.close()

    def kill_one(self, seconds: float) -> None:
        """Have a child move forms, and kill it so many seconds after it has begun to."""
        heard, told = os.pipe()
        child = os.fork()
        if not child:
            try:
                self._move(told)
            finally:
                os._exit(1)
        os.close(told)
        began = os.read(heard, 1)
        os.close(heard)
        assert began, "the child opened the store"
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    def wrong_tokens(self) -> int:
        """Open every document as the catalogue says, and return how many tokens are others."""
        wrong = 0
        with Store(self._place) as store, Catalogue(store.places) as catalogue:
            prompts = StoredPrompts(store, self._model)
            form_cache = FormCache(self._model, prompts, store, catalogue, Accountant(1 << 30))
            form_cache.settle()
            for key in self._keys:
                form, answer = self._answer(form_cache, key)
                expected = self._expected[key, form]
                wrong += sum(own != other for own, other in zip(answer, expected, strict=True))
                if form in _EXACT and expected != self._expected[key, "held"]:
                    wrong += _ANSWER
            form_cache.close()
        return wrong

    def _answer(self, form_cache: FormCache, key: bytes) -> tuple[str, list[int]]:
        found = form_cache.open(key.hex())
        generation = Generation(self._model, found.opened.cache, 64)
        generation.read([*found.opened.unread, *_QUESTION])
        return found.form, list(generation.decode(Sampling(), _ANSWER, frozenset()))

    def _move(self, told: int) -> None:
        """Move forms for ever, and tell when that begins."""
        with Store(self._place) as store, Catalogue(store.places) as catalogue:
            prompts = StoredPrompts(store, self._model)
            form_cache = FormCache(self._model, prompts, store, catalogue, Accountant(1 << 20))
            draw = random.Random(os.getpid())
            os.write(told, b".")
            while True:
                for key in self._keys:
                    catalogue.pin(key, draw.choice(_FORMS))
                form_cache.settle()


def kill_many(kills: int, documents: int = 4, seed: int = 0) -> dict[str, int]:
    """Kill so many processes, and return the figures of the goal.

    Parameters
    ----------
    kills
        How many.
    documents
        That forms move of.
    seed
        Of the moments.
    """
    torch.set_num_threads(1)
    draw = random.Random(seed)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        killing = Killing(Path(folder) / "store", documents)
        for _ in range(kills):
            killing.kill_one(draw.uniform(0, _LONGEST_SECONDS))
            wrong += killing.wrong_tokens()
    return {"kills": kills, "wrong_tokens": wrong}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    found = kill_many(parser.parse_args(arguments).kills)
    print(json.dumps(found))
    return 1 if found["wrong_tokens"] else 0


if __name__ == "__main__":
    sys.exit(main())
