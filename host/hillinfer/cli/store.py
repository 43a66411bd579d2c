# SPDX-License-Identifier: Apache-2.0
"""`hillinfer store`: making a store, looking into it, and keeping it in order."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from hillinfer.cli.console import error_console, reading_view
from hillinfer.cli.store_keys import (
    KeyFileOption,
    KeyringOption,
    PassphraseOption,
    forget,
    given_key,
    rekey,
)
from hillinfer.drive.calls import DriveCalls
from hillinfer.errors import SettingsError
from hillinfer.secrecy.key_sources import KeySource, WithoutKey, key_source
from hillinfer.secrecy.library import CIPHER
from hillinfer.secrecy.rate import CipherRate
from hillinfer.store.keys import CHUNK_TOKENS, Reuse
from hillinfer.store.maintenance import Parts, chains
from hillinfer.store.maintenance import pin as pin_chunks
from hillinfer.store.store import Store
from hillinfer.values import ByteSize, choice, format_bytes

_Directory = Annotated[
    Path, typer.Option("--store", envvar="HILLINFER_STORE", help="Directory of the store.")
]
_Name = Annotated[str, typer.Argument(help="As hillinfer store ls names it.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def store_bytes(size: str) -> int:
    """Return the bytes that `--store-size` names.

    Raises
    ------
    SettingsError
        Where it is no amount, or a share.
    """
    amount = ByteSize.parse(size)
    if amount.byte_count is None:
        raise SettingsError(f"'{size}' is a share of nothing: give --store-size like 200GB")
    return amount.byte_count


@dataclass(frozen=True)
class StoreUse:
    """The store of a run.

    Parameters
    ----------
    directory
        Where it is.
    size
        Bytes to make it with where there is none; None: there must be one.
    reuse
        Where a stored prefix may end.
    salt
        Of a tenant.
    key
        What an encrypted store's key comes from; None for one that is not encrypted.
    """

    directory: Path
    size: int | None
    reuse: Reuse
    salt: bytes
    key: KeySource | None = None

    @classmethod
    def of(
        cls,
        directory: Path | None,
        size: str | None,
        reuse: str,
        salt: str,
        key: KeySource | None = None,
    ) -> StoreUse | None:
        """Return what options mean, None where they name no store.

        Raises
        ------
        SettingsError
            Where one of them means nothing.
        """
        way = choice("reuse", Reuse, reuse)
        if directory is None:
            return None
        amount = None if size is None else store_bytes(size)
        return cls(directory, amount, way, salt.encode(), key)

    def opened(self, calls: DriveCalls | None = None) -> Store:
        """Return the store, reached through `calls`, made where there is none and a size was given.

        Raises
        ------
        StoreError
            Where there is none, or it cannot be used.
        SecrecyError
            Where its key is missing, is another one, or does not belong there.
        """
        if self.size is not None and not Store.exists(self.directory):
            Store.create(self.directory, self.size, key=self.key)
        return Store(self.directory, calls=calls, key=self.key)


def init(
    directory: Annotated[Path, typer.Argument(help="Made where it is missing.")],
    *,
    size: Annotated[str, typer.Option("--size", help="What it may take in all, like 200GB.")],
    drive: Annotated[
        list[Path] | None,
        typer.Option(help="Directory on another drive, to share the load; give it again for more."),
    ] = None,
    encrypt: Annotated[
        bool,
        typer.Option("--encrypt", help="Seal what it holds; the key is made where it is missing."),
    ] = False,
    key_file: KeyFileOption = None,
    passphrase_file: PassphraseOption = None,
    keyring: KeyringOption = None,
) -> None:
    """Make an empty store."""
    key = key_source(key_file, passphrase_file, keyring)
    if encrypt:
        key = given_key(key, "an encrypted store needs a key")
    Store.create(directory, store_bytes(size), drive or (), key)
    sealed = "" if key is None else f", encrypted by {CIPHER}: without its key it is lost"
    print(f"{directory}: a store of {format_bytes(store_bytes(size))}{sealed}")


def ls(*, store: _Directory, as_json: _Json = False) -> None:
    """List what is stored, what was used last first."""
    with Store(store, key=WithoutKey()) as opened:
        found = chains(opened.database)
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=2))
        return
    for one in found:
        pinned = ", pinned" if one.is_pinned else ""
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.last))
        print(
            f"{one.name}  {one.tokens:>8} tokens  used {used}, {one.hits:.1f} hits, "
            f"model {one.namespace}{pinned}"
        )


def stats(*, store: _Directory, as_json: _Json = False) -> None:
    """Say what a store holds and what it takes."""
    with Store(store, key=WithoutKey()) as opened:
        found = opened.statistics()
        if opened.places.cipher:
            rate = CipherRate.measured()
            found |= {
                "seal_gigabytes_per_second": round(rate.seal / 1e9, 2),
                "open_gigabytes_per_second": round(rate.open / 1e9, 2),
            }
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        shown = format_bytes(value) if name.endswith("_bytes") else f"{value}"
        print(f"{name.replace('_', ' '):>16}  {shown}")


def verify(
    *,
    store: _Directory,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Read and compare every row, not just what is said of it."),
    ] = False,
    key_file: KeyFileOption = None,
    passphrase_file: PassphraseOption = None,
    keyring: KeyringOption = None,
    as_json: _Json = False,
) -> None:
    """Compare what is stored with its checksums; what is wrong is not used any more."""
    console = error_console()
    with Store(store, key=key_source(key_file, passphrase_file, keyring)) as opened:
        count = int(opened.statistics()["chunks"])
        with reading_view(console).stage("verify", count * CHUNK_TOKENS) as advance:
            found = opened.verify(
                Parts.ALL if deep else Parts.SHEETS, lambda done, _: advance(done * CHUNK_TOKENS)
            )
        opened.room.collect()
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        print(f"{found.chunks} chunks, {format_bytes(found.byte_count)} read, {found.wrong} wrong")


def gc(*, store: _Directory) -> None:
    """Free what ended processes and wrong chunks hold."""
    with Store(store, key=WithoutKey()) as opened:
        print(f"{opened.room.collect()} chunks freed")


def pin(name: _Name, *, store: _Directory) -> None:
    """Keep a stored prompt where room is short."""
    _changed(store, lambda opened: pin_chunks(opened.database, name, 1), "pinned")


def unpin(name: _Name, *, store: _Directory) -> None:
    """Let a pinned prompt go again where room is short."""
    _changed(store, lambda opened: pin_chunks(opened.database, name, 0), "not pinned any more")


def rm(name: _Name, *, store: _Directory) -> None:
    """Remove a stored prompt, but for what others begin with too."""
    _changed(store, lambda opened: opened.remove(name), "removed")


def _changed(directory: Path, change: Callable[[Store], int], what: str) -> None:
    with Store(directory, key=WithoutKey()) as opened:
        count = change(opened)
    print(f"{count} chunk{'s' * (count != 1)} {what}")


COMMANDS = (init, ls, stats, verify, gc, pin, unpin, rm, rekey, forget)
