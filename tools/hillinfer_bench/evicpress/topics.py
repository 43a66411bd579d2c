# SPDX-License-Identifier: Apache-2.0
"""`python -m hillinfer_bench.evicpress.topics`: users turn to another topic of one document.

A document has two parts of different origin: by default a log, whose lines are much alike, and a
part of the Python reference. Its forms are measured by questions about the first, of which a form
of few bits loses nothing.
Then users ask about the second, from the form that was chosen, and what a server does while nobody
waits is done: answers are compared with all rows, and forms are measured anew where quality
slipped. In the end the form that is chosen is held against the one that a fresh profile chooses,
which was made by the same questions, by other questions about the second part.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers.cache_utils import DynamicCache

from hillinfer.catalogue.checks import OnlineChecks, ServedAnswer
from hillinfer.catalogue.measuring import MeasuredDocument, ProbeWishes, measure_document
from hillinfer.catalogue.planning import DocumentRules
from hillinfer.catalogue.records import KnownDocument
from hillinfer.forms.form import DocumentStates
from hillinfer.forms.probes import Probe, ProbeSizes, Probing, recall_probes
from hillinfer.forms.table import make_form
from hillinfer.forms.whole import stored_states
from hillinfer.generate.answering import Generation
from hillinfer.generate.tokens import Sampling
from hillinfer.models.loader import load_model
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.store.store import Store
from hillinfer.system.machine import NumberType
from hillinfer_bench.quality.texts import standard_library_samples

FORMS = ("held", "int8", "int4", "int2", "knorm-0.75", "snapkv-0.75", "snapkv-0.5")
_SIZES = ProbeSizes(8, 12)
_STORE_BYTES = 1 << 30
_LOG = "INFO heartbeat received from worker seven, nothing to report, queue empty.\n"
_CHUNK = 512


@dataclass(frozen=True)
class TopicSwitch:
    """What became of a document's form when users turned to another topic.

    Parameters
    ----------
    forms
        That was chosen before, after the questions, and by a fresh profile.
    agreements
        What each of them keeps of answers to other questions about the new topic.
    renewals
        How often forms were measured anew.
    """

    forms: tuple[str, str, str]
    agreements: tuple[float, float, float]
    renewals: int

    @property
    def points(self) -> float:
        """How many points of agreement the form in the end lacks beside that of a fresh profile."""
        return 100 * (self.agreements[2] - self.agreements[1])


def switch_topic(
    model: Any,
    prompts: StoredPrompts,
    ids: Sequence[int],
    names: Sequence[str] = FORMS,
    questions: int = 20,
    judged_by: int = 8,
    floor: float = DocumentRules.floor,
) -> TopicSwitch:
    """Have a document's users turn from its first half to its second.

    Parameters
    ----------
    model
        Of transformers.
    prompts
        A store, as that model uses it.
    ids
        Token numbers of the document, whole groups of 64; each half a topic.
    names
        Of the forms that may be chosen: that of the fewest bytes whose lower end keeps the floor.
    questions, judged_by
        About the second topic: those that are asked, and those that only judge in the end.
    floor
        Least quality.
    """
    half = len(ids) // 2
    began = time.perf_counter()
    cache = DynamicCache()
    Generation(model, cache, _CHUNK).read(ids)
    seconds = time.perf_counter() - began
    prompts.keep(cache, ids, seconds)
    found = prompts.stored_key(ids)
    assert found is not None, "it was stored just now"
    (old,) = recall_probes(ids[:half], (4,), 0, (), _SIZES)
    asked, judging = recall_probes(ids[half:], (questions, judged_by), 1, (), _SIZES)

    def measured(probes: Sequence[Probe]) -> MeasuredDocument:
        wishes = ProbeWishes(len(probes), sizes=_SIZES, drawn=tuple(probes))
        forms = [make_form(name) for name in names]
        return measure_document(model, prompts, ids, forms, wishes, seconds)

    profile = measured(old)
    digest = prompts.namespace.digest
    document = KnownDocument(found[0], "", "", digest, len(ids), 0.0)
    document = replace(document, resting=profile.resting, measured=profile.forms)
    states = stored_states(prompts, ids)
    chosen = [_chosen(document, floor)]
    checks, renewals = OnlineChecks(model, prompts, _CHUNK), 0
    for probe in asked:
        name = _chosen(document, floor)
        answer = _answered(model, states, name, probe)
        checks.note(document.key, ServedAnswer(name, probe.given, answer))
        while checks.compare(document, ids) is not None:
            pass
        if checks.slipped(document):
            document = checks.renewed(document, ids) or document
            renewals += 1
    fresh = measured(asked)
    again = replace(document, resting=fresh.resting, measured=fresh.forms)
    chosen += [_chosen(document, floor), _chosen(again, floor)]
    judge = Probing(model, states, judging)
    kept = {
        name: judge.quality(make_form(name), make_form(name).make(model, states).open()).mean
        for name in {*chosen}
    }
    first, last, best = chosen
    return TopicSwitch((first, last, best), (kept[first], kept[last], kept[best]), renewals)


def document_of(tokenizer: Any, tokens: int, first: str) -> list[int]:
    """Return token numbers of a document of two topics, each half of it.

    Parameters
    ----------
    tokenizer
        Of the model.
    tokens
        Of both, whole groups of 64 each.
    first
        `log` for lines that are alike, `reference` for another part of what the second is of.
    """
    half = tokens // 128 * 64
    texts = standard_library_samples(tokenizer, half, 2)
    other, second = (list(text.token_ids[:half]) for text in texts)
    if first == "reference":
        return [*other, *second]
    line = tokenizer.encode(_LOG, add_special_tokens=False)
    return [*(line * (half // len(line) + 1))[:half], *second]


def _chosen(document: KnownDocument, floor: float) -> str:
    """Return the form of the fewest bytes that keeps the floor; all rows keep any."""
    good = [one for one in document.measured if one.lower >= floor]
    return min(good, key=lambda one: one.byte_count).form


def _answered(model: Any, states: DocumentStates, name: str, probe: Probe) -> tuple[int, ...]:
    """Return the most probable answer behind a form, token by token."""
    generation = Generation(model, make_form(name).make(model, states).open().cache, _CHUNK)
    generation.read(probe.given)
    return tuple(generation.decode(Sampling(), len(probe.answer), frozenset()))


def main(arguments: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=1280, help="of the document, both topics")
    parser.add_argument("--first", choices=("log", "reference"), default="log", help="first topic")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--judge", type=int, default=8, help="questions that only judge")
    parser.add_argument("--floor", type=float, default=DocumentRules.floor)
    parser.add_argument("--forms", nargs="+", default=FORMS)
    given = parser.parse_args(arguments)
    loaded = load_model(given.model, NumberType.FLOAT32, lambda line: None)
    ids = document_of(loaded.tokenizer, given.tokens, given.first)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "store"
        Store.create(place, _STORE_BYTES)
        with Store(place) as store:
            prompts = StoredPrompts(store, loaded.model)
            found = switch_topic(
                loaded.model,
                prompts,
                ids,
                given.forms,
                given.questions,
                given.judge,
                given.floor,
            )
    say(
        json.dumps(
            {
                "topic_switch_points": found.points,
                "topic_switch_forms": found.forms,
                "topic_switch_agreements": found.agreements,
                "topic_switch_renewals": found.renewals,
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
