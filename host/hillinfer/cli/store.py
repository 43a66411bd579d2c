# SPDX-License-Identifier: Apache-2.0
"""`hillinfer store`: making a store, looking into it, and keeping it in order."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hillinfer.cli.console import error_console, reading_view
from hillinfer.cli.parsing import (
    STORE_VARIABLE,
    Directory,
    Json,
    KeyFileOption,
    KeyringOption,
    PassphraseOption,
    StoredName,
    checked_salt,
    tell,
    whole_bytes,
)
from hillinfer.drive.calls import DriveCalls
from hillinfer.errors import SettingsError, reason_of, way_out
from hillinfer.generate.run_report import StoreFacts
from hillinfer.secrecy.key_sources import OPTIONS, KeySource, WithoutKey, key_source
from hillinfer.secrecy.key_table import KeyTable
from hillinfer.secrecy.library import CIPHER, SecrecyError
from hillinfer.secrecy.pages import CipherRate
from hillinfer.store.eviction import (
    ADMISSIONS,
    DEFAULT_ADMISSION,
    DEFAULT_EVICTION,
    EVICTION_POLICIES,
    WriteBudget,
    make_admission,
    make_eviction_policy,
)
from hillinfer.store.keys import CHUNK_TOKENS, Reuse
from hillinfer.store.maintenance import Parts, chains
from hillinfer.store.maintenance import pin as pin_chunks
from hillinfer.store.pool_files import StoreError, StoreExistsError, StorePlaces
from hillinfer.store.store import Store
from hillinfer.store_namespaces import holdings
from hillinfer.store_rules import Maker, StoreRules, StoreRulesError
from hillinfer.values import choice, format_bytes

_NO_CAP = "none"
_Cap = Annotated[
    str | None,
    typer.Option(
        "--max-writes-per-day",
        help=f"Most that is written within 24 hours, like 1TB, so that the drive lasts; {_NO_CAP} "
        "lifts it.",
    ),
]


def store_bytes(size: str) -> int:
    """Return the bytes that `--store-size` names; SettingsError where it names none."""
    return whole_bytes(size, "--store-size like 200GB")


def named_by(context: typer.Context) -> str:
    """Return what named the store of a command: the option, or the variable."""
    source = context.get_parameter_source("store")
    return "--store" if source is None or source.name != "ENVIRONMENT" else STORE_VARIABLE


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
    raising
        Called with what would be a miss, and may raise it; None: failures are misses.
    named_by
        The option or the variable that named it.
    accept
        Engines whose rows are taken, too.
    """

    directory: Path
    size: int | None
    reuse: Reuse
    salt: bytes
    key: KeySource | None = None
    raising: Callable[[Exception], None] | None = None
    named_by: str = "--store"
    accept: tuple[Maker, ...] = ()

    @classmethod
    def of(
        cls,
        directory: Path | None,
        size: str | None,
        reuse: str,
        salt: str,
        key: KeySource | None = None,
        raising: Callable[[Exception], None] | None = None,
        named_by: str = "--store",
        accept: str | None = None,
    ) -> StoreUse | None:
        """Return what options mean, None where they name no store.

        Raises SettingsError where one of them means nothing.
        """
        way = choice("reuse", Reuse, reuse)
        others = () if accept is None else (choice("store-accept", Maker, accept),)
        if others and way is Reuse.EXACT:
            raise SettingsError(
                "--reuse exact gives the bits of an unbroken run, which rows of another engine do "
                "not have: leave --store-accept out"
            )
        if directory is None:
            return None
        amount = None if size is None else store_bytes(size)
        return cls(directory, amount, way, salt.encode(), key, raising, named_by, others)

    def opened(self, calls: DriveCalls | None = None) -> Store:
        """Return the store, reached through `calls`, made where there is none and a size was given.

        Raises StoreError where there is none, or it cannot be used, and SecrecyError where its key
        is missing, is another one, or does not belong there.
        """
        try:
            if self.size is not None and not Store.exists(self.directory):
                # Another process may be as quick.
                with suppress(StoreExistsError):
                    Store.create(self.directory, self.size, key=self.key)
            return Store(self.directory, raising=self.raising, calls=calls, key=self.key)
        except OSError as error:
            raise StoreError(
                f"the store {self.directory} cannot be used: {reason_of(error)}; "
                f"{way_out(error, 'choose another --store')}"
            ) from error


