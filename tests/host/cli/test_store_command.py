# SPDX-License-Identifier: Apache-2.0
"""`hillinfer generate --store` and `hillinfer store`: what was read once is not read again."""

import json
import shutil
from xml.etree import ElementTree

import pytest
import torch
from command import PLAIN, read_report
from transformers import AutoConfig

from hillinfer.model_shape import ModelShape
from hillinfer.schedule.drive_rates import DriveRates
from hillinfer.schedule.kept_windows import KeptWindows, WindowKey, single_passes
from hillinfer.schedule.windows import SlackTable
from hillinfer.store.extent import read_header
from hillinfer.store.keys import UNIT_BYTES, ExtentShape
from hillinfer.store.store import Store
from hillinfer_bench.figures.store_figures import StoreRecord


@pytest.fixture
def long_document(tmp_path):
    """More than a session's segment of 1,024 tokens, and a chunk of 256 behind it."""
    file = tmp_path / "long.txt"
    file.write_text("".join(f"cat {i} sat on mat {i * 7 % 61}. " for i in range(62)))
    return file


@pytest.fixture
def generate(command, tiny_folder, cold_dir, tmp_path):
    """Run the command and return its outcome and report; `code` is what is expected."""

    def run(*arguments, code=0):
        report = tmp_path / "run.json"
        report.unlink(missing_ok=True)
        outcome = command(
            *("generate", "--model", tiny_folder, "--cold-dir", cold_dir, "--report", report),
            *("--max-new-tokens", 6, "--prefill-chunk", 256, *PLAIN, *arguments),
        )
        assert outcome.code == code, outcome.err
        return outcome, read_report(report) if report.exists() else None

    return run


