# SPDX-License-Identifier: Apache-2.0
"""A server keeps documents of its store ready while nobody waits, and answers from their forms."""

import json
import shutil
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from generation_runs import SETTINGS
from servers import HTTP, running
from waiting import until

from hillinfer.catalogue.catalogue import Catalogue
from hillinfer.catalogue.planning import DocumentRules
from hillinfer.errors import BudgetError, HillInferWarning
from hillinfer.generate.tokens import Sampling
from hillinfer.memory_budget import Part
from hillinfer.models.loader import load_model
from hillinfer.serve.rules import ApiKeys, ServerRules
from hillinfer.serve.served_model import StoreOfServer, served_model
from hillinfer.settings import Settings
from hillinfer.store.keys import Reuse
from hillinfer.store.store import Store
from hillinfer.store_namespaces import prefix_ids

KEY = "sk-of-anna-0001"
BOOK = "".join(f"cat {i} sat on mat {i * 7 % 61}. " for i in range(40))
QUESTION = f"{BOOK}\n\nwhere is the cat?"
FORMS = ("--form", "held", "--form", "int8")


@pytest.fixture(scope="module")
def put_once():
    """What the first test puts, for all of them."""
    return {}


@pytest.fixture
def library(put_once, command, endless_folder, cold_dir, tmp_path_factory, tmp_path):
    """A store of one's own with a document that was put and measured."""
    if not put_once:
        put_once["place"] = place = tmp_path_factory.mktemp("library")
        (place / "book.txt").write_text(BOOK)
        told = command(
            *("documents", "put", place / "book.txt", "--store", place / "store", *FORMS, "--json"),
            *("--model", endless_folder, "--cold-dir", cold_dir, "--store-size", "64MiB"),
            *("--threads", 1, "--probes", 1),
        )
        assert told.code == 0, told.err
        put_once["told"] = json.loads(told.out)
    own = tmp_path / "library"
    shutil.copytree(put_once["place"], own)
    return own / "store", put_once["told"]


def uncounted(passes, model):
    """Leave the model as the command that put the document had it."""


@contextmanager
def serving(library, folder, cold_dir, documents=None, **rules):
    with Store(library[0]) as store:
        stored = StoreOfServer(store) if documents is None else StoreOfServer(store, documents=None)
        with running(folder, cold_dir, store=stored, counts=uncounted, **rules) as server:
            yield server


def pinned(library, form):
    with Store(library[0]) as store, Catalogue(store.places) as catalogue:
        catalogue.pin(catalogue.documents()[0].key, form)


def placed(server):
    return server.inference.served.placed


def wait_until_placed(server):
    until(lambda: placed(server).held or placed(server).failure)
    assert placed(server).failure == ""


def answered(server, content=QUESTION, client=None):
    """Return an answer's text, and what the log says of it."""
    before = len(server.logged("answered"))
    answer = server.ask(content, client)
    until(lambda: len(server.logged("answered")) > before)
    return answer.choices[0].message.content, server.logged("answered")[-1]


