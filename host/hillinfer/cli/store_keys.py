# SPDX-License-Identifier: Apache-2.0
"""What store commands share: `--json`, options of the key; `store rekey` and `store forget`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from hillinfer.errors import SettingsError
from hillinfer.secrecy.key_sources import (
    KEY_FILE,
    KEYRING,
    OPTIONS,
    PASSPHRASE_FILE,
    KeySource,
    key_source,
)
from hillinfer.secrecy.key_table import KeyTable
from hillinfer.store.pool_files import StorePlaces
from hillinfer.store.store import Store

KeyFileOption = Annotated[
    Path | None,
    typer.Option("--key-file", envvar=KEY_FILE, help="File with the key of an encrypted store."),
]
PassphraseOption = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        envvar=PASSPHRASE_FILE,
        help="File with the passphrase of an encrypted store.",
    ),
]
KeyringOption = Annotated[
    str | None,
    typer.Option(
        "--keyring",
        envvar=KEYRING,
        help="Entry of the system's keyring with the key of an encrypted store.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
STORE_VARIABLE = "HILLINFER_STORE"
Directory = Annotated[
    Path, typer.Option("--store", envvar=STORE_VARIABLE, help="Directory of the store.")
]


def tell(told: Mapping[str, object], line: str, *, as_json: bool) -> None:
    """Print what a command did, as JSON or as a line."""
    print(json.dumps(dict(told), indent=2) if as_json else line)


def given_key(source: KeySource | None, why: str) -> KeySource:
    """Return what options name.

    Raises
    ------
    SettingsError
        Where they name nothing; `why` begins the line.
    """
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
    count = KeyTable.of_store(places.keys, places.cipher, places.pool, old).rewrap(new)
    line = f"{store}: {count} data key{'s' * (count != 1)} wrapped anew; the old key opens none"
    tell({"data_keys": count}, line, as_json=as_json)


def forget(
    *,
    store: Directory,
    salt: Annotated[
        str,
        typer.Option(envvar="HILLINFER_STORE_SALT", help="Whose; without it, what has none."),
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
