# SPDX-License-Identifier: Apache-2.0
"""Forms are made within a budget and give way; documents open at every moment, rightly."""

import errno
import shutil
import threading
import time
from dataclasses import replace

import pytest
import torch
from stored_document import logits
from tiny_models import TinyModel, prompts
from transformers import DynamicCache
from waiting import until

from hillinfer.catalogue.catalogue import Catalogue
from hillinfer.catalogue.checks import OnlineChecks, ServedAnswer
from hillinfer.catalogue.form_cache import FormCache, Move
from hillinfer.catalogue.measuring import (
    ProbeWishes,
    check_namespace,
    measure_document,
    usual_form_names,
    usual_wishes,
)
from hillinfer.catalogue.planning import PlanRules
from hillinfer.catalogue.records import CatalogueError, KnownDocument, document_uses
from hillinfer.drive.calls import DriveCalls
from hillinfer.errors import BudgetError, ColdPoolError, SettingsError
from hillinfer.forms.filed import DriveForm, FormFile
from hillinfer.forms.intervals import lower_end
from hillinfer.forms.probes import Probe, ProbeKind, ProbeSizes
from hillinfer.forms.quantised import QuantisedForm
from hillinfer.forms.table import make_form
from hillinfer.forms.whole import stored_states
from hillinfer.generate.answering import Generation
from hillinfer.memory_budget import Accountant, Part
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.store.pool_files import StoreError
from hillinfer.store.store import Store

TOKENS = 256
QUESTION = [5, 9, 2, 31, 7]
FORMS = ("held", "int8", "int4")
WISHES = ProbeWishes(3, 2, sizes=ProbeSizes(4, 12))


class Known:
    """A store with three documents of a tiny model, their catalogue, and what all rows answer."""

    def __init__(self, folder):
        self.folder = folder
        self.model = TinyModel("llama", dtype=torch.float32).build()
        self.expected = {}
        Store.create(folder, 64 << 20)
        with Store(folder) as store, Catalogue(store.places) as catalogue:
            stored = StoredPrompts(store, self.model)
            for number in range(3):
                self._add(f"d{number}", number, stored, catalogue)
            self.sizes = {one.form: one.byte_count for one in catalogue.documents()[0].measured}

    def _add(self, name, number, stored, catalogue):
        ids = prompts([TOKENS], seed=number)[0][0].tolist()
        full = DynamicCache()
        Generation(self.model, full, 64).read(ids)
        stored.keep(full, ids)
        key, tokens, _ = stored.stored_key(ids)
        found = measure_document(
            self.model, stored, ids, [make_form(name) for name in FORMS], WISHES
        )
        document = KnownDocument(key, name, "tiny", stored.namespace.digest, tokens, float(number))
        catalogue.put(replace(document, resting=found.resting, measured=found.forms))
        opened = make_form("held").make(self.model, stored_states(stored, ids)).open()
        self.expected[name] = logits(self.model, opened, QUESTION).argmax(-1).tolist()


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return Known(tmp_path_factory.mktemp("known") / "store")


class Kept:
    """A copy of these, for one test alone."""

    def __init__(self, known, store, catalogue):
        self.model, self.expected, self.sizes = known.model, known.expected, known.sizes
        self.store, self.catalogue = store, catalogue
        self.prompts = StoredPrompts(store, self.model)

    def form_cache(self, accountant):
        return FormCache(self.model, self.prompts, self.store, self.catalogue, accountant)

    def answer(self, form_cache, name):
        found = form_cache.open(name)
        return found.form, logits(self.model, found.opened, QUESTION).argmax(-1).tolist()


@pytest.fixture
def kept(known, tmp_path):
    folder = shutil.copytree(known.folder, tmp_path / "store")
    with Store(folder) as store, Catalogue(store.places) as catalogue:
        yield Kept(known, store, catalogue)


def test_what_was_measured_is_of_the_document(kept):
    for document in kept.catalogue.documents():
        measured = {one.form: one for one in document.measured}
        assert measured["held"].agreement == measured["held"].judged == measured["held"].lower == 1
        assert measured["int8"].byte_count < measured["held"].byte_count
        assert 0.5 < measured["int8"].lower < measured["int8"].agreement <= 1
        assert min(document.resting.text, document.resting.rows, document.resting.token) > 0
        assert min(one.opening_seconds for one in document.measured) > 0
        # All of these hold every token, so that their steps are alike.
        assert {one.token_seconds for one in document.measured} == {document.resting.token}