def test_answers_come_from_what_is_placed_and_are_those_of_a_document_at_rest(
    library, endless_folder, cold_dir
):
    with serving(library, endless_folder, cold_dir, documents="resting") as server:
        resting, told = answered(server)
        other, _ = answered(server, f"{BOOK}\n\n((((( 99")
        assert "document_form" not in told
        assert server.inference.served.placed is None
    pinned(library, "shadow-int4")
    with serving(library, endless_folder, cold_dir) as server:
        wait_until_placed(server)
        text, told = answered(server)
        assert told["document_form"] == "shadow-int4"
        assert told["cached_tokens"] == library[1]["tokens"]
        assert text == resting
        # The twin: another question has another answer.
        assert answered(server, f"{BOOK}\n\n((((( 99")[0] == other != resting
        # What comes behind is stored, and a prompt that the store has more of comes from there.
        longer = f"{QUESTION} {'mat ' * 60}"
        assert answered(server, longer)[1]["document_form"] == "shadow-int4"
        _, again = answered(server, f"{longer}?")
        assert "document_form" not in again
        assert again["cached_tokens"] > told["cached_tokens"] + 128
        # A prompt that is another document's has nothing of it.
        assert "document_form" not in answered(server, f"x{BOOK}")[1]
        # Answers together, of which only some begin with the document.
        four = server.ask(QUESTION, n=3)
        assert {one.message.content for one in four.choices} == {resting}
    pinned(library, "held")
    with serving(library, endless_folder, cold_dir) as server:
        wait_until_placed(server)
        accountant = placed(server).accountant
        held = accountant.held()[Part.OTHER]
        _, told = answered(server)
        assert (told["document_form"], told["cached_tokens"]) == ("held", library[1]["tokens"])
        # What an answer needs is counted while it is needed.
        assert accountant.peak()[Part.OTHER] > held
        # And given back once it is told, and compared with all rows while nobody waits.
        until(lambda: accountant.held()[Part.OTHER] == held)


def test_a_plan_places_a_document_and_a_client_with_a_key_does_not_see_it(
    library, endless_folder, cold_dir
):
    rules = {"keys": ApiKeys((KEY,))}
    with serving(library, endless_folder, cold_dir, **rules) as server, server.client(KEY) as anna:
        wait_until_placed(server)
        assert list(placed(server).held) == [library[1]["name"]]
        told = HTTP.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
        assert "hillinfer_placed_documents 1.0" in told
        (size,) = placed(server).held.values()
        assert f"hillinfer_placed_document_bytes {float(size)}" in told
        assert "document_form" not in answered(server, client=anna)[1]
        assert placed(server).failure == ""


def test_a_document_that_comes_later_is_placed_when_nobody_waits(
    command, library, endless_folder, cold_dir
):
    removed = command("documents", "rm", library[1]["name"], "--store", library[0])
    assert removed.code == 0
    with serving(library, endless_folder, cold_dir, rest_seconds=0.05) as server:
        assert "document_form" not in answered(server)[1]
        assert placed(server).held == {}
        again = command(
            *("documents", "put", library[0].parent / "book.txt", "--store", library[0], *FORMS),
            *("--model", endless_folder, "--cold-dir", cold_dir, "--threads", 1, "--probes", 1),
        )
        assert again.code == 0, again.err
        wait_until_placed(server)
        assert answered(server)[1]["document_form"] in {"held", "int8", "shadow-int4"}
        # Of what somebody takes back nothing stays.
        pinned(library, "rows")
        until(lambda: not placed(server).held, seconds=20)
        assert answered(server)[1]["document_form"] == "rows"
        # What is long is read where it is stored.
        assert "document_form" not in answered(server, f"{QUESTION} {'mat ' * 150}")[1]


def document_prompt(library):
    """Return the document's token numbers, and some behind."""
    with Store(library[0]) as store, Catalogue(store.places) as catalogue:
        return [*prefix_ids(store, catalogue.documents()[0].key), *range(5, 17)]


def served_alone(library, folder, cold_dir, opened, reuse=Reuse.LONGEST, rules=None, **settings):
    """Return a model as a server has it, without one."""
    store = opened.enter_context(Store(library[0]))
    stored = StoreOfServer(store, reuse, documents=rules or DocumentRules())
    made = Settings().changed(cold_dir=cold_dir, **(SETTINGS | settings))
    loaded = load_model(str(folder), say=lambda line: None)
    return opened.enter_context(served_model(loaded, made, ServerRules(chunk_tokens=64), stored))


