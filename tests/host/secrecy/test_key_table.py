# SPDX-License-Identifier: Apache-2.0
"""Keys of a store: where they come from, how they are wrapped, and what a wrong one says."""

import json
import os
import signal
import stat
import subprocess
import sys
import time

import keyring
import pytest
from keyring.backend import KeyringBackend

from hillinfer.errors import SettingsError
from hillinfer.secrecy.key_sources import (
    KeyFile,
    KeyringEntry,
    PassphraseFile,
    key_source,
    key_source_around,
)
from hillinfer.secrecy.key_table import KeyTable
from hillinfer.secrecy.library import SecrecyError, Stretch, WrongKeyError
from hillinfer.secrecy.pages import Place
from hillinfer.secrecy.store_keys import Envelope, open_sheet, seal_sheet

POOL, OTHER_POOL = b"a" * 16, b"b" * 16


class HeldKeyring(KeyringBackend):
    """A keyring in memory."""

    priority = 1

    def __init__(self):
        super().__init__()
        self.held = {}

    def get_password(self, service, username):
        return self.held.get((service, username))

    def set_password(self, service, username, password):
        self.held[service, username] = password

    def delete_password(self, service, username):
        del self.held[service, username]


@pytest.fixture
def held_keyring():
    before, own = keyring.get_keyring(), HeldKeyring()
    keyring.set_keyring(own)
    yield own
    keyring.set_keyring(before)


def private(path, content):
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def passphrase(tmp_path, text=b"correct horse battery staple\n", name="passphrase"):
    return PassphraseFile(private(tmp_path / name, text))


