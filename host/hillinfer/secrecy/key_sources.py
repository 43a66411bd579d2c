# SPDX-License-Identifier: Apache-2.0
"""Where the key of a store comes from: a file, a passphrase in a file, or the system's keyring.

None of them is ever in a command's arguments, where others could read it.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.directories import keep_names
from hillinfer.errors import SettingsError, reason_of, way_out
from hillinfer.secrecy.library import KEY_BYTES, SecrecyError, Stretch, derived
from hillinfer.system.files import checked_size

# What names them in a process' surroundings.
KEY_FILE = "HILLINFER_STORE_KEY_FILE"
PASSPHRASE_FILE = "HILLINFER_STORE_PASSPHRASE_FILE"
KEYRING = "HILLINFER_STORE_KEYRING"
# As options name them, for messages.
OPTIONS = "--key-file, --passphrase-file or --keyring"

_MOST_FILE_BYTES = 1 << 16
_SERVICE = "hillinfer store"
_SALT_BYTES = 16
# What a damaged table may ask of scrypt: a gigabyte, and some seconds.
_MOST_COST, _MOST_BLOCKS, _MOST_LANES = 1 << 20, 8, 4


class KeySource(Protocol):
    """What a store's wrapping key comes from."""

    @property
    def name(self) -> str:
        """What it is called in a store's table of keys."""

    def make(self, calls: DriveCalls) -> None:
        """Make a new key where there is none yet and one can be made.

        Raises
        ------
        SecrecyError
            Where there can be none.
        """

    def described(self) -> dict[str, object]:
        """Return what a new table says of it, `name` aside, no secret among it."""

    def key(self, described: Mapping[str, Any], pool: bytes) -> bytes:
        """Return the key of 32 bytes that the data keys of a store are wrapped by.

        Parameters
        ----------
        described
            As `described` gave it when the table was made.
        pool
            Identity of the store; two stores have nothing in common.

        Raises
        ------
        SecrecyError
            Where there is none.
        """


@dataclass(frozen=True)
class KeyFile:
    """A file of 32 random bytes, or of 64 hexadecimal digits, that its owner alone may read.

    Parameters
    ----------
    path
        Of the file; `make` makes it where it is missing.
    """

    path: Path
    name = "key-file"

    def make(self, calls: DriveCalls) -> None:
        """Make the file where it is missing."""
        try:
            descriptor = calls.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        except FileExistsError:
            return
        except OSError as error:
            raise SecrecyError(
                f"the key file {self.path} cannot be made: {reason_of(error)}; "
                f"{way_out(error, 'choose another --key-file')}"
            ) from error
        try:
            data = memoryview(secrets.token_hex(KEY_BYTES).encode() + b"\n")
            if calls.pwrite(descriptor, data, 0) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            calls.fsync(descriptor)
            # What is sealed with it outlasts a power failure, and so must the key.
            keep_names(self.path.absolute().parent, calls)
        except OSError as error:
            # Half a key is none.
            calls.unlink(self.path)
            raise SecrecyError(
                f"the key file {self.path} cannot be written: {reason_of(error)}; "
                f"{way_out(error, 'choose another --key-file')}"
            ) from error
        finally:
            calls.close(descriptor)

    def described(self) -> dict[str, object]:
        """Return nothing: the file is all there is."""
        return {}

    def key(self, described: Mapping[str, Any], pool: bytes) -> bytes:
        """Return the wrapping key; errors as those of `KeySource.key`."""
        content = _private(self.path, "--key-file", "a copy of it")
        return derived(_secret(content, f"the key file {self.path}"), pool, b"hillinfer store 1")


@dataclass(frozen=True)
class PassphraseFile:
    """A file with a passphrase, which scrypt makes a key of: some tenths of a second a time.

    Parameters
    ----------
    path
        Of the file, that its owner alone may read; a line's end at its end does not count.
    """

    path: Path
    name = "passphrase"

    def make(self, calls: DriveCalls) -> None:
        """Refuse a file that is missing or empty: nobody makes a passphrase but its user."""
        self._passphrase()

    def described(self) -> dict[str, object]:
        """Return the parameters of scrypt, with a new salt."""
        stretch = Stretch(secrets.token_bytes(_SALT_BYTES))
        return {
            "salt": stretch.salt.hex(),
            "n": stretch.cost,
            "r": stretch.blocks,
            "p": stretch.lanes,
        }

    def key(self, described: Mapping[str, Any], pool: bytes) -> bytes:
        """Return the wrapping key; errors as those of `KeySource.key`."""
        try:
            salt = bytes.fromhex(described["salt"])
            cost, blocks, lanes = (int(described[name]) for name in "nrp")
        except (KeyError, ValueError, TypeError) as error:
            raise SecrecyError(
                "the store's table of keys does not say how a passphrase becomes a key: bring "
                "keys.json back from a copy"
            ) from error
        if (
            not (1 < cost <= _MOST_COST and 1 <= blocks <= _MOST_BLOCKS)
            or cost & (cost - 1)
            or not 1 <= lanes <= _MOST_LANES
        ):
            raise SecrecyError(
                f"the store's table of keys asks for scrypt with n {cost}, r {blocks}, p {lanes}, "
                "which no store does: bring keys.json back from a copy"
            )
        stretched = Stretch(salt, cost, blocks, lanes).key(self._passphrase())
        return derived(stretched, pool, b"hillinfer store 1")

    def _passphrase(self) -> bytes:
        content = _private(self.path, "--passphrase-file", "it")
        found = content.removesuffix(b"\n").removesuffix(b"\r")
        if not found:
            raise SecrecyError(
                f"the passphrase file {self.path} is empty: write a passphrase into it"
            )
        return found