def test_a_form_gives_way_to_answers_that_need_its_room_and_to_no_others(
    library, endless_folder, cold_dir
):
    pinned(library, "shadow-int4")
    with ExitStack() as opened:
        served = served_alone(library, endless_folder, cold_dir, opened, dram_budget="4MiB")
        (moved,) = served.rest(lambda: False)
        assert moved.is_made
        # What has no room without the form either is refused, and the form stays.
        with pytest.raises(BudgetError):
            served.begin(b"", [7] * 100, 4000, 40)
        assert served.placed.held
        # Answers have room beside the form, until it goes for some that have room without it.
        begun = 0
        for sequences in range(1, 60):
            served.begin(b"", [7] * 100, 200, sequences).generation.close()
            if not served.placed.held:
                break
            begun += 1
        assert begun > 0
        assert not served.placed.held


def test_what_an_answer_has_beside_the_engine_is_in_the_plans_of_others(
    library, endless_folder, cold_dir
):
    pinned(library, "held")
    with ExitStack() as opened:
        served = served_alone(library, endless_folder, cold_dir, opened, dram_budget="6MiB")
        (moved,) = served.rest(lambda: False)
        assert moved.is_made
        # As much as there is room for while nobody answers.
        most = 0
        for sequences in range(1, 90):
            try:
                served.begin(b"", [7] * 100, 200, sequences).generation.close()
            except BudgetError:
                break
            most = sequences
        assert 0 < most < 89
        begun = served.begin(b"", document_prompt(library), 2000)
        assert begun.form == "held"
        # So a server lets it wait, rather than end it in its middle.
        with pytest.raises(BudgetError, match="of it are lent"):
            served.begin(b"", [7] * 100, 200, most)
        begun.generation.close()
        served.begin(b"", [7] * 100, 200, most).generation.close()
        # The other way round the document rests.
        other = served.begin(b"", [7] * 100, 200, most)
        with pytest.raises(BudgetError):
            served.begin(b"", document_prompt(library), 2000)
        other.generation.close()


def test_answers_about_a_document_that_is_gone_are_forgotten(library, endless_folder, cold_dir):
    for is_gone in (False, True):
        pinned(library, "held")
        with ExitStack() as opened:
            served = served_alone(library, endless_folder, cold_dir, opened, dram_budget="64MiB")
            served.rest(lambda: False)
            prompt = document_prompt(library)
            begun = served.begin(b"", prompt, 2000)
            begun.generation.close()
            served.note_answer(begun, prompt, [5, 9])
            assert served.placed.to_compare == 1
            if is_gone:
                with Store(library[0]) as store, Catalogue(store.places) as catalogue:
                    catalogue.remove(catalogue.documents()[0].key)
            # Somebody waits: what there is to do is left for later.
            served.rest(lambda: True)
            assert served.placed.to_compare == 1
            served.rest(lambda: False)
            assert (served.placed.to_compare, served.placed.failure) == (0, "")
            # The form of what is gone is gone, too.
            assert bool(served.placed.held) is not is_gone


def test_who_wants_the_bits_of_an_unbroken_run_has_no_smaller_form(
    library, endless_folder, cold_dir
):
    pinned(library, "held")
    for reuse, form in ((Reuse.LONGEST, "held"), (Reuse.EXACT, None)):
        with ExitStack() as opened:
            rules = {"reuse": reuse, "dram_budget": "64MiB"}
            served = served_alone(library, endless_folder, cold_dir, opened, **rules)
            served.rest(lambda: False)
            begun = served.begin(b"", document_prompt(library), 2000)
            assert begun.form == form
            begun.generation.close()


def test_documents_move_once_nothing_was_to_be_done_for_a_while(library, endless_folder, cold_dir):
    with serving(library, endless_folder, cold_dir, pause_seconds=600.0) as server:
        for _ in range(2):
            assert "document_form" not in answered(server)[1]
        assert placed(server).held == {}