def test_a_second_run_reads_what_the_first_one_stored(generate, command, long_document, tmp_path):
    asked = ("--prompt-file", long_document, "--question", "which cat?")
    plain, without = generate(*asked)
    assert without["store"] is None
    place = tmp_path / "store"
    stored = (*asked, "--store", place, "--store-size", "64MiB", "--reuse", "exact")
    first, report = generate(*stored)
    assert first.out == plain.out
    assert report["store"]["found_tokens"] == 0
    assert report["store"]["stored_tokens"] == report["document_tokens"] // 256 * 256
    again, report = generate(*stored)
    assert again.out == plain.out
    assert report["store"]["found_tokens"] == (report["document_tokens"] - 1) // 256 * 256
    assert report["store"]["read_bytes"] > 0
    assert report["store"]["failure"] == ""
    # The table may break the line anywhere.
    told = " ".join(again.err.replace("│", " ").split())
    assert f"{report['store']['found_tokens']} of {report['document_tokens']} tokens found" in told
    # Another tenant, and another way to compute, have another store.
    for other in (("--salt", "other"), ("--projections", "fused")):
        assert generate(*stored, *other)[1]["store"]["found_tokens"] == 0
    listed = json.loads(command("store", "ls", "--store", place, "--json").out)
    assert {one["tokens"] for one in listed} == {report["document_tokens"] // 256 * 256}
    assert len(listed) == 3


@pytest.mark.parametrize(
    ("way", "step", "rate"), [("opened in place", 1e-4, 1e4), ("streamed", 1.0, 1e9)]
)
def test_the_command_reads_behind_a_stored_document_as_rates_say(
    generate, long_document, tmp_path, tiny_folder, monkeypatch, way, step, rate
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = tmp_path / "store"
    Store.create(place, 64 << 20)
    config = AutoConfig.from_pretrained(tiny_folder)
    shape = ModelShape.from_config(config, torch.float32)
    key = WindowKey.of(torch.get_num_threads(), single_passes(place), shape)
    asked = ("--prompt-file", long_document, "--question", "which cat?", "--store", place)
    _, report = generate(*asked)
    assert report["store"]["passes"] == []
    kept = KeptWindows.of_user()
    # What the answer's tokens took is known by now.
    assert kept.table(key).window(1, report["document_tokens"]) > 0
    kept.keep(key, SlackTable.measured(lambda new, before: step))
    kept.keep_drive(place, DriveRates((1 << 20,), (rate,), rate, 0.0))
    again, report = generate(*asked)
    document, question = report["store"]["passes"]
    assert document["before"] == report["store"]["found_tokens"] > 0
    assert question["before"] == report["document_tokens"]
    assert question["tokens"] == report["answers"][0]["question_tokens"]
    for one in (document, question):
        assert one["way"] == way
        streamed, singly = one["streamed_seconds"], one["in_place_seconds"]
        assert (streamed > singly) is (way == "opened in place")
    told = " ".join(again.err.replace("│", " ").split())
    assert f"tokens behind {document['before']} {way} (streaming" in told
    # What an unbroken run rounds alike has one way alone, whatever rates say.
    if way != "streamed":
        generate(*asked, "--reuse", "exact")
        _, report = generate(*asked, "--reuse", "exact")
        assert {one["way"] for one in report["store"]["passes"]} == {"streamed"}


@pytest.mark.parametrize(
    ("way", "step", "rate"),
    [("opened in place", 1e-4, 1e4), ("streamed", 1.0, 1e9)],
)
def test_a_question_is_read_in_the_way_that_rates_say(
    generate, long_document, tmp_path, tiny_folder, monkeypatch, way, step, rate
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place, question = tmp_path / "store", "which cat sat where, and on which mat of all those mats?"
    Store.create(place, 64 << 20)
    shape = ModelShape.from_config(AutoConfig.from_pretrained(tiny_folder), torch.float32)
    key = WindowKey.of(torch.get_num_threads(), single_passes(place), shape)
    asked = ("--prompt-file", long_document, "--question", question, "--store", place)
    asked += ("--alpha", 0.01, "--question-reading", "auto")
    generate(*asked)
    kept = KeptWindows.of_user()
    kept.keep(key, SlackTable.measured(lambda new, before: step))
    kept.keep_drive(place, DriveRates((1 << 20,), (rate,), rate, 0.0))
    _, report = generate(*asked)
    assert report["settings"]["question_reading"] == "auto"
    told = report["store"]["passes"][-1]
    assert told["way"] == way
    assert told["tokens"] == report["answers"][0]["question_tokens"] > 32
    expected = {
        "one set": told["one_set_seconds"],
        "opened in place": told["in_place_seconds"],
        "streamed": told["streamed_seconds"],
    }
    assert min(expected, key=expected.get) == way
    assert "one set" in told["reason"]


def test_a_store_is_made_looked_into_and_emptied(generate, command, long_document, tmp_path):
    place = tmp_path / "store"
    assert "a store of 64.0 MiB" in command("store", "init", place, "--size", "64MiB").out
    line = command("store", "init", place, "--size", "64MiB").error_line()
    assert "holds a store already" in line
    asked = ("--prompt-file", long_document, "--question", "which cat?", "--store", place)
    generate(*asked)
    listed = command("store", "ls", "--store", place, "--json").out
    assert len(json.loads(listed)) == 1, listed
    (one,) = json.loads(listed)
    told = command("store", "ls", "--store", place).out
    assert told.startswith(f"{one['name']}  ")
    assert json.loads(command("store", "stats", "--store", place, "--json").out)["chunks"] > 0
    for how in ((), ("--deep",)):
        told = command("store", "verify", "--store", place, *how)
        assert told.out.endswith(" 0 wrong\n")
    assert "pinned" in command("store", "pin", one["name"], "--store", place).out
    assert ", pinned" in command("store", "ls", "--store", place).out
    command("store", "unpin", one["name"], "--store", place)
    assert ", pinned" not in command("store", "ls", "--store", place).out
    line = command("store", "rm", "0000", "--store", place).error_line()
    assert "hillinfer store ls names all" in line
    assert "removed" in command("store", "rm", one["name"][:6], "--store", place).out
    assert command("store", "ls", "--store", place).out == ""
    assert command("store", "gc", "--store", place).out == "0 chunks freed\n"


def test_verify_finds_what_changed_and_the_answer_stays(generate, command, long_document, tmp_path):
    place = tmp_path / "store"
    asked = ("--prompt-file", long_document, "--question", "which cat?")
    plain, _ = generate(*asked)
    stored = (*asked, "--store", place, "--store-size", "64MiB", "--reuse", "exact")
    generate(*stored)
    file = place / "pool-0.kv"
    data = bytearray(file.read_bytes())
    pages = [bytes(data[at : at + 4096]) for at in (UNIT_BYTES, UNIT_BYTES + 4096)]
    with Store(place) as opened:
        header = next(
            found[0] for page in pages if (found := read_header(page, opened.places.pool))
        )
    data[UNIT_BYTES + header.shape.rows_at(0) + 1000] ^= 4
    file.write_bytes(data)
    assert command("store", "verify", "--store", place).out.endswith(" 0 wrong\n")
    assert command("store", "verify", "--store", place, "--deep").out.endswith(" 1 wrong\n")
    again, report = generate(*stored)
    assert again.out == plain.out
    assert report["store"]["found_tokens"] == 0


def test_an_encrypted_store_answers_with_its_key_and_no_other(
    generate, command, long_document, tmp_path
):
    place, key = tmp_path / "store", tmp_path / "key"
    line = command("store", "init", place, "--size", "64MiB", "--encrypt").error_line()
    assert "give --key-file, --passphrase-file or --keyring" in line
    made = command("store", "init", place, "--size", "64MiB", "--encrypt", "--key-file", key)
    assert "encrypted by AES-256-GCM: without its key it is lost" in made.out
    asked = ("--prompt-file", long_document, *ASKED)
    plain, _ = generate(*asked)
    stored = (*asked, "--store", place, "--reuse", "exact")
    first, _ = generate(*stored, "--key-file", key)
    again, report = generate(*stored, "--key-file", key)
    assert first.out == again.out == plain.out
    assert report["store"]["found_tokens"] == (report["document_tokens"] - 1) // 256 * 256
    outcome, _ = generate(*stored, code=2)
    assert "is encrypted: give its key with --key-file" in outcome.error_line()
    other = tmp_path / "other"
    other.write_text("0" * 64)
    other.chmod(0o600)
    outcome, _ = generate(*stored, "--key-file", other, code=2)
    assert "not the key of the store" in outcome.error_line()
    # Sizes are told without a key, bytes are not looked at.
    assert json.loads(command("store", "ls", "--store", place, "--json").out)[0]["tokens"] > 0
    told = json.loads(command("store", "stats", "--store", place, "--json").out)
    assert told["open_gigabytes_per_second"] > 0
    assert "is encrypted" in command("store", "verify", "--store", place).error_line()
    told = command("store", "verify", "--deep", "--store", place, "--key-file", key)
    assert told.out.endswith(" 0 wrong\n")


def test_an_encrypted_store_gets_another_key_and_forgets_a_salt(
    generate, command, long_document, tmp_path
):
    place, key, file = tmp_path / "store", tmp_path / "key", tmp_path / "passphrase"
    asked = ("--prompt-file", long_document, "--question", "which cat?", "--store", place)
    generate(*asked, "--store-size", "64MiB", "--key-file", key)
    generate(*asked, "--salt", "one", "--key-file", key)
    file.write_text("correct horse\n")
    file.chmod(0o600)
    rekey = ("store", "rekey", "--store", place)
    assert "rekey needs a new key" in command(*rekey, "--key-file", key).error_line()
    line = command(*rekey, "--new-passphrase-file", file).error_line()
    assert "rekey needs the key of the store" in line
    # Under another name it is the same key, which would open the store as before.
    same = shutil.copy(key, tmp_path / "same")
    line = command(*rekey, "--key-file", key, "--new-key-file", same).error_line()
    assert "would go on opening it: give another one" in line
    told = command(*rekey, "--key-file", key, "--new-passphrase-file", file)
    assert told.out.endswith("2 data keys wrapped anew; the old key opens none\n")
    outcome, _ = generate(*asked, "--key-file", key, code=2)
    assert "give --passphrase-file" in outcome.error_line()
    opened = ("--passphrase-file", file)
    told = command(*rekey, *opened, "--new-key-file", tmp_path / "third", "--json")
    assert json.loads(told.out) == {"data_keys": 2}
    opened = ("--key-file", tmp_path / "third")
    _, report = generate(*asked, *opened)
    assert report["store"]["found_tokens"] > 0
    forget = ("store", "forget", "--store", place, "--salt", "one")
    assert "forget needs the key" in command(*forget).error_line()
    assert command(*forget, *opened).out.endswith(" forgotten\n")
    assert command(*forget, *opened).out == "0 chunks forgotten\n"
    assert json.loads(command(*forget, *opened, "--json").out) == {"forgotten_chunks": 0}
    _, report = generate(*asked, *opened, "--salt", "one")
    assert report["store"]["found_tokens"] == 0
    _, report = generate(*asked, *opened)
    assert report["store"]["found_tokens"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--store", "{}/none"), "hillinfer store init"),
        (("--store", "{}/none", "--store-size", "1MiB"), "too small: give --store-size 64.0 MiB"),
        (("--store", "{}/none", "--store-size", "25%"), "give --store-size like 200GB"),
        (("--reuse", "some"), "longest"),
        (("--key-file", "a", "--keyring", "b"), "a store has one key"),
        (("--store", "{}/none", "--store-size", "64MiB", "--key-file", "{}"), "cannot be read"),
    ],
)
def test_a_store_that_cannot_be_is_refused_with_the_way_out(
    generate, long_document, tmp_path, arguments, says
):
    given = [str(one).replace("{}", str(tmp_path)) for one in arguments]
    outcome, _ = generate("--prompt-file", long_document, *given, code=2)
    assert says in outcome.error_line()


@pytest.fixture
def place(request, tmp_path):
    """What names a store, made by whoever writes first, and its key where it has one."""
    key = ("--key-file", tmp_path / "key") if getattr(request, "param", "") == "encrypted" else ()
    return ("--store", tmp_path / "store", *key)


@pytest.fixture
def put(place, command, tiny_folder, cold_dir, long_document):
    """Run `hillinfer store put` on the document and return the outcome."""

    def run(*arguments):
        return command(
            *("store", "put", "--model", tiny_folder, "--cold-dir", cold_dir),
            *("--prompt-file", long_document, "--prefill-chunk", 256, *PLAIN),
            *(*place, *arguments),
        )

    return run


# Which tokens may be coded follows from what lies in memory beside them, but for a chosen α.
ASKED = ("--question", "which cat?", "--alpha", "0.1")
SEALED_TOO = pytest.mark.parametrize("place", ["plain", "encrypted"], indirect=True)


@SEALED_TOO
def test_a_document_that_was_put_is_not_read_again(put, place, generate, long_document, tmp_path):
    plain, _ = generate("--prompt-file", long_document, *ASKED)
    outcome = put("--store-size", "64MiB", "--reuse", "exact", "--json")
    told = json.loads(outcome.out)
    tokens = told["prompt_tokens"]
    assert (told["found_tokens"], told["stored_tokens"]) == (0, tokens // 256 * 256)
    assert "prefill: " in outcome.err
    again = put("--reuse", "exact")
    assert (
        again.out == f"{(tokens - 1) // 256 * 256} of {tokens} tokens are stored, 0 of them new\n"
    )
    asked = ("--prompt-file", long_document, *ASKED, *place)
    answer, report = generate(*asked, "--reuse", "exact")
    assert answer.out == plain.out
    assert report["store"]["found_tokens"] == (tokens - 1) // 256 * 256
    assert report["store"]["directory"] == str(tmp_path / "store")


@SEALED_TOO
def test_sessions_are_exports_and_come_back(
    put, place, generate, command, tiny_folder, long_document, tmp_path
):
    put("--store-size", "64MiB")
    model = ("--model", tiny_folder)
    (one,) = json.loads(command("store", "ls", *place[:2], "--json").out)
    session = tmp_path / "doc.session"

    def export(where, *more):
        return command("store", "export", one["name"], where, *model, *place, *more)

    outcome = export(session, "--json")
    assert json.loads(outcome.out)["tokens"] == one["tokens"]
    assert f"export: {one['tokens']}/{one['tokens']} tokens" in outcome.err
    assert "it is not empty" in export(session).error_line()
    assert "--store" in export(tmp_path / "store" / "x").error_line()
    if place[2:]:
        line = command("store", "export", one["name"], tmp_path / "new", *model, *place[:2])
        assert "is encrypted" in line.error_line()
    for other in (("--dtype", "bfloat16"), ("--salt", "other")):
        assert "give the --model" in export(tmp_path / "new", *other).error_line()
    # Questions about it want the document too, whose last tokens make no whole group.
    # An export has codes of four bits, where less memory may take fewer.
    asked = ("--prompt-file", long_document, *ASKED, "--shadow", "int4")
    plain, _ = generate(*asked)
    answer, report = generate(*asked, "--session", session)
    assert report["session"]["reused_tokens"] >= 1024
    assert answer.out == plain.out
    line = generate(*ASKED, "--session", session, code=2)[0].error_line()
    assert "--prompt-file" in line
    other = ("--store", tmp_path / "other", *place[2:])
    sealed = ("--encrypt", *place[2:]) if place[2:] else ()
    command("store", "init", tmp_path / "other", "--size", "64MiB", *sealed)
    outcome = command("store", "import", session, *model, *other)
    assert f"{one['tokens']} of them new" in outcome.out
    assert f"import: {one['tokens']}/{one['tokens']} tokens" in outcome.err
    told = json.loads(command("store", "import", session, *model, *other, "--json").out)
    assert (told["found_tokens"], told["stored_tokens"]) == (one["tokens"], 0)
    line = command("store", "import", session, *model, *other, "--dtype", "bfloat16").error_line()
    assert "does not fit" in line
    _, report = generate(*asked, *other)
    assert report["store"]["found_tokens"] == one["tokens"]


def test_a_saved_session_is_imported(generate, command, tiny_folder, long_document, tmp_path):
    asked = ("--prompt-file", long_document, *ASKED)
    generate(*asked, "--save-session", tmp_path / "doc.session")
    command("store", "init", tmp_path / "store", "--size", "64MiB")
    place = ("--store", tmp_path / "store")
    told = json.loads(
        command(
            *("store", "import", tmp_path / "doc.session", "--model", tiny_folder),
            *(*place, "--json"),
        ).out
    )
    _, report = generate(*asked, *place)
    assert report["store"]["found_tokens"] == told["stored_tokens"] == told["dense_tokens"] > 1024


def damaged(place):
    """Change a row of the first chunk that can be found."""
    with Store(place) as store:
        ((unit, *sizes),) = store.database.rows(
            "SELECT c.unit, n.layers, n.row_bytes, n.shadow_bytes FROM chunk c JOIN namespace n "
            "ON n.id = c.namespace WHERE c.position = 0 AND c.state = 2"
        )
    data = bytearray((place / "pool-0.kv").read_bytes())
    data[unit * UNIT_BYTES + ExtentShape(*sizes).rows_at(0)] ^= 4
    (place / "pool-0.kv").write_bytes(data)


def test_where_failures_are_to_be_told_they_end_the_run(generate, long_document, tmp_path):
    place = tmp_path / "store"
    asked = ("--prompt-file", long_document, *ASKED, "--store", place)
    strict = (*asked, "--store-strict")
    plain, _ = generate(*asked, "--store-size", "64MiB")
    # A miss is none, nor is a hit.
    again, report = generate(*strict)
    assert again.out == plain.out
    assert report["store"]["found_tokens"] > 0
    damaged(place)
    broken, _ = generate(*strict, code=1)
    assert "hillinfer: error: the store failed: rows of layer" in broken.err
    assert broken.out == ""
    # It was quarantined then: now it is a miss and no failure.
    assert generate(*strict)[0].out == plain.out
    damaged(place)
    assert generate(*asked)[0].out == plain.out


@pytest.mark.parametrize(
    "break_it",
    [
        lambda place: (place / "store.json").write_text("{}"),
        lambda place: (place / "pool-0.kv").write_bytes(bytes(1 << 20)),
        lambda place: (place / "owners").rmdir(),
    ],
)
def test_a_store_that_cannot_be_opened_is_a_miss(
    generate, command, long_document, tmp_path, break_it
):
    place = tmp_path / "store"
    command("store", "init", place, "--size", "64MiB")
    plain, _ = generate("--prompt-file", long_document, *ASKED)
    break_it(place)
    asked = ("--prompt-file", long_document, *ASKED, "--store", place)
    answer, report = generate(*asked)
    assert answer.out == plain.out
    assert "hillinfer: warning: the store is not used: " in answer.err
    assert report["store"]["failure"]
    assert generate(*asked, "--store-strict", code=2)[0].error_line()


def test_a_store_that_the_environment_names_is_used_and_said(
    generate, command, long_document, tmp_path, monkeypatch
):
    place = tmp_path / "store"
    asked = ("--prompt-file", long_document, *ASKED)
    command("store", "init", place, "--size", "64MiB")
    outcome, report = generate(*asked)
    assert "store: " not in outcome.err
    assert report["store"] is None
    monkeypatch.setenv("HILLINFER_STORE", str(place))
    outcome, report = generate(*asked)
    assert f"store: {place}, named by HILLINFER_STORE" in outcome.err
    assert report["store"]["stored_tokens"] > 0
    assert "named by --store" in generate(*asked, "--store", place)[0].err
    assert json.loads(command("store", "ls", "--json").out)
    (said,) = [
        one
        for one in json.loads(command("doctor", "--json").out)["findings"]
        if one["name"] == "store"
    ]
    assert said["verdict"] in ("ok", "warning")
    assert f"{place}, 64.0 MiB, room for " in said["found"]
    assert "index whole" in said["found"]
    monkeypatch.delenv("HILLINFER_STORE")
    assert "none is named" in command("doctor").out
    (place / "index.sqlite").write_bytes(b"no index")
    assert "it was broken" in command("doctor", "--store", place).out
    assert "holds no store -> hillinfer store init" in command("doctor", "--store", tmp_path).out


def test_what_is_written_is_capped_and_told(put, generate, command, long_document, tmp_path):
    place = ("--store", tmp_path / "store")
    made = command(
        *("store", "init", tmp_path / "store", "--size", "64MiB", "--json"),
        *("--max-writes-per-day", "100kB"),
    )
    assert json.loads(made.out)["max_writes_per_day"] == 100_000
    outcome = put()
    assert outcome.out.startswith("0 of ")
    assert "1 chunks refused" in outcome.out
    plain, report = generate("--prompt-file", long_document, *ASKED, *place)
    assert report["store"]["refused_chunks"] > 0
    assert "not admitted, or too much was written today" in plain.err
    assert "97.7 KiB" in command("store", "stats", *place).out
    said = command("store", "set", *place, "--max-writes-per-day", "none", "--eviction", "lru")
    assert said.out == "no cap on writes; eviction lru, admission adaptive\n"
    assert "tokens are stored" in put().out
    told = json.loads(command("store", "stats", *place, "--json").out)
    assert told["written_bytes"] == told["written_day_bytes"] > 100_000
    assert told["rules"] == {"max_writes_per_day": None, "eviction": "lru", "admission": None}
    said = command("store", "set", *place, "--admission", "seen-once", "--json")
    assert json.loads(said.out)["admission"] == "seen-once"
    for wrong, says in (
        (("--admission", "some"), "choose one of"),
        (("--eviction", "some"), "choose one of"),
        (("--max-writes-per-day", "5%"), "is a share of nothing"),
    ):
        assert says in command("store", "set", *place, *wrong).error_line()


def test_every_command_says_what_it_did_as_json(put, command, tmp_path):
    place = ("--store", tmp_path / "store")
    put("--store-size", "64MiB")
    (one,) = json.loads(command("store", "ls", *place, "--json").out)
    for words, said in (
        (("set",), "admission"),
        (("stats",), "namespaces"),
        (("verify",), "wrong"),
        (("gc",), "freed_chunks"),
        (("pin", one["name"]), "chunks"),
        (("unpin", one["name"]), "chunks"),
        (("rm", one["name"]), "chunks"),
    ):
        assert said in json.loads(command("store", *words, *place, "--json").out)


def test_a_picture_of_the_store_and_of_the_first_token(
    put, generate, command, long_document, tmp_path
):
    pytest.importorskip("matplotlib", reason="pip install 'hillinfer[figures]'")
    place = ("--store", tmp_path / "store")
    put("--store-size", "64MiB")
    outcome, report = generate("--prompt-file", long_document, *ASKED, *place)
    parts = report["first_token"]
    assert {"find_seconds", "read_seconds", "compute_seconds", "question_seconds"} <= parts.keys()
    spent = report["document_seconds"] + report["answers"][0]["question_seconds"]
    assert sum(parts.values()) == pytest.approx(spent)
    assert "first token" in outcome.err
    stats = tmp_path / "stats.json"
    stats.write_text(command("store", "stats", *place, "--json").out)
    run = tmp_path / "run.json"
    out = tmp_path / "store.svg"
    drawn = command("store-picture", stats, run, "--out", out)
    assert drawn.code == 0, drawn.err
    assert ElementTree.parse(out).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert "s to the first token" in drawn.out
    record = StoreRecord.read([stats, run])
    # All of the store is told, and a row that is there is seen.
    (held,) = record.held
    assert held.total == 64 << 20
    assert any(name.startswith("rows of model") for name in held.parts)
    assert record.first_tokens[0].parts["read"] == parts["read_seconds"]
    for said in ("[]", "{}", '{"first_token": {"a_seconds": -1}}', '{"namespaces": 3}'):
        stats.write_text(said)
        assert "is neither of hillinfer store stats" in command("store-picture", stats).error_line()
    assert "cannot read" in command("store-picture", tmp_path / "none.json").error_line()