@dataclass(frozen=True)
class KeyringEntry:
    """An entry of the system's keyring, by the package `keyring`.

    Parameters
    ----------
    entry
        What it is called; `make` makes it where it is missing.
    """

    entry: str
    name = "keyring"

    def make(self, calls: DriveCalls) -> None:
        """Make the entry where it is missing."""
        if self._asked("get_password") is None:
            self._asked("set_password", secrets.token_hex(KEY_BYTES))

    def described(self) -> dict[str, object]:
        """Return nothing: the entry is all there is."""
        return {}

    def key(self, described: Mapping[str, Any], pool: bytes) -> bytes:
        """Return the wrapping key; errors as those of `KeySource.key`."""
        found = self._asked("get_password")
        if found is None:
            raise SecrecyError(
                f"the keyring has no entry '{self.entry}' of '{_SERVICE}': name the one that the "
                "store was made with"
            )
        secret = _secret(found.encode(), f"the keyring's entry '{self.entry}'")
        return derived(secret, pool, b"hillinfer store 1")

    def _asked(self, name: str, *values: str) -> str | None:
        try:
            import keyring
            from keyring.errors import KeyringError
        except ImportError as error:
            raise SecrecyError(
                "--keyring needs the package keyring, which is not installed: "
                "pip install 'hillinfer[keyring]', or use --key-file"
            ) from error
        try:
            found: str | None = getattr(keyring, name)(_SERVICE, self.entry, *values)
        except (KeyringError, RuntimeError) as error:
            raise SecrecyError(
                f"the system's keyring cannot be used: {error}; unlock it, or use --key-file"
            ) from error
        return found


class WithoutKey:
    """No key: an encrypted store is looked at from outside, as far as its index goes."""


def key_source(
    key_file: Path | None, passphrase_file: Path | None, keyring: str | None
) -> KeySource | None:
    """Return what options name, None where they name nothing.

    Raises
    ------
    SettingsError
        Where they name several.
    """
    found: list[KeySource] = []
    if key_file is not None:
        found.append(KeyFile(key_file))
    if passphrase_file is not None:
        found.append(PassphraseFile(passphrase_file))
    if keyring is not None:
        found.append(KeyringEntry(keyring))
    if len(found) > 1:
        raise SettingsError(f"a store has one key: give one of {OPTIONS}")
    return found[0] if found else None


def key_source_around(surroundings: Mapping[str, str]) -> KeySource | None:
    """Return what a process' environment names, as `key_source` does."""
    key_file, passphrase_file, keyring = (
        surroundings.get(name) or None for name in (KEY_FILE, PASSPHRASE_FILE, KEYRING)
    )
    return key_source(
        None if key_file is None else Path(key_file),
        None if passphrase_file is None else Path(passphrase_file),
        keyring,
    )


# --- inside ---


def _private(path: Path, option: str, what: str) -> bytes:
    """Return the content of a small file that its owner alone may read."""
    try:
        # A pipe does not wait for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as opened:
            size = checked_size(path, descriptor, _MOST_FILE_BYTES)
            mode = os.fstat(descriptor).st_mode
            content = opened.read(size + 1)
    except FileNotFoundError as error:
        raise SecrecyError(
            f"{path} is not there, and without it nothing of the store can be read: bring {what} "
            f"back, or name another {option}"
        ) from error
    except OSError as error:
        raise SecrecyError(
            f"{path} cannot be read: {reason_of(error)}; {way_out(error, f'name another {option}')}"
        ) from error
    if mode & 0o077:
        raise SecrecyError(f"{path} may be read by others than its owner: chmod 600 {path}")
    return content


def _secret(content: bytes, what: str) -> bytes:
    if len(content) == KEY_BYTES:
        return content
    try:
        found = bytes.fromhex(content.decode())
    except ValueError:
        found = b""
    if len(found) != KEY_BYTES:
        raise SecrecyError(f"{what} holds no key: it has 32 random bytes, or 64 hexadecimal digits")
    return found
