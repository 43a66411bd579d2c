# SPDX-License-Identifier: Apache-2.0
"""`hillinfer generate --store` and `hillinfer store`: what was read once is not read again."""

import json

import pytest
from command import read_report

from hillinfer.store.extent import read_header
from hillinfer.store.keys import UNIT_BYTES
from hillinfer.store.store import Store


@pytest.fixture
def long_document(tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("".join(f"cat {i} sat on mat {i * 7 % 61}. " for i in range(150)))
    return file


@pytest.fixture
def generate(command, tiny_folder, cold_dir, tmp_path):
    """Run the command and return its outcome and report; `code` is what is expected."""

    def run(*arguments, code=0):
        report = tmp_path / "run.json"
        report.unlink(missing_ok=True)
        outcome = command(
            *("generate", "--model", tiny_folder, "--cold-dir", cold_dir, "--report", report),
            *("--max-new-tokens", 12, "--prefill-chunk", 256, *arguments),
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
    assert f"{report['store']['found_tokens']} of {report['document_tokens']} tokens found" in (
        again.err
    )
    # Another tenant, and another way to compute, have another store.
    for other in (("--salt", "other"), ("--projections", "fused")):
        assert generate(*stored, *other)[1]["store"]["found_tokens"] == 0
    listed = json.loads(command("store", "ls", "--store", place, "--json").out)
    assert {one["tokens"] for one in listed} == {report["document_tokens"] // 256 * 256}
    assert len(listed) == 3


def test_a_store_is_made_looked_into_and_emptied(generate, command, long_document, tmp_path):
    place = tmp_path / "store"
    assert "a store of 64.0 MiB" in command("store", "init", place, "--size", "64MiB").out
    line = command("store", "init", place, "--size", "64MiB").error_line()
    assert "holds a store already" in line
    asked = ("--prompt-file", long_document, "--question", "which cat?", "--store", place)
    generate(*asked)
    (one,) = json.loads(command("store", "ls", "--store", place, "--json").out)
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
    asked = ("--prompt-file", long_document, "--question", "which cat?")
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
    told = command(*rekey, "--key-file", key, "--new-passphrase-file", file)
    assert told.out.endswith("2 data keys wrapped anew; the old key opens none\n")
    outcome, _ = generate(*asked, "--key-file", key, code=2)
    assert "give --passphrase-file" in outcome.error_line()
    opened = ("--passphrase-file", file)
    _, report = generate(*asked, *opened)
    assert report["store"]["found_tokens"] > 0
    forget = ("store", "forget", "--store", place, "--salt", "one")
    assert "forget needs the key" in command(*forget).error_line()
    assert command(*forget, *opened).out.endswith(" forgotten\n")
    assert command(*forget, *opened).out == "0 chunks forgotten\n"
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