def test_documents_open_from_their_rest_and_then_from_their_forms(kept):
    accountant = Accountant(4 * kept.sizes["held"])
    form_cache = kept.form_cache(accountant)
    assert kept.answer(form_cache, "d0") == ("rows", kept.expected["d0"])
    for name, form in (("d0", "held"), ("d1", "int8"), ("d2", "text")):
        kept.catalogue.pin(kept.catalogue.find(name).key, form)
    # Nothing moves before it is asked to.
    assert kept.answer(form_cache, "d0")[0] == "rows"
    assert {one.form: one.is_made for one in form_cache.settle()} == {"held": True, "int8": True}
    assert kept.answer(form_cache, "d0") == ("held", kept.expected["d0"])
    assert kept.answer(form_cache, "d1")[0] == "int8"
    assert kept.answer(form_cache, "d2") == ("text", kept.expected["d2"])
    assert accountant.held()[Part.OTHER] == kept.sizes["held"] + kept.sizes["int8"]
    assert sum(form_cache.held.values()) == accountant.held()[Part.OTHER]
    # The twin: another document's answer is another.
    assert kept.expected["d0"] != kept.expected["d1"]
    kept.catalogue.pin(kept.catalogue.find("d0").key, "rows")
    assert form_cache.settle() == []
    assert accountant.held()[Part.OTHER] == kept.sizes["int8"]
    assert kept.answer(form_cache, "d0") == ("rows", kept.expected["d0"])
    form_cache.close()
    assert accountant.held()[Part.OTHER] == 0


def test_a_form_without_room_is_not_made_and_the_document_rests(kept):
    accountant = Accountant(kept.sizes["held"] + kept.sizes["int4"])
    form_cache = kept.form_cache(accountant)
    for name in ("d0", "d1"):
        kept.catalogue.pin(kept.catalogue.find(name).key, "held")
    moves = form_cache.settle()
    assert [one.is_made for one in moves] == [True, False]
    assert moves[1] == Move(moves[1].name, "rows", is_made=False)
    assert accountant.held()[Part.OTHER] == kept.sizes["held"]
    for name in ("d0", "d1"):
        assert kept.answer(form_cache, name)[1] == kept.expected[name]
    # What had no room comes once there is some.
    resting = kept.catalogue.find(moves[1].name)
    kept.catalogue.pin(kept.catalogue.find(moves[0].name).key, "int4")
    assert {one.form for one in form_cache.settle()} == {"int4", "held"}
    assert kept.answer(form_cache, resting.name)[0] == "held"


def test_forms_give_way_when_the_engine_is_short(kept):
    accountant = Accountant(2 * kept.sizes["held"])
    form_cache = kept.form_cache(accountant)
    for name in ("d0", "d1"):
        kept.catalogue.pin(kept.catalogue.find(name).key, "held")
    form_cache.settle()
    kept.answer(form_cache, "d0")
    accountant.take(Part.HOT, kept.sizes["held"])
    # That which was used last stays.
    assert form_cache.held == {kept.catalogue.find("d0").name: kept.sizes["held"]}
    assert kept.answer(form_cache, "d1") == ("rows", kept.expected["d1"])
    # More than forms can give up is refused, and they are all that could go.
    with pytest.raises(BudgetError):
        accountant.take(Part.HOT, 2 * kept.sizes["held"])
    assert kept.answer(form_cache, "d0") == ("rows", kept.expected["d0"])


def test_a_plan_is_followed_within_the_budget(kept):
    budget = kept.sizes["held"] + kept.sizes["int4"]
    accountant = Accountant(budget)
    form_cache = kept.form_cache(accountant)
    for _ in range(5):
        kept.answer(form_cache, "d1")
    plan = form_cache.plan(PlanRules(budget, alpha=100.0))
    assert plan.used <= budget
    moves = form_cache.settle()
    assert all(one.is_made for one in moves)
    assert accountant.held()[Part.OTHER] == plan.used
    for name, expected in kept.expected.items():
        form, answer = kept.answer(form_cache, name)
        assert form == kept.catalogue.find(name).form
        if form in ("rows", "text", "held"):
            assert answer == expected


def test_opening_is_a_use_that_the_store_counts(kept):
    form_cache = kept.form_cache(Accountant(4 * kept.sizes["held"]))
    key = kept.catalogue.find("d0").key
    kept.catalogue.pin(key, "held")
    form_cache.settle()

    def hits():
        # They are written once a second.
        kept.store.room.write_touched()
        return document_uses(kept.store.database, [key], 0.0)[key].hits

    before = hits()
    form_cache.open("d0")
    assert hits() > before


