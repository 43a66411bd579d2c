# SPDX-License-Identifier: Apache-2.0
"""`hillinfer documents`: a document comes, is measured, planned, pinned, drawn and forgotten."""

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from hillinfer.catalogue.catalogue import Catalogue
from hillinfer.catalogue.records import MeasuredForm
from hillinfer.store.store import Store

FORMS = ("--form", "held", "--form", "int4", "--form", "knorm-0.5")


@pytest.fixture
def long_document(tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("".join(f"cat {i} sat on mat {i * 7 % 61}. " for i in range(30)))
    return file


@pytest.fixture
def documents(command, tmp_path):
    """Run a subcommand on one store and return its outcome, or what its JSON says."""

    def run(*arguments, **changes):
        store = ("--store", tmp_path / "store")
        outcome = command("documents", *arguments, *store, **changes)
        if "--json" in arguments:
            assert outcome.code == 0, outcome.err
            return json.loads(outcome.out)
        return outcome

    return run


@pytest.fixture
def put(documents, tiny_folder, cold_dir):
    def run(file, *arguments, **changes):
        return documents(
            *("put", file, "--model", tiny_folder, "--cold-dir", cold_dir),
            *("--store-size", "64MiB", "--threads", 1, *arguments),
            **changes,
        )

    return run


def test_a_document_is_put_measured_and_listed(documents, put, command, long_document, tmp_path):
    told = put(long_document, *FORMS, "--judge", 2, "--question", "which cat?", "--json")
    assert told["title"] == "long.txt"
    assert told["tokens"] % 64 == 0 < told["tokens"]
    assert (told["form"], told["tier"], told["quality"]) == ("rows", "drive", 1.0)
    measured = {one["form"]: one for one in told["measured"]}
    assert set(measured) == {"held", "int4", "knorm-0.5"}
    assert measured["held"]["agreement"] == measured["held"]["judged"] == 1.0
    assert 0 <= measured["int4"]["lower"] <= measured["int4"]["agreement"] <= 1
    assert measured["int4"]["byte_count"] < measured["knorm-0.5"]["byte_count"]
    assert measured["held"]["byte_count"] == told["byte_count"]
    assert min(told["resting"].values()) > 0
    (listed,) = documents("ls", "--json")
    assert listed["name"] == told["name"]
    assert listed["hits"] > 0
    lines = documents("ls", "long.txt").out.splitlines()
    assert lines[0].startswith(f"{told['name']}  ")
    assert lines[0].endswith("long.txt")
    assert [line.split()[0] for line in lines[1:]] == ["int4", "knorm-0.5", "held"]
    # Its rows are those that any run finds.
    (chain,) = json.loads(command("store", "ls", "--store", tmp_path / "store", "--json").out)
    assert (chain["name"], chain["tokens"]) == (told["name"], told["tokens"])
    # Again: what was measured stays beside what is new.
    again = put(long_document, "--form", "int8", "--title", "again", "--json")
    assert again["title"] == "again"
    assert {one["form"] for one in again["measured"]} == {*measured, "int8"}
    assert len(documents("ls", "--json")) == 1


def test_a_plan_says_what_changes_and_is_made_so_when_asked(documents, put, long_document):
    told = put(long_document, *FORMS, "--json")
    held = next(one["byte_count"] for one in told["measured"] if one["form"] == "held")
    # A form of the least quality is worth more than waiting, whatever this machine's times are.
    asked = ("plan", "--dram-budget", held, "--alpha", 0, "--utility", "first-token")
    plan = documents(*asked, "--json")
    (one,) = plan["documents"]
    assert not plan["is_applied"]
    assert one["before"] == "rows"
    assert {"rows", "text", "held", "int4", "knorm-0.5"} == {p["form"] for p in one["options"]}
    assert plan["used_bytes"] == one["byte_count"] <= held
    best = max(one["options"], key=lambda point: point["value"])
    assert one["after"] == best["form"]
    assert documents("ls", "--json")[0]["form"] == "rows"
    assert documents(*asked, "--apply", "--json")["is_applied"]
    assert documents("ls", "--json")[0]["form"] == best["form"]
    lines = documents(*asked).out.splitlines()
    assert lines[0].startswith(told["name"])
    assert lines[-1].startswith("0 of 1 documents change")


def test_a_form_chosen_by_hand_is_pinned_until_it_is_let_go(documents, put, long_document):
    name = put(long_document, *FORMS, "--json")["name"]
    told = documents("form", name[:4], "int4", "--json")
    assert (told["form"], told["tier"]) == ("int4", "dram")
    (one,) = documents("ls", "--json")
    assert (one["form"], one["is_pinned"], one["tier"]) == ("int4", True, "dram")
    size = one["byte_count"]
    line = documents("plan", "--dram-budget", size - 1).error_line()
    assert "1 pinned documents take" in line
    assert f"hillinfer documents unpin {name}" in line
    assert documents("plan", "--dram-budget", size, "--json")["documents"][0]["after"] == "int4"
    assert "not pinned any more" in documents("unpin", "long.txt").out
    line = documents("plan", "--dram-budget", size - 1).error_line()
    assert "is below the smallest form of any document, int4 of 'long.txt'" in line
    assert "pinned as int4" in documents("pin", name).out
    assert ", pinned" in documents("ls").out
    assert documents("form", name, "text", "--json")["tier"] == "text"
    assert "its stored rows stay" in documents("rm", name).out
    assert documents("ls").out == ""


def test_nothing_is_measured_behind_a_models_last_position(documents, put, tmp_path):
    file, plain = tmp_path / "whole.txt", ("--prompt-style", "plain", "--form", "int4")
    file.write_text("".join(f"cat {i} sat on mat. " for i in range(400))[:4050])
    line = put(file, *plain).error_line()
    assert "behind the document's 4032, and the model has 4096 positions" in line
    # It is stored, and has no profile yet; the twin: less is read behind it.
    (known,) = documents("ls", "--json")
    assert (known["tokens"], known["measured"]) == (4032, [])
    short = ("--probes", 0, "--question", "who?")
    told = documents("measure", known["name"], *plain, *short, "--json")
    assert [one["form"] for one in told["measured"]] == ["int4"]


def test_bad_input_is_named_with_the_way_out(documents, put, long_document, tmp_path, cold_dir):
    for form, said in (
        ("int3", "codes of 3 bits: choose one of 8, 6, 5, 4, 2"),
        ("knorm-1.5", "kept=1.5 is not above 0 and up to 1"),
        ("nonsense", "form='nonsense' is unknown: choose one of text, held"),
        ("text", "form='text' is all there was"),
    ):
        assert said in put(long_document, "--form", form).error_line()
    for option, value, said in (
        ("--seed", -1, "--seed -1: give 0 or more"),
        ("--question", "caf\udce9", "the text after --question is not UTF-8 (character 3)"),
        ("--question", " ", "a question is empty"),
        ("--salt", "caf\udce9", "the text after --salt is not UTF-8 (character 3)"),
    ):
        assert said in put(long_document, option, value).error_line()
    # Before anything was read or made.
    assert not (tmp_path / "store").exists()
    assert "100 probes of 48 tokens" in put(long_document, *FORMS, "--probes", 100).error_line()
    assert "nothing would be measured" in put(long_document, *FORMS, "--probes", 0).error_line()
    assert put(tmp_path / "none.txt").error_line().endswith("No such file or directory; check FILE")
    # Nothing was read for what cannot be measured.
    for option in ("--probes", "--judge"):
        outcome = put(long_document, *FORMS, option, -1)
        assert "give 0 or more" in outcome.error_line()
        assert outcome.err.count("\n") == 1
    short = tmp_path / "short.txt"
    short.write_text("cat")
    assert "a store keeps whole groups of 64" in put(short, *FORMS).error_line()
    name = documents("ls", "--json")[0]["name"]
    for form, said in (
        ("int8", f"form int8 was not measured for 'long.txt', .* measure {name} --form int8"),
        ("snapkv-7", "kept=7.0 is not above 0 and up to 1"),
        ("best", "form='best' is unknown"),
    ):
        line = documents("form", name, form).error_line()
        assert said.split(", .* ")[0] in line
        assert said.split(", .* ")[-1] in line
    assert "no document is called 'other'" in documents("pin", "other").error_line()
    assert "floor=2.0 is not from 0 to 1" in documents("plan", "--floor", 2).error_line()
    assert "'lots' is not a size" in documents("plan", "--dram-budget", "lots").error_line()


def test_a_model_that_changed_is_refused_with_both_names(
    documents, put, long_document, tiny_folder
):
    name = put(long_document, *FORMS, "--json")["name"]
    assert documents("measure", name, "--form", "int2", "--json")["measured"][0]["form"] == "int2"
    line = documents("measure", name, "--form", "int2", "--dtype", "bfloat16").error_line()
    assert "the rows of 'long.txt' were made by" in line
    assert "give the --model and --dtype that read it" in line


def test_a_document_whose_rows_went_is_told(documents, put, command, long_document, tmp_path):
    name = put(long_document, *FORMS, "--json")["name"]
    command("store", "rm", name, "--store", tmp_path / "store")
    (one,) = documents("ls", "--json")
    assert (one["tier"], one["hits"]) == ("gone", None)
    for words in (("pin", name), ("form", name, "int4"), ("measure", name)):
        line = documents(*words).error_line()
        assert "the rows of 'long.txt' are gone from the store" in line
    assert documents("plan", "--json")["left_out"] == {name: "its rows are gone from the store"}
    # Put again it is as it was, what was measured too.
    assert put(long_document, "--form", "int8", "--json")["tier"] == "drive"
    assert len(documents("ls", "--json")[0]["measured"]) == 4


def test_what_a_server_chose_is_not_pinned_as_it_is(documents, put, long_document, tmp_path):
    told = put(long_document, "--form", "held", "--json")
    with Store(tmp_path / "store") as store, Catalogue(store.places) as catalogue:
        catalogue.set_forms([(catalogue.documents()[0].key, "shadow-int4")])
    line = documents("pin", told["name"]).error_line()
    assert "'long.txt' lies as shadow-int4, which a server chose" in line
    assert documents("plan", "--dram-budget", "100%").code == 0
    assert "  shadow-int4  " in documents("ls").out


def test_a_form_that_others_let_expect_is_listed_and_not_pinned(
    documents, put, long_document, tmp_path
):
    told = put(long_document, "--form", "held", "--json")
    measured = MeasuredForm("int4", 999, 1.0, 1.0, 0.9, 0.0, 0.01, 0.01)
    with Store(tmp_path / "store") as store, Catalogue(store.places) as catalogue:
        (own,) = catalogue.documents()
        for number in range(1, 4):
            key = bytes([number]) * 32
            catalogue.put(replace(own, key=key, title=f"d{number}", measured=(measured,)))
        catalogue.set_forms([(own.key, "int4")])
    listed = {one["title"]: one for one in documents("ls", "--json")}["long.txt"]
    assert 0 < listed["quality"] < 1
    assert documents("ls", told["name"], "--json") == [listed]
    line = documents("ls", told["name"]).out.splitlines()[1]
    assert line.split()[0] == "int4"
    assert "not measured of it; lower end" in line
    line = documents("pin", told["name"]).error_line()
    assert f"hillinfer documents measure {told['name']} --form int4, then pin it" in line
    # The twin: what was measured of it is pinned.
    with Store(tmp_path / "store") as store, Catalogue(store.places) as catalogue:
        catalogue.put(replace(own, measured=(measured,)))
    assert "pinned as int4" in documents("pin", told["name"]).out


def test_a_plan_is_drawn(documents, put, command, long_document, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install 'hillinfer[figures]'")
    put(long_document, *FORMS)
    file, out = tmp_path / "plan.json", tmp_path / "plan.svg"
    file.write_text(json.dumps(documents("plan", "--dram-budget", "100%", "--json")))
    drawn = command("documents-picture", file, "--out", out)
    assert drawn.code == 0, drawn.err
    assert ElementTree.parse(out).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert "in memory" in drawn.out
    assert "long.txt: " in drawn.out
    for said in ("[]", "{}", '{"documents": 3}', '{"documents": [], "rules": {"dram_budget": -1}}'):
        file.write_text(said)
        line = command("documents-picture", file).error_line()
        assert "is not of hillinfer documents plan --json" in line
    assert "cannot read" in command("documents-picture", tmp_path / "none.json").error_line()