def opened_store(
    use: StoreUse | None, calls: DriveCalls | None, console: Console
) -> tuple[Store | None, StoreFacts | None]:
    """Return the store of a run, and what is to be said of one that fails.

    `use` is None for no store; `calls` is how its drives are reached, the operating system itself
    where None; `console` is told which it is. Raises StoreError where there is none, or failures
    are not to be misses, and SecrecyError as `StoreUse.opened` does.
    """
    if use is None:
        return None, None
    try:
        store = use.opened(calls)
    except (StoreError, StoreRulesError) as error:
        if use.raising is not None or not Store.exists(use.directory):
            raise
        console.print(f"hillinfer: warning: the store is not used: {error}")
        return None, StoreFacts(0, directory=str(use.directory), failure=str(error))
    console.print(f"store: {use.directory}, named by {use.named_by}")
    return store, None


# --- Making a store, and its rules ---


def init(
    directory: Annotated[Path, typer.Argument(help="Made where it is missing.")],
    *,
    size: Annotated[str, typer.Option("--size", help="What it may take in all, like 200GB.")],
    drive: Annotated[
        list[Path] | None,
        typer.Option(help="Directory on another drive, to share the load; give it again for more."),
    ] = None,
    max_writes_per_day: _Cap = None,
    encrypt: Annotated[
        bool,
        typer.Option("--encrypt", help="Seal what it holds; the key is made where it is missing."),
    ] = False,
    key_file: KeyFileOption = None,
    passphrase_file: PassphraseOption = None,
    keyring: KeyringOption = None,
    as_json: Json = False,
) -> None:
    """Make an empty store."""
    rules = _changed_rules(StoreRules(), max_writes_per_day, None, None)
    key = key_source(key_file, passphrase_file, keyring)
    if encrypt:
        key = given_key(key, "an encrypted store needs a key")
    Store.create(directory, store_bytes(size), drive or (), key)
    if rules != StoreRules():
        rules.write(directory)
    cipher = None if key is None else CIPHER
    told = {
        "directory": str(directory),
        "size_bytes": store_bytes(size),
        "cipher": cipher,
        **asdict(rules),
    }
    sealed = "" if cipher is None else f", encrypted by {cipher}: without its key it is lost"
    line = f"{directory}: a store of {format_bytes(store_bytes(size))}{sealed}"
    tell(told, line, as_json=as_json)