SOURCES = {
    "file": lambda tmp_path: KeyFile(tmp_path / "key"),
    "passphrase": passphrase,
    "keyring": lambda tmp_path: KeyringEntry("work"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_keys_of_salts_come_back(tmp_path, held_keyring, kind):
    source, path = SOURCES[kind](tmp_path), tmp_path / "keys.json"
    KeyTable.create(path, POOL, source)
    table = KeyTable(path, POOL, source)
    assert table.find(b"one") is None
    one, two = table.get(b"one"), table.get(b"two")
    assert one.secret != two.secret
    assert one.hash_key != two.hash_key
    again = KeyTable(path, POOL, source)
    assert again.find(b"one") == table.get(b"one") == one
    assert again.numbered(two.number) == two
    assert again.find(b"three") is None
    assert again.numbered(bytes(16)) is None


def test_neither_keys_nor_salts_lie_in_the_table(tmp_path):
    source, path = KeyFile(tmp_path / "key"), tmp_path / "keys.json"
    KeyTable.create(path, POOL, source)
    key = KeyTable(path, POOL, source).get(b"the tenant")
    written = path.read_bytes()
    for secret in (b"the tenant", key.secret.hex().encode(), key.hash_key.hex().encode()):
        assert secret not in written
    assert key.number.hex().encode() in written
    assert key.secret.hex() not in repr(key)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_key_file_is_made_once_and_is_its_owners(tmp_path):
    source = KeyFile(tmp_path / "key")
    umask = os.umask(0)
    try:
        KeyTable.create(tmp_path / "one.json", POOL, source)
    finally:
        os.umask(umask)
    made = source.path.read_bytes()
    assert stat.S_IMODE(source.path.stat().st_mode) == 0o600
    assert len(bytes.fromhex(made.decode())) == 32
    KeyTable.create(tmp_path / "two.json", OTHER_POOL, source)
    assert source.path.read_bytes() == made
    # Two stores have nothing in common, whatever their keys come from.
    with pytest.raises(WrongKeyError):
        KeyTable(tmp_path / "one.json", OTHER_POOL, source)


def test_a_key_file_may_hold_raw_bytes(tmp_path):
    raw = bytes(range(32))
    KeyTable.create(tmp_path / "keys.json", POOL, KeyFile(private(tmp_path / "raw", raw)))
    digits = KeyFile(private(tmp_path / "hex", raw.hex().encode() + b"\n"))
    KeyTable(tmp_path / "keys.json", POOL, digits)


@pytest.mark.parametrize("kind", SOURCES)
def test_a_wrong_key_is_a_clear_error_and_nothing_is_lost(tmp_path, held_keyring, kind):
    source, path = SOURCES[kind](tmp_path), tmp_path / "keys.json"
    KeyTable.create(path, POOL, source)
    kept = KeyTable(path, POOL, source).get(b"")
    before = path.read_bytes()
    wrong = {
        "file": lambda: KeyFile(private(tmp_path / "other", b"0" * 64)),
        "passphrase": lambda: passphrase(tmp_path, b"correct horse battery stapl\n", "other"),
        "keyring": lambda: KeyringEntry("home"),
    }[kind]()
    if kind == "keyring":
        held_keyring.set_password("hillinfer store", "home", "0" * 64)
    with pytest.raises(WrongKeyError, match=r"not the key of the store .*: give the one that"):
        KeyTable(path, POOL, wrong)
    assert path.read_bytes() == before
    assert KeyTable(path, POOL, source).find(b"") == kept


def test_a_key_of_another_kind_names_the_right_option(tmp_path):
    path = tmp_path / "keys.json"
    KeyTable.create(path, POOL, passphrase(tmp_path))
    with pytest.raises(WrongKeyError, match="a passphrase: give --passphrase-file"):
        KeyTable(path, POOL, KeyFile(private(tmp_path / "key", b"0" * 64)))


def test_a_line_s_end_is_no_part_of_a_passphrase(tmp_path):
    path = tmp_path / "keys.json"
    KeyTable.create(path, POOL, passphrase(tmp_path, b"pass word"))
    KeyTable(path, POOL, passphrase(tmp_path, b"pass word\r\n", "other"))
    with pytest.raises(WrongKeyError):
        KeyTable(path, POOL, passphrase(tmp_path, b"pass word \n", "third"))


def test_scrypt_is_the_published_one():
    """RFC 7914, third vector, whose first 32 bytes are those of a key."""
    found = Stretch(b"SodiumChloride", 16384, 8, 1).key(b"pleaseletmein")
    assert found.hex() == "7023bdcb3afd7348461c06cd81fd38ebfda8fbba904f8e3ea9b543f6545da1f2"
    assert Stretch(b"SodiumChlorid", 16384, 8, 1).key(b"pleaseletmein") != found


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda at: KeyFile(at / "none"), "is not there, .*bring a copy of it back"),
        (lambda at: KeyFile(private(at / "short", b"12 34")), "32 random bytes, or 64 hexadecimal"),
        (lambda at: KeyFile(private(at / "long", b"1" * 70000)), "cannot be read"),
        (lambda at: KeyFile(at), "cannot be read"),
        (lambda at: PassphraseFile(at / "none"), "is not there"),
        (lambda at: passphrase(at, b"\n"), "is empty: write a passphrase into it"),
        (lambda at: KeyringEntry("nothing"), "no entry 'nothing'"),
    ],
)
def test_a_key_that_cannot_be_had_says_why(tmp_path, held_keyring, make, says):
    path = tmp_path / "keys.json"
    source = make(tmp_path)
    right = {KeyFile: "file", PassphraseFile: "passphrase", KeyringEntry: "keyring"}[type(source)]
    made = tmp_path / "made"
    made.mkdir()
    KeyTable.create(path, POOL, SOURCES[right](made))
    with pytest.raises(SecrecyError, match=says):
        KeyTable(path, POOL, source)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_that_others_may_read_is_refused(tmp_path, mode):
    source = KeyFile(tmp_path / "key")
    KeyTable.create(tmp_path / "keys.json", POOL, source)
    source.path.chmod(mode)
    with pytest.raises(SecrecyError, match=f"chmod 600 {source.path}"):
        KeyTable(tmp_path / "keys.json", POOL, source)


def test_one_key_at_most_is_named(tmp_path):
    assert key_source(None, None, None) is None
    assert key_source_around({}) is None
    assert key_source_around({"HILLINFER_STORE_KEYRING": "work"}) == KeyringEntry("work")
    around = {"HILLINFER_STORE_KEY_FILE": "a", "HILLINFER_STORE_PASSPHRASE_FILE": "b"}
    with pytest.raises(SettingsError, match="one of --key-file"):
        key_source_around(around)


