# SPDX-License-Identifier: Apache-2.0
"""`python tools/placed_bench.py`: how soon a server answers about a document, form by form.

A part of the Python reference is read into a store and measured. Then the same questions are asked
as a server answers them, the document resting or ready in one form after the other, in turns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from hillinfer.catalogue.catalogue import Catalogue
from hillinfer.catalogue.measuring import ProbeWishes, measure_document
from hillinfer.catalogue.records import KnownDocument
from hillinfer.forms.table import make_form
from hillinfer.generate.tokens import Sampling
from hillinfer.models.loader import load_model
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.serve.rules import ServerRules
from hillinfer.serve.served_model import ServedModel, StoreOfServer, served_model
from hillinfer.settings import Settings
from hillinfer.store.store import Store
from hillinfer.system.machine import NumberType
from hillinfer_bench.quality.texts import standard_library_samples

MEASURED = ("held", "int8")
FORMS = ("rows", "shadow-int4", "lead-0.1", *MEASURED)
_ANSWER = 8
_QUESTION = "\n\nWhich function is described above, and what does it return?"


def asked(served: ServedModel, ids: Sequence[int]) -> dict[str, Any]:
    """Return what one question took, and the form that it came from."""
    began = time.perf_counter()
    begun = served.begin(b"", ids, len(ids) + _ANSWER)
    for _ in begun.reading(ids):
        pass
    first = time.perf_counter() - began
    began = time.perf_counter()
    tokens = list(begun.generation.decode(Sampling(), _ANSWER, frozenset()))
    each = (time.perf_counter() - began) / max(1, len(tokens) - 1)
    counted = begun.generation.statistics()
    begun.generation.close()
    return {
        "form": begun.form or "rows",
        "first_token": first,
        "token": each,
        "read_bytes": 0 if counted is None else counted.cold_read_bytes,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/reports/placed.json"))
    parser.add_argument("--dir", type=Path, default=Path("build"), help="on the drive")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=2048, help="of the document")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dram-budget", default="1GiB")
    given = parser.parse_args(arguments)
    given.dir.mkdir(parents=True, exist_ok=True)
    loaded = load_model(given.model, NumberType.FLOAT32, print)
    (sample,) = standard_library_samples(loaded.tokenizer, given.tokens, 1)
    document = list(sample.token_ids[: given.tokens // 64 * 64])
    question = loaded.tokenizer.encode(_QUESTION, add_special_tokens=False)
    with ExitStack() as opened:
        place = Path(opened.enter_context(tempfile.TemporaryDirectory(dir=given.dir)))
        Store.create(place / "store", 4 << 30)
        store = opened.enter_context(Store(place / "store"))
        catalogue = opened.enter_context(Catalogue(store.places))
        settings = Settings().changed(cold_dir=place, dram_budget=given.dram_budget, shadow="int4")
        served = opened.enter_context(
            served_model(loaded, settings, ServerRules(parallel=1), StoreOfServer(store))
        )
        asked(served, [*document, 0, 0])
        key = put(loaded, store, catalogue, document)
        found: dict[str, list[dict[str, Any]]] = {form: [] for form in FORMS}
        for number in range(given.rounds):
            for form in FORMS:
                catalogue.pin(key, form)
                served.rest(lambda: False)
                told = asked(served, [*document, *question, number + 1])
                # A form without room in the budget rests.
                found[form].append(told)
                print(f"{form}: {told}", flush=True)
    rows = [
        {
            "form": form,
            "opened": own[-1]["form"],
            "first_token_p50": median(one["first_token"] for one in own),
            "token_p50": median(one["token"] for one in own),
            "read_bytes_p50": median(one["read_bytes"] for one in own),
        }
        for form, own in found.items()
    ]
    for row in rows:
        print(" ".join(f"{key} {value}" for key, value in row.items()))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"rows": rows, "settings": vars(given)}, default=str, indent=1))
    return 0


def put(loaded: Any, store: Store, catalogue: Catalogue, ids: Sequence[int]) -> bytes:
    """Have the catalogue know a document that is stored; return its key."""
    prompts = StoredPrompts(store, loaded.model)
    stored = prompts.stored_key(ids)
    assert stored is not None, "it was read into the store"
    key, tokens, seconds = stored
    forms = [make_form(name) for name in MEASURED]
    measured = measure_document(loaded.model, prompts, ids[:tokens], forms, ProbeWishes(2), seconds)
    known = KnownDocument(key, "", "", prompts.namespace.digest, tokens, time.time())
    catalogue.put(replace(known, resting=measured.resting, measured=measured.forms))
    return key


if __name__ == "__main__":
    raise SystemExit(main())