def test_documents_open_while_forms_move(kept):
    accountant = Accountant(2 * kept.sizes["held"])
    form_cache = kept.form_cache(accountant)
    wrong, is_over = [], threading.Event()

    def ask():
        while not is_over.is_set():
            for name, expected in kept.expected.items():
                form, answer = kept.answer(form_cache, name)
                if form in ("rows", "held", "text") and answer != expected:
                    wrong.append((name, form))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for turn in range(6):
            for number in range(3):
                form = ("held", "int4", "rows", "text")[(turn + number) % 4]
                kept.catalogue.pin(kept.catalogue.find(f"d{number}").key, form)
            form_cache.settle()
            assert accountant.held()[Part.OTHER] <= accountant.budget_bytes
    finally:
        is_over.set()
        asking.join()
    assert wrong == []


def test_a_document_of_another_model_or_without_rows_is_refused(kept):
    form_cache = kept.form_cache(Accountant(1 << 20))
    document = kept.catalogue.find("d0")
    stranger = replace(document, key=b"\x01" * 32, title="other", namespace=b"x" * 32)
    kept.catalogue.put(stranger)
    with pytest.raises(CatalogueError, match="made by tiny and do not fit: tiny has changed since"):
        form_cache.open("other")
    with pytest.raises(CatalogueError, match="this is not tiny; give the --model and --dtype"):
        check_namespace(stranger, kept.prompts.namespace, "this")
    kept.catalogue.put(replace(document, key=b"\x02" * 32, title="gone"))
    with pytest.raises(CatalogueError, match="the rows of 'gone' are gone from the store"):
        form_cache.open("gone")
    assert form_cache.open("d0").form == "rows"


def was_removed(store, name):
    """Whether a document is gone: the thread that read it last may still be about to let go."""
    try:
        store.remove(name)
    except StoreError:
        return False
    return True


@pytest.mark.parametrize("opened_before", [False, True])
def test_a_document_without_rows_holds_no_other_up(kept, opened_before):
    accountant = Accountant(1 << 20)
    form_cache = kept.form_cache(accountant)
    documents = kept.catalogue.documents()
    if opened_before:
        # Its token numbers are known then, and nothing asks the index for them.
        form_cache.open(documents[0].title)
    kept.catalogue.set_forms([(one.key, "int8") for one in documents])
    until(lambda: was_removed(kept.store, documents[0].name))
    moves = form_cache.settle()
    assert moves[0] == Move(documents[0].name, "rows", is_made=False)
    assert [one.is_made for one in moves[1:]] == [True, True]
    assert accountant.held()[Part.OTHER] == 2 * kept.sizes["int8"]
    for one in documents[1:]:
        assert kept.answer(form_cache, one.title)[0] == "int8"


class FirstTokens(StoredPrompts):
    """Brings the first tokens of a prompt alone, as where the others were evicted meanwhile."""

    is_short = True

    def load_into(self, cache, ids, *given, **options):
        known = [*ids[:192], 0, 0] if self.is_short else ids
        return super().load_into(cache, known, *given, **options)


def test_no_form_is_made_of_some_of_a_document(kept):
    accountant = Accountant(1 << 20)
    brought = FirstTokens(kept.store, kept.model)
    form_cache = FormCache(kept.model, brought, kept.store, kept.catalogue, accountant)
    kept.catalogue.set_forms([(kept.catalogue.find("d0").key, "int8")])
    (move,) = form_cache.settle()
    assert not move.is_made
    assert accountant.held()[Part.OTHER] == 0
    brought.is_short = False
    assert form_cache.settle() == [replace(move, form="int8", is_made=True)]


def test_a_prompt_finds_the_longest_document_that_it_begins_with(kept):
    form_cache = kept.form_cache(Accountant(4 * kept.sizes["held"]))
    document = kept.catalogue.find("d0")
    ids = form_cache.ids_of(document)
    assert form_cache.made_for([*ids, 1]) is None
    for name, form in (("d0", "held"), ("d1", "int8")):
        kept.catalogue.pin(kept.catalogue.find(name).key, form)
    form_cache.settle()
    found = form_cache.made_for([*ids, 1])
    assert (found.key, found.form, found.made.tokens) == (document.key, "held", TOKENS)
    # One token at least must come behind it, and all of it before.
    assert form_cache.made_for(ids) is None
    assert form_cache.made_for([*ids[:-1], ids[-1] + 1, 1]) is None
    assert form_cache.made_for([1, *ids]) is None


class HeldElsewhere(QuantisedForm):
    """As if an engine held it, and counted what it takes."""

    lies_in_engine = True


