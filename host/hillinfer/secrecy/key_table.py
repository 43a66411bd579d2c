# SPDX-License-Identifier: Apache-2.0
"""The data keys of a store, one for each salt, wrapped by the key that its owner keeps.

`keys.json` lies beside the store's index. Each data key is 32 random bytes of its own, wrapped by
AES-256-GCM under a key that follows from the owner's and the store's identity. A key that is
wrapped by nothing else is gone once its entry is gone, and with it everything that its salt has
stored. Salts are named by a keyed hash, so the table does not tell them.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.directories import put_in_place
from hillinfer.errors import reason_of, way_out
from hillinfer.secrecy.key_sources import KeySource
from hillinfer.secrecy.library import (
    KEY_BYTES,
    NONCE_BYTES,
    TAG_BYTES,
    SecrecyError,
    WrongKeyError,
    aes_gcm,
    derived,
    wrong_tag,
)
from hillinfer.system.files import read_plain

_VERSION = 1
_ID_BYTES = 16
_WRAPPED_BYTES = NONCE_BYTES + KEY_BYTES + TAG_BYTES
_MOST_BYTES = 64 << 20
# How long a process waits for another one that changes the table.
_PATIENCE_SECONDS = 10.0
_STEP_SECONDS = 0.01


@dataclass(frozen=True)
class DataKey:
    """What everything of one salt in one store is sealed by.

    Parameters
    ----------
    number
        What it is called, 16 random bytes.
    secret
        32 random bytes; they never leave memory but wrapped.
    """

    number: bytes
    secret: bytes = field(repr=False)

    @property
    def hash_key(self) -> bytes:
        """The key of the hashes that prefixes are found by, 32 bytes."""
        return derived(self.secret, self.number, b"hillinfer prefixes 1")


@dataclass(frozen=True)
class _Entry:
    """A data key in the table: its number, the keyed hash of its salt, and itself, wrapped."""

    number: bytes
    label: bytes
    wrapped: bytes


@dataclass(frozen=True)
class _Table:
    """What the file says.

    Parameters
    ----------
    source, described
        What the wrapping key comes from, and how.
    labels
        The key that labels are hashed by, wrapped; it shows which wrapping key is the right one.
    entries
        The data keys.
    """

    source: str
    described: Mapping[str, Any]
    labels: bytes
    entries: tuple[_Entry, ...]

    def packed(self) -> bytes:
        about = {
            "version": _VERSION,
            "key": {"source": self.source, **self.described},
            "labels": self.labels.hex(),
            "salts": [
                {"id": one.number.hex(), "label": one.label.hex(), "wrapped": one.wrapped.hex()}
                for one in self.entries
            ],
        }
        return json.dumps(about, indent=1).encode() + b"\n"

    @classmethod
    def read(cls, path: Path) -> _Table:
        try:
            about = json.loads(read_plain(path, _MOST_BYTES))
            described = dict(about["key"])
            table = cls(
                str(described.pop("source")),
                described,
                bytes.fromhex(about["labels"]),
                tuple(
                    _Entry(*(bytes.fromhex(one[name]) for name in ("id", "label", "wrapped")))
                    for one in about["salts"]
                ),
            )
            version = about["version"]
        except OSError as error:
            raise SecrecyError(
                f"the store's keys {path} cannot be read: {reason_of(error)}; bring the file back "
                "from a copy: nothing of the store can be read without it"
            ) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SecrecyError(
                f"{path} is damaged: bring it back from a copy; nothing of the store can be read "
                "without it"
            ) from error
        if version != _VERSION:
            raise SecrecyError(
                f"the store's keys are of version {version}, not {_VERSION}: use the HillInfer "
                "that made it"
            )
        return table


class KeyTable:
    """The data keys of one store, unwrapped as they are asked for; any thread may use it.

    Parameters
    ----------
    path
        Of the file, which `create` makes.
    pool
        Identity of the store, 16 bytes.
    source
        What the wrapping key comes from.
    calls
        How the drive is reached; the operating system itself where None.

    Raises
    ------
    WrongKeyError
        Where the key is another one.
    SecrecyError
        Where there is none, or the table cannot be read.
    """

    def __init__(
        self, path: Path, pool: bytes, source: KeySource, calls: DriveCalls | None = None
    ) -> None:
        self._path = path
        self._pool = pool
        self._calls = calls or DriveCalls()
        table = _Table.read(path)
        if table.source != source.name:
            raise WrongKeyError(
                f"the store's key does not come from {_SAID[source.name]} but from "
                f"{_SAID.get(table.source, 'elsewhere')}: give {_OPTION.get(table.source, 'it')}"
            )
        self._wrapping = source.key(table.described, pool)
        self._labels = self._unwrapped(table.labels, b"labels")
        self._keys: dict[bytes, DataKey] = {}
        self._take(table)

    @classmethod
    def of_store(
        cls,
        path: Path,
        cipher: str,
        pool: bytes,
        source: KeySource,
        calls: DriveCalls | None = None,
    ) -> KeyTable:
        """Open the table of a store that is encrypted by `cipher`, and refuse one that is not."""
        if not cipher:
            raise SecrecyError(
                f"the store {path.parent} is not encrypted, and a key was given: leave the key "
                "away, or make an encrypted store with hillinfer store init --encrypt"
            )
        return cls(path, pool, source, calls)

    @staticmethod
    def create(path: Path, pool: bytes, source: KeySource, calls: DriveCalls | None = None) -> None:
        """Make a table without data keys; parameters as above.

        Raises
        ------
        SecrecyError
            Where there is no key, or the file cannot be made.
        """
        calls = calls or DriveCalls()
        source.make(calls)
        described = source.described()
        wrapping = source.key(described, pool)
        labels = _wrapped(wrapping, pool, secrets.token_bytes(KEY_BYTES), b"labels")
        _write(path, _Table(source.name, described, labels, ()), calls)

    def find(self, salt: bytes) -> DataKey | None:
        """Return the data key of a salt, None where it has stored nothing.

        Raises
        ------
        SecrecyError
            Where it cannot be unwrapped.
        """
        label = self._label(salt)
        if label not in self._labelled:
            # Another process may have made it since.
            self._take(self._current())
        entry = self._labelled.get(label)
        return None if entry is None else self._key(entry)

    def numbered(self, number: bytes) -> DataKey | None:
        """Return the data key of a number, None where there is none any more; errors as `find`."""
        if number not in self._entries:
            self._take(self._current())
        entry = self._entries.get(number)
        return None if entry is None else self._key(entry)

    def get(self, salt: bytes) -> DataKey:
        """Return the data key of a salt, a new one where it has none.

        Raises
        ------
        SecrecyError
            Where it cannot be unwrapped, or the table cannot be written.
        """
        found = self.find(salt)
        if found is not None:
            return found
        with self._alone():
            table = self._current()
            self._take(table)
            label = self._label(salt)
            entry = self._labelled.get(label)
            if entry is None:
                number = secrets.token_bytes(_ID_BYTES)
                wrapped = _wrapped(
                    self._wrapping, self._pool, secrets.token_bytes(KEY_BYTES), number + label
                )
                entry = _Entry(number, label, wrapped)
                entries = (*table.entries, entry)
                self._change(self._wrapping, replace(table, entries=entries))
        return self._key(entry)

    def forget(self, salt: bytes) -> bytes | None:
        """Throw the data key of a salt away; return its number, None where it had none.

        What the salt has stored can be read by nobody afterwards. A copy of the table, and what a
        drive has not erased of it, still hold the wrapped key: `rewrap`, and end the old key.
        """
        with self._alone():
            table = self._current()
            label = self._label(salt)
            gone = [one for one in table.entries if one.label == label]
            if not gone:
                return None
            kept = tuple(one for one in table.entries if one.label != label)
            self._change(self._wrapping, replace(table, entries=kept))
        self._keys.pop(gone[0].number, None)
        return gone[0].number

    def rewrap(self, source: KeySource) -> int:
        """Wrap all data keys by another key; return how many. What is stored stays as it is.

        The table has either all of the old or all of the new ones, whenever this is broken off.

        Raises
        ------
        SecrecyError
            Where there is no such key, or the table cannot be written.
        """
        source.make(self._calls)
        with self._alone():
            table = self._current()
            self._take(table)
            described = source.described()
            wrapping = source.key(described, self._pool)
            entries = tuple(
                replace(
                    one,
                    wrapped=_wrapped(
                        wrapping, self._pool, self._key(one).secret, one.number + one.label
                    ),
                )
                for one in table.entries
            )
            self._change(wrapping, _Table(source.name, described, table.labels, entries))
        return len(entries)

    # --- inside ----------------------------------------------------------------------------

    def _change(self, wrapping: bytes, table: _Table) -> None:
        labels = _wrapped(wrapping, self._pool, self._labels, b"labels")
        _write(self._path, replace(table, labels=labels), self._calls)
        self._wrapping = wrapping
        self._take(table)

    def _current(self) -> _Table:
        """Return what the file says now, which the same key still opens."""
        table = _Table.read(self._path)
        try:
            self._unwrapped(table.labels, b"labels")
        except WrongKeyError as error:
            raise SecrecyError(
                "the store got another key while this process had it open: open it again"
            ) from error
        return table

    def _take(self, table: _Table) -> None:
        self._entries = {one.number: one for one in table.entries}
        self._labelled = {one.label: one for one in table.entries}

    def _label(self, salt: bytes) -> bytes:
        return hmac.digest(self._labels, salt, "sha256")

    def _key(self, entry: _Entry) -> DataKey:
        if entry.number not in self._keys:
            try:
                secret = self._unwrapped(entry.wrapped, entry.number + entry.label)
            except WrongKeyError as error:
                raise SecrecyError(
                    f"{self._path} is damaged: bring it back from a copy; what one salt has "
                    "stored cannot be read without it"
                ) from error
            self._keys[entry.number] = DataKey(entry.number, secret)
        return self._keys[entry.number]

    def _unwrapped(self, wrapped: bytes, about: bytes) -> bytes:
        nonce, sealed = wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:]
        try:
            if len(wrapped) != _WRAPPED_BYTES:
                raise ValueError("not as long as a wrapped key")
            return aes_gcm(self._wrapping).decrypt(nonce, sealed, _about(self._pool, about))
        except (wrong_tag(), ValueError) as error:
            raise WrongKeyError(
                f"this is not the key of the store {self._path.parent}: give the one that it was "
                "made with, or that hillinfer store rekey gave it last"
            ) from error

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes and threads from changing the table."""
        path = self._path.with_suffix(".lock")
        try:
            descriptor = self._calls.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except OSError as error:
            raise _not_written(self._path, error) from error
        try:
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while True:
                try:
                    self._calls.lock(descriptor)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise SecrecyError(
                            f"another process changes the keys of the store {path.parent} and "
                            "does not end: end it"
                        ) from error
                    time.sleep(_STEP_SECONDS)
                except OSError as error:
                    raise _not_written(self._path, error) from error
            yield
        finally:
            with suppress(OSError):
                self._calls.close(descriptor)


# What sources are called in sentences, and by which option they are given.
_SAID = {
    "key-file": "a key file",
    "passphrase": "a passphrase",
    "keyring": "the keyring",
}
_OPTION = {
    "key-file": "--key-file",
    "passphrase": "--passphrase-file",
    "keyring": "--keyring",
}


def _about(pool: bytes, about: bytes) -> bytes:
    return b"hillinfer key 1" + pool + about


def _wrapped(wrapping: bytes, pool: bytes, secret: bytes, about: bytes) -> bytes:
    # Random: a wrapping key wraps a few keys, not 2**32.
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + aes_gcm(wrapping).encrypt(nonce, secret, _about(pool, about))


def _write(path: Path, table: _Table, calls: DriveCalls) -> None:
    """Put a table in its place at one moment, on the drive before this returns."""
    try:
        put_in_place(path, table.packed(), calls)
    except OSError as error:
        raise _not_written(path, error) from error


def _not_written(path: Path, error: OSError) -> SecrecyError:
    return SecrecyError(
        f"the store's keys {path} cannot be written: {reason_of(error)}; "
        f"{way_out(error, 'choose another --store')}"
    )
