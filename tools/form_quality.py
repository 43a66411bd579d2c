# SPDX-License-Identifier: Apache-2.0
"""`python tools/form_quality.py`: what forms of documents lose, by probes of a real model.

Documents are parts of the Python reference. Each is read once; every form is made of its rows in
16 bits, and read behind are probes of recall and the document's own last tokens, held out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from hillinfer.forms.form import DocumentStates
from hillinfer.forms.probes import FormQuality, held_out, measure_forms, recall_probes
from hillinfer.forms.table import make_form, usual_forms
from hillinfer.forms.whole import states_bytes
from hillinfer.models.loader import ModelOutline
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.models.sources import ModelSource
from hillinfer.system.machine import NumberType
from hillinfer_bench.quality.forced_reading import Prefix
from hillinfer_bench.quality.texts import standard_library_samples

_INSTRUCTION = "\n\nRepeat the part of the text above that begins with:\n\n"


def read(model: Any, ids: Sequence[int]) -> DocumentStates:
    """Return a document's keys and values as rows would have them, in the model's type."""
    with torch.no_grad():
        prefix = Prefix.read(model, ids)
    layers = tuple(
        (keys[0].to(model.dtype), values[0].to(model.dtype))
        for keys, values in zip(prefix.keys, prefix.values, strict=True)
    )
    return DocumentStates(tuple(ids), layers)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/reports/forms.json"))
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--documents", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1536, help="of a document")
    parser.add_argument("--probes", type=int, default=8, help="of recall, for each document")
    parser.add_argument("--forms", nargs="*", help="their names; all where none is named")
    given = parser.parse_args(arguments)
    forms = [make_form(name) for name in given.forms] if given.forms else usual_forms()
    outline = ModelOutline.read(ModelSource.locate(given.model, print), NumberType.FLOAT32)
    tokenizer, model = outline.tokenizer, outline.load().model
    instruction = tokenizer.encode(_INSTRUCTION, add_special_tokens=False)
    recalled: list[dict[str, FormQuality]] = []
    continued: list[dict[str, FormQuality]] = []
    for number, sample in enumerate(
        standard_library_samples(tokenizer, given.tokens, given.documents)
    ):
        began = time.perf_counter()
        states = read(model, sample.token_ids[: given.tokens])
        prefill = time.perf_counter() - began
        (probes,) = recall_probes(states.ids, (given.probes,), number, instruction)
        recalled.append(dict(measure_forms(model, states, forms, probes)))
        shorter, probe = held_out(states)
        continued.append(dict(measure_forms(model, shorter, forms, [probe])))
        taken = time.perf_counter() - began - prefill
        print(f"{sample.name}: read in {prefill:.1f} s, {len(forms)} forms in {taken:.1f} s")
    rows = []
    for form in forms:
        recall = [one[form.name] for one in recalled]
        going_on = [one[form.name] for one in continued]
        size = form.byte_count(outline.shape, given.tokens)
        row = {
            "form": form.name,
            "bytes": size / states_bytes(outline.shape, given.tokens),
            "recall": fmean(one.mean for one in recall),
            "recall_lower": min(one.lower for one in recall),
            "recall_worst": min(one.mean for one in recall),
            "recall_kl": fmean(one.divergence for one in recall),
            "continue": fmean(one.mean for one in going_on),
            "continue_kl": fmean(one.divergence for one in going_on),
        }
        rows.append(row)
        print(
            f"{form.name:14} " + " ".join(f"{key} {row[key]:.3f}" for key in row if key != "form")
        )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"rows": rows, "settings": vars(given)}, default=str, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