def set_(
    *,
    store: Directory,
    max_writes_per_day: _Cap = None,
    eviction: Annotated[
        str | None,
        typer.Option(help=f"What goes where room is short: {', '.join(EVICTION_POLICIES)}."),
    ] = None,
    admission: Annotated[
        str | None, typer.Option(help=f"What is stored: {', '.join(ADMISSIONS)}.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Change the rules of a store, or say them; who has it open keeps to the old ones."""
    places = StorePlaces.read(store)
    before = StoreRules.read(places.directory)
    rules = _changed_rules(before, max_writes_per_day, eviction, admission)
    if rules != before:
        rules.write(places.directory)
    cap = rules.max_writes_per_day
    told = {
        "max_writes_per_day": cap,
        "eviction": rules.eviction or DEFAULT_EVICTION,
        "admission": rules.admission or DEFAULT_ADMISSION,
    }
    written = "no cap on writes" if cap is None else f"at most {format_bytes(cap)} written a day"
    tell(
        told,
        f"{written}; eviction {told['eviction']}, admission {told['admission']}",
        as_json=as_json,
    )


def _changed_rules(
    rules: StoreRules, cap: str | None, eviction: str | None, admission: str | None
) -> StoreRules:
    """Return rules with what options name; SettingsError where they name nothing."""
    if cap == _NO_CAP:
        rules = replace(rules, max_writes_per_day=None)
    elif cap is not None:
        most = whole_bytes(cap, f"--max-writes-per-day like 1TB, or {_NO_CAP}")
        rules = replace(rules, max_writes_per_day=most)
    if eviction is not None:
        make_eviction_policy(eviction)
        rules = replace(rules, eviction=eviction)
    if admission is not None:
        policy = make_eviction_policy(rules.eviction or DEFAULT_EVICTION)
        make_admission(admission, 1, policy, WriteBudget())
        rules = replace(rules, admission=admission)
    return rules


# --- Looking into it ---


def ls(*, store: Directory, as_json: Json = False) -> None:
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


def stats(*, store: Directory, as_json: Json = False) -> None:
    """Say what a store holds and what it takes; hillinfer-bench store-picture draws the JSON."""
    with Store(store, key=WithoutKey()) as opened:
        found = opened.statistics()
        if opened.places.cipher:
            rate = CipherRate.measured()
            found |= {
                "seal_gigabytes_per_second": round(rate.seal / 1e9, 2),
                "open_gigabytes_per_second": round(rate.open / 1e9, 2),
            }
        held = holdings(opened.database, opened.places.tag_bytes)
        rules, modes = opened.rules, [file.io_mode.value for file in opened.files]
    if as_json:
        told = {**found, "io_modes": modes, "namespaces": [asdict(one) for one in held]}
        print(json.dumps({"directory": str(store), **told, "rules": asdict(rules)}, indent=2))
        return
    for name, value in found.items():
        shown = format_bytes(value) if name.endswith("_bytes") else f"{value}"
        print(f"{name.replace('_', ' '):>17}  {shown}")
    if rules.max_writes_per_day is not None:
        print(f"{'most a day':>17}  {format_bytes(rules.max_writes_per_day)}")


def verify(
    *,
    store: Directory,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Read and compare every row, not just what is said of it."),
    ] = False,
    key_file: KeyFileOption = None,
    passphrase_file: PassphraseOption = None,
    keyring: KeyringOption = None,
    as_json: Json = False,
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
    tell(
        asdict(found),
        f"{found.chunks} chunks, {format_bytes(found.byte_count)} read, {found.wrong} wrong",
        as_json=as_json,
    )


# --- Keeping it in order ---


def gc(*, store: Directory, as_json: Json = False) -> None:
    """Free what ended processes and wrong chunks hold."""
    with Store(store, key=WithoutKey()) as opened:
        count = opened.room.collect()
    tell({"freed_chunks": count}, f"{count} chunks freed", as_json=as_json)


def pin(name: StoredName, *, store: Directory, as_json: Json = False) -> None:
    """Keep a stored prompt where room is short."""
    _changed(store, lambda opened: pin_chunks(opened.database, name, 1), "pinned", as_json=as_json)


def unpin(name: StoredName, *, store: Directory, as_json: Json = False) -> None:
    """Let a pinned prompt go again where room is short."""
    _changed(
        store,
        lambda opened: pin_chunks(opened.database, name, 0),
        "not pinned any more",
        as_json=as_json,
    )


def rm(name: StoredName, *, store: Directory, as_json: Json = False) -> None:
    """Remove a stored prompt, but for what others begin with too."""
    _changed(store, lambda opened: opened.remove(name), "removed", as_json=as_json)


def _changed(directory: Path, change: Callable[[Store], int], what: str, *, as_json: bool) -> None:
    with Store(directory, key=WithoutKey()) as opened:
        count = change(opened)
    tell(
        {"chunks": count, "now": what}, f"{count} chunk{'s' * (count != 1)} {what}", as_json=as_json
    )


# --- Its key ---


def given_key(source: KeySource | None, why: str) -> KeySource:
    """Return what options name; SettingsError, which `why` begins, where they name nothing."""
    if source is None:
        raise SettingsError(f"{why}: give {OPTIONS}")
    return source


def rekey(
    *,
    store: Directory,
    key_file: KeyFileOption = None,
    passphrase_file: PassphraseOption = None,
    keyring: KeyringOption = None,
    new_key_file: Annotated[
        Path | None, typer.Option(help="The new key; made where it is missing.")
    ] = None,
    new_passphrase_file: Annotated[
        Path | None, typer.Option(help="File with the new passphrase.")
    ] = None,
    new_keyring: Annotated[
        str | None, typer.Option(help="Entry of the keyring; made where it is missing.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Give an encrypted store another key; what is stored stays as it is."""
    new = key_source(new_key_file, new_passphrase_file, new_keyring)
    if new is None:
        raise SettingsError(
            "rekey needs a new key: give --new-key-file, --new-passphrase-file or --new-keyring"
        )
    old = given_key(
        key_source(key_file, passphrase_file, keyring), "rekey needs the key of the store"
    )
    places = StorePlaces.read(store)
    parts = places.keys, places.cipher, places.pool
    table = KeyTable.of_store(*parts, old)
    with suppress(SecrecyError):
        # One that is missing is made below.
        KeyTable.of_store(*parts, new)
        raise SettingsError(
            f"the new key is the one that {store} has, and would go on opening it: give another one"
        )
    count = table.rewrap(new)
    line = f"{store}: {count} data key{'s' * (count != 1)} wrapped anew; the old key opens none"
    tell({"data_keys": count}, line, as_json=as_json)


def forget(
    *,
    store: Directory,
    salt: Annotated[
        str,
        typer.Option(
            envvar="HILLINFER_STORE_SALT",
            callback=checked_salt,
            help="Whose; without it, what has none.",
        ),
    ] = "",
    key_file: KeyFileOption = None,
    passphrase_file: PassphraseOption = None,
    keyring: KeyringOption = None,
    as_json: Json = False,
) -> None:
    """Throw away the key of all that one salt has stored: nobody can read it any more."""
    source = key_source(key_file, passphrase_file, keyring)
    with Store(store, key=given_key(source, "forget needs the key of the store")) as opened:
        count = opened.forget(salt.encode())
    tell(
        {"forgotten_chunks": count},
        f"{count} chunk{'s' * (count != 1)} forgotten",
        as_json=as_json,
    )


COMMANDS = (init, set_, ls, stats, verify, gc, pin, unpin, rm, rekey, forget)