@pytest.fixture(scope="module")
def stretched(tmp_path_factory):
    """The table of a store whose key comes from a passphrase, which takes a while to make."""
    place = tmp_path_factory.mktemp("stretched")
    KeyTable.create(place / "keys.json", POOL, passphrase(place))
    return (place / "keys.json").read_text()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: "{", "is damaged: bring it back"),
        (lambda text: text.replace('"version": 1', '"version": 7'), "version 7"),
        (lambda text: text.replace('"n": 131072', '"n": 1099511627776'), "which no store does"),
        (lambda text: text.replace('"n": 131072', '"n": 131071'), "which no store does"),
        (lambda text: text.replace('"p": 1', '"p": "x"'), "does not say how a passphrase"),
    ],
)
def test_a_damaged_table_says_so(tmp_path, stretched, damage, says):
    path, source = tmp_path / "keys.json", passphrase(tmp_path)
    path.write_text(damage(stretched))
    with pytest.raises(SecrecyError, match=says):
        KeyTable(path, POOL, source)


def test_a_flipped_bit_of_a_wrapped_key_is_found(tmp_path):
    path, source = tmp_path / "keys.json", KeyFile(tmp_path / "key")
    KeyTable.create(path, POOL, source)
    table = KeyTable(path, POOL, source)
    table.get(b"one")
    kept = table.get(b"two")
    about = json.loads(path.read_text())
    wrapped = bytearray.fromhex(about["salts"][0]["wrapped"])
    wrapped[30] ^= 2
    about["salts"][0]["wrapped"] = wrapped.hex()
    path.write_text(json.dumps(about))
    table = KeyTable(path, POOL, source)
    with pytest.raises(SecrecyError, match="is damaged"):
        table.get(b"one")
    # It is not replaced by a new one, and others still open.
    assert table.get(b"two") == kept
    assert len(json.loads(path.read_text())["salts"]) == 2


def test_entries_that_changed_places_open_nothing(tmp_path):
    path, source = tmp_path / "keys.json", KeyFile(tmp_path / "key")
    KeyTable.create(path, POOL, source)
    table = KeyTable(path, POOL, source)
    table.get(b"one"), table.get(b"two")
    about = json.loads(path.read_text())
    one, two = about["salts"]
    one["wrapped"], two["wrapped"] = two["wrapped"], one["wrapped"]
    path.write_text(json.dumps(about))
    with pytest.raises(SecrecyError, match="is damaged"):
        KeyTable(path, POOL, source).get(b"one")


def test_two_processes_make_one_key_of_a_salt(tmp_path):
    path, source = tmp_path / "keys.json", KeyFile(tmp_path / "key")
    KeyTable.create(path, POOL, source)
    first, second = KeyTable(path, POOL, source), KeyTable(path, POOL, source)
    assert first.get(b"one") == second.get(b"one")
    assert second.get(b"two") == first.find(b"two")


def test_a_forgotten_key_is_gone_and_others_stay(tmp_path):
    path, source = tmp_path / "keys.json", KeyFile(tmp_path / "key")
    KeyTable.create(path, POOL, source)
    table = KeyTable(path, POOL, source)
    one, two = table.get(b"one"), table.get(b"two")
    assert table.forget(b"one") == one.number
    assert table.forget(b"one") is None
    for opened in (table, KeyTable(path, POOL, source)):
        assert opened.find(b"one") is None
        assert opened.numbered(one.number) is None
        assert opened.find(b"two") == two
    assert one.number.hex() not in path.read_text()
    assert table.get(b"one").secret != one.secret


def test_another_key_wraps_the_same_keys(tmp_path):
    path, old, new = tmp_path / "keys.json", KeyFile(tmp_path / "key"), passphrase(tmp_path)
    KeyTable.create(path, POOL, old)
    table = KeyTable(path, POOL, old)
    one, two = table.get(b"one"), table.get(b"two")
    other = KeyTable(path, POOL, old)
    assert table.rewrap(new) == 2
    with pytest.raises(WrongKeyError):
        KeyTable(path, POOL, old)
    opened = KeyTable(path, POOL, new)
    assert (opened.find(b"one"), opened.find(b"two")) == (one, two)
    assert table.get(b"three") == opened.find(b"three")
    # Another process goes on with what it has, and is told where it needs more.
    assert other.find(b"one") == one
    with pytest.raises(SecrecyError, match="got another key while"):
        other.get(b"four")