def test_profiles_follow_what_users_are_answered(library, endless_folder, cold_dir):
    """A form whose answers are worse than its profile says is measured anew, and a good one not."""
    for form, lower in (("int2", 1.0), ("held", 1.0)):
        with Store(library[0]) as store, Catalogue(store.places) as catalogue:
            (document,) = catalogue.documents()
            flawless = replace(document.of_form("int8"), form=form, lower=lower, agreement=lower)
            catalogue.put(replace(document, measured=(flawless,)))
            catalogue.pin(document.key, form)
        with ExitStack() as opened:
            served = served_alone(library, endless_folder, cold_dir, opened, dram_budget="64MiB")
            served.rest(lambda: False)
            ids = document_prompt(library)
            for number in range(4):
                begun = served.begin(b"", [*ids, number], 2000)
                assert begun.form == form
                for _ in begun.reading([*ids, number]):
                    pass
                answer = list(begun.generation.decode(Sampling(), 12, frozenset()))
                begun.generation.close()
                served.note_answer(begun, [*ids, number], answer)
            served.rest(lambda: False)
            assert served.placed.failure == ""
            with Store(library[0]) as store, Catalogue(store.places) as catalogue:
                measured = catalogue.find(document.title).of_form(form)
            assert (measured.lower < 1.0) is (form == "int2")


def test_a_document_lies_packed_on_the_drive_where_memory_has_no_room(
    library, endless_folder, cold_dir
):
    told = {}
    for case, drive in (("at rest", 0), ("on the drive", 1 << 20), ("in memory", 0)):
        with Store(library[0]) as store, Catalogue(store.places) as catalogue:
            (document,) = catalogue.documents()
            # Rows take so long that a packed form is sooner.
            resting = replace(document.resting, rows=50.0, text=90.0)
            only = (replace(document.of_form("int8"), form="int2"),)
            catalogue.put(replace(document, resting=resting, measured=only))
            if case == "in memory":
                catalogue.pin(document.key, "int2")
        memory = 12 << 20 if case == "in memory" else 24 << 10
        rules = DocumentRules(floor=0.0, drive_budget=drive, dram_budget=memory)
        with ExitStack() as opened:
            settings = {"rules": rules, "dram_budget": "24MiB"}
            served = served_alone(library, endless_folder, cold_dir, opened, **settings)
            moved = [one.form for one in served.rest(lambda: False)]
            begun = served.begin(b"", document_prompt(library), 1500)
            for _ in begun.reading(document_prompt(library)):
                pass
            answer = list(begun.generation.decode(Sampling(), 12, frozenset()))
            begun.generation.close()
            told[case] = (moved, begun.form, answer, sum(served.placed.held.values()))
    assert told["at rest"][:2] == ([], "rows")
    assert told["on the drive"][:2] == (["drive-int2"], "drive-int2")
    assert told["in memory"][:2] == (["int2"], "int2")
    # The same codes, wherever they lie; nothing of those on the drive is in memory.
    assert told["on the drive"][2] == told["in memory"][2] != told["at rest"][2]
    assert told["on the drive"][3] == 0 < told["in memory"][3]


def test_a_document_that_rests_is_read_in_an_ordinary_cache_by_one_at_a_time(
    library, endless_folder, cold_dir
):
    pinned(library, "rows")
    prompt, tokens = document_prompt(library), library[1]["tokens"]
    with ExitStack() as opened:
        served = served_alone(library, endless_folder, cold_dir, opened, dram_budget="24MiB")
        # Nobody has looked at the catalogue yet.
        served.begin(b"", prompt, 1500).generation.close()
        assert served.rest(lambda: False) == []
        accountant = served.placed.accountant
        first = served.begin(b"", prompt, 1500)
        assert (first.form, first.held) == ("rows", tokens)
        assert accountant.lent_bytes > 0
        second = served.begin(b"", prompt, 1500)
        assert second.form is None
        for _ in first.reading(prompt):
            pass
        answer = list(first.generation.decode(Sampling(), 12, frozenset()))
        served.note_answer(first, prompt, answer)
        # It is of all rows: nothing is left to compare.
        assert served.placed.to_compare == 0
        for begun in (first, second):
            begun.generation.close()
        assert accountant.lent_bytes == 0
        third = served.begin(b"", [*prompt[:tokens], *range(6, 18)], 1500)
        assert third.form == "rows"
        for _ in third.reading([*prompt[:tokens], *range(6, 18)]):
            pass
        # The twin: another question has another answer.
        assert list(third.generation.decode(Sampling(), 12, frozenset())) != answer
        third.generation.close()
        long = served.begin(b"", [*prompt, *[7] * 200], 1500)
        assert long.form is None
        long.generation.close()