def test_as_few_forms_go_as_must_and_none_where_none_helps(kept):
    now = iter(range(1000))
    form_cache = FormCache(
        kept.model,
        kept.prompts,
        kept.store,
        kept.catalogue,
        Accountant(4 * kept.sizes["held"]),
        form_of=lambda name: HeldElsewhere(8, 8) if name == "int8" else make_form(name),
        clock=lambda: float(next(now)),
    )
    for name, form in (("d0", "int8"), ("d1", "int8"), ("d2", "int4")):
        kept.catalogue.pin(kept.catalogue.find(name).key, form)
    form_cache.settle()
    first, second, third = (kept.catalogue.find(name) for name in ("d0", "d1", "d2"))
    form_cache.made_for([*form_cache.ids_of(first), 1])
    seen = []

    def fits_without(count):
        return lambda forms: seen.append(len(forms)) or len(forms) >= count

    # What an engine does not hold is nothing that its plans could have room for.
    assert not form_cache.give_up_for(fits_without(3))
    assert (seen, len(form_cache.held)) == ([1, 2], 3)
    # Of the others the one that was not used for longest.
    assert form_cache.give_up_for(fits_without(1))
    assert {*form_cache.held} == {first.name, third.name}
    assert form_cache.give_up_for(fits_without(1))
    assert list(form_cache.held) == [third.name]
    assert not form_cache.give_up_for(fits_without(0))
    assert second.name not in form_cache.held


def ends_at(count):
    """Return what says at its last call that somebody waits."""
    asked = iter(range(1000))
    return lambda: next(asked) >= count


def test_comparing_and_measuring_end_before_any_pass_and_go_on_later(kept):
    checks = OnlineChecks(kept.model, kept.prompts, chunk_tokens=4)
    document = kept.catalogue.find("d0")
    ids = kept.form_cache(Accountant(1 << 20)).ids_of(document)
    answer = kept.expected["d0"][-1:]
    assert checks.compare(document, ids) is None
    for _ in range(3):
        checks.note(document.key, ServedAnswer("held", tuple(QUESTION), (*answer, *[1] * 140)))
    # Two passes read the question, three the answer.
    for count in range(6):
        assert checks.compare(document, ids, ends_at(count)) is None
        assert checks.waiting == [document.key]
    whole = checks.compare(document, ids, ends_at(7))
    assert 1 / 141 <= whole < 1.0
    assert [checks.compare(document, ids) for _ in range(3)] == [whole, whole, None]
    assert checks.slipped(document) == ["held"]
    for count in range(6):
        assert checks.renewed(document, ids, ends_at(count)) is None
        assert checks.slipped(document) == ["held"]
    renewed = checks.renewed(document, ids)
    assert [one.form for one in renewed.measured] == [one.form for one in document.measured]
    assert checks.slipped(document) == []


class FailingReads(DriveCalls):
    """A drive that takes what is written, and gives it back as long as it does not fail."""

    fails = False

    def preadv(self, *given):
        if self.fails:
            raise OSError(errno.EIO, "the drive fails")
        return super().preadv(*given)


@pytest.mark.parametrize("fails", [True, False])
def test_a_document_opens_from_its_rest_where_its_drive_does_not_give_its_form(
    kept, tmp_path, fails
):
    calls = FailingReads()
    file = FormFile(tmp_path, calls)
    parts = kept.model, kept.prompts, kept.store, kept.catalogue, Accountant(0)
    form_cache = FormCache(*parts, form_of=lambda name: DriveForm(make_form("held"), file))
    kept.catalogue.pin(kept.catalogue.find("d0").key, "drive-held")
    assert [one.is_made for one in form_cache.settle()] == [True]
    assert kept.answer(form_cache, "d0") == ("drive-held", kept.expected["d0"])
    calls.fails = fails
    # The twin: it opens as before, and stays.
    form = "rows" if fails else "drive-held"
    assert kept.answer(form_cache, "d0") == (form, kept.expected["d0"])
    assert bool(form_cache.held) is not fails
    calls.fails = False
    # What was given up is made anew.
    assert [one.is_made for one in form_cache.settle()] == [True] * fails
    assert kept.answer(form_cache, "d0") == ("drive-held", kept.expected["d0"])
    form_cache.close()
    file.close()


class Unreadable(StoredPrompts):
    """A store's prompts, on a drive that fails now and then."""

    fails = False

    def load_into(self, *given, **options):
        if self.fails:
            raise ColdPoolError("the drive")
        return super().load_into(*given, **options)