REKEYING = """
import sys
sys.path[:0] = sys.argv[1].split(":")
from pathlib import Path
from hillinfer.secrecy.key_sources import KeyFile
from hillinfer.secrecy.key_table import KeyTable
place = Path(sys.argv[2])
keys = [KeyFile(place / name) for name in ("even", "odd")]
for turn in range(10**6):
    table = KeyTable(place / "keys.json", b"a" * 16, keys[turn % 2])
    if not turn:
        print("begun", flush=True)
    table.rewrap(keys[1 - turn % 2])
"""


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.05, 0.13])
def test_a_kill_while_keys_are_wrapped_anew_loses_none(tmp_path, delay):
    keys = [KeyFile(tmp_path / name) for name in ("even", "odd")]
    path = tmp_path / "keys.json"
    KeyTable.create(path, POOL, keys[0])
    table = KeyTable(path, POOL, keys[0])
    held = {salt: table.get(salt) for salt in (b"", b"one", b"two")}
    command = [sys.executable, "-c", REKEYING, ":".join(sys.path), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout.readline() == "begun\n"
        time.sleep(delay)
        running.send_signal(signal.SIGKILL)
    found = []
    for key in keys:
        try:
            found.append(KeyTable(path, POOL, key))
        except (WrongKeyError, SecrecyError):
            continue
    (opened,) = found
    assert {salt: opened.find(salt) for salt in held} == held
    # The lock went with the process.
    opened.get(b"three")


# --- Sheets ---

PLACE = Place(POOL, 0, 7)
PAGE = b"a header".ljust(4092, b"\0") + b"sums"
BODY = bytes(range(256)) * 32


def sealed_sheet(slot=0):
    return seal_sheet(b"i" * 16, b"k" * 32, PLACE, slot, (3, 256, 4096), PAGE, BODY)


def test_a_sheet_comes_back_and_tells_sizes_without_a_key():
    page, body = sealed_sheet()
    assert (len(page), len(body)) == (4096, len(BODY))
    assert b"a header" not in page
    envelope = Envelope.read(page, POOL)
    assert (envelope.key_id, envelope.sizes) == (b"i" * 16, (3, 256, 4096))
    assert open_sheet(b"k" * 32, envelope, PLACE, 0, page, body) == (PAGE, BODY)
    assert Envelope.read(page, OTHER_POOL) is None
    assert Envelope.read(PAGE, POOL) is None


def test_equal_sheets_are_sealed_to_different_bytes():
    assert sealed_sheet() != sealed_sheet()


def test_every_flipped_byte_of_a_sheet_is_found():
    page, body = sealed_sheet()
    refused = 0
    for at in (*range(4096), *range(4096, 4096 + len(BODY), 97)):
        data = bytearray(page + body)
        data[at] ^= 1 << at % 8
        envelope = Envelope.read(bytes(data[:4096]), POOL)
        if envelope is None:
            refused += 1
            continue
        with pytest.raises(Exception, match="a sheet"):
            open_sheet(b"k" * 32, envelope, PLACE, 0, bytes(data[:4096]), bytes(data[4096:]))
    # The magic, the version and the identity of the store.
    assert refused == 8 + 4 + 16


@pytest.mark.parametrize(
    ("key", "place", "slot"),
    [
        (b"K" * 32, PLACE, 0),
        (b"k" * 32, Place(POOL, 0, 8), 0),
        (b"k" * 32, Place(POOL, 1, 7), 0),
        (b"k" * 32, PLACE, 1),
    ],
    ids=["key", "extent", "drive", "slot"],
)
def test_a_sheet_opens_with_its_key_at_its_place_alone(key, place, slot):
    page, body = sealed_sheet()
    envelope = Envelope.read(page, POOL)
    with pytest.raises(Exception, match="a sheet"):
        open_sheet(key, envelope, place, slot, page, body)