def test_a_drive_of_a_store_with_two_is_a_place_for_forms(
    library, endless_folder, cold_dir, tmp_path
):
    with Store(library[0]) as store:
        here = store.places
        other = tmp_path / "other"
        other.mkdir()
        # Nothing is read from the second drive's own file here.
        store.places = replace(here, files=(*here.files, (other / "pool-1.kv", 0)))
        with Catalogue(here) as catalogue:
            catalogue.pin(catalogue.documents()[0].key, "drive2-int8")
        loaded = load_model(str(endless_folder), say=lambda line: None)
        made = Settings().changed(cold_dir=cold_dir, **(SETTINGS | {"dram_budget": "24MiB"}))
        stored = StoreOfServer(store, documents=DocumentRules(drive_budget=1 << 20))
        with served_model(loaded, made, ServerRules(chunk_tokens=64), stored) as served:
            assert [one.form for one in served.rest(lambda: False)] == ["drive2-int8"]
            assert served.placed.failure == ""
            begun = served.begin(b"", document_prompt(library), 1500)
            assert (begun.form, begun.held) == ("drive2-int8", library[1]["tokens"])
            begun.generation.close()
        store.places = here


def changed_on_the_drive(directory):
    """Change the first bytes of what lies there without a name, of this process."""
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            place = str(link.readlink())
            if place.startswith(f"{directory}/") and place.endswith(" (deleted)"):
                with link.open("r+b") as file:
                    file.write(b"other")


def test_a_form_that_the_drive_gives_back_changed_costs_no_answer(
    library, endless_folder, cold_dir
):
    """It is given up, the rows are read where they are stored, and it is made anew."""
    with Store(library[0]) as store, Catalogue(store.places) as catalogue:
        (document,) = catalogue.documents()
        only = (replace(document.of_form("int8"), form="int2"),)
        catalogue.put(replace(document, measured=only))
    pinned(library, "drive-int2")
    prompt = document_prompt(library)
    with ExitStack() as opened:
        settings = {"rules": DocumentRules(drive_budget=1 << 20), "dram_budget": "24MiB"}
        served = served_alone(library, endless_folder, cold_dir, opened, **settings)

        def begun_and_answered():
            begun = served.begin(b"", prompt, 1500)
            for _ in begun.reading(prompt):
                pass
            answer = list(begun.generation.decode(Sampling(), 12, frozenset()))
            begun.generation.close()
            return begun.form, answer

        # Nobody has looked at the catalogue yet.
        resting = begun_and_answered()
        served.rest(lambda: False)
        packed = begun_and_answered()
        # The twin: from the form the answer is another one.
        assert (resting[0], packed[0]) == (None, "drive-int2")
        assert packed[1] != resting[1]
        changed_on_the_drive(library[0].resolve())
        with pytest.warns(HillInferWarning, match="a document is read from its rows"):
            assert begun_and_answered() == resting
        assert (served.placed.held, served.placed.accountant.lent_bytes) == ({}, 0)
        assert [one.form for one in served.rest(lambda: False)] == ["drive-int2"]
        assert begun_and_answered() == packed


def test_a_floor_out_of_range_is_refused(command):
    for floor in (-0.1, 1.5, "nan"):
        line = command("serve", "--document-floor", floor).error_line()
        assert f"document floor={float(floor)} is not from 0 to 1" in line
    line = command("serve", "--document-drive", "25%").error_line()
    assert "document drive=25% is a share: give bytes" in line