def test_what_cannot_be_read_is_not_read_again(kept):
    prompts = Unreadable(kept.store, kept.model)
    checks = OnlineChecks(kept.model, prompts)
    document = kept.catalogue.find("d0")
    ids = kept.form_cache(Accountant(1 << 20)).ids_of(document)
    for token in (*kept.expected["d0"][-1:], 1, 2, 3):
        checks.note(document.key, ServedAnswer("held", tuple(QUESTION), (token, 1, 1, 1, 1)))
    prompts.fails = True
    with pytest.raises(ColdPoolError):
        checks.compare(document, ids)
    prompts.fails = False
    assert [checks.compare(document, ids) is None for _ in range(4)] == [False] * 3 + [True]
    assert checks.slipped(document) == ["held"]
    prompts.fails = True
    with pytest.raises(ColdPoolError):
        checks.renewed(document, ids)
    assert checks.slipped(document) == []


def measured_by(kept, clock=time.perf_counter, **wishes):
    """Return agreements of forms, and how many tokens the model read for them."""
    ids = list(kept.form_cache(Accountant(1 << 20)).ids_of(kept.catalogue.find("d0")))
    forms = [make_form(name) for name in ("held", "int8", "knorm-0.2", "int4")]
    told = ProbeWishes(4, sizes=ProbeSizes(4, 12), **wishes)
    read = []

    def count(model, args, kwargs):
        read.append(kwargs["input_ids"].shape[1])

    hook = kept.model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        found = measure_document(kept.model, kept.prompts, ids, forms, told, 1.0, clock=clock)
    finally:
        hook.remove()
    return {one.form: one for one in found.forms}, sum(one for one in read if one > 1)


def test_a_profile_reads_no_more_than_it_may_and_looks_at_each_form_once(kept):
    whole, most = measured_by(kept)
    # Four parts of 15 tokens, in one pass each: all rows, and three forms.
    assert most == 4 * 60
    few, read = measured_by(kept, allowance=0.5)
    assert read == 60 + 3 * 15
    assert few["int8"].lower < whole["int8"].lower
    # As much as is left goes to those that were named first.
    some, read = measured_by(kept, allowance=0.6)
    assert read == 60 + 3 * 15 + 45
    assert some["int8"].lower == pytest.approx(whole["int8"].lower)
    assert some["int4"].lower == few["int4"].lower
    # What is surely worse than is wanted is asked no more.
    sure, read = measured_by(kept, least=0.99)
    assert read < most
    assert sure["held"].lower == 1.0
    with pytest.raises(SettingsError, match="allowance=0"):
        ProbeWishes(allowance=0)


def test_a_profile_ends_in_time_and_all_rows_are_always_known(kept):
    now = iter(range(1 << 20))

    def clock():
        """Goes on by a second whenever somebody looks."""
        return float(next(now))

    whole, _ = measured_by(kept, clock)
    assert [*whole] == ["held", "int8", "knorm-0.2", "int4"]
    some, read = measured_by(kept, clock, seconds=16.0)
    assert [*some] == ["held", "int8"]
    assert read == 2 * 60
    assert some["int8"].lower == whole["int8"].lower
    # No time for one: nothing is asked, and all rows lose nothing.
    none, read = measured_by(kept, clock, seconds=2.0)
    assert [*none] == ["held"]
    assert (read, none["held"].lower, none["held"].agreement) == (0, 1.0, 1.0)


def test_a_short_document_has_short_probes():
    probe = Probe(ProbeKind.RECALL, tuple(range(30)), tuple(range(32)))
    short = usual_wishes(512, 1, prefill_seconds=3.0)
    assert short.seconds == 1.5
    read = short.shortened(probe)
    # The last of what is given, and the first of the answer.
    assert (read.given, read.answer) == (tuple(range(22, 30)), tuple(range(28)))
    assert lower_end([1.0], len(read.answer)) > 0.9 > lower_end([1.0], len(read.answer) - 4)
    assert usual_wishes(2048, 3).shortened(probe) == probe


def test_a_short_document_has_a_short_profile():
    names = {tokens: usual_form_names(tokens) for tokens in (64, 512, 1100, 1500, 9000)}
    # What tells most comes first, and all rows cost nothing.
    assert names[64] == names[512] == ("held", "mixed4")
    assert names[1100] == ("held", "mixed4", "int8")
    assert names[1500] == names[9000] == ("held", "mixed4", "int8", "int4")
    # One form leaves room for probes that three have no room for.
    assert usual_wishes(1300, 1).chosen_by > usual_wishes(1300, 3).chosen_by == 1
    assert usual_wishes(9000, 3).chosen_by == 4
