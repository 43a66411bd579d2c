# SPDX-License-Identifier: Apache-2.0
"""Models that lie on this machine: in the hub's cache, and in the current folder."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hillinfer.errors import ModelError
from hillinfer.models.json_files import read_json_object

# What is looked through may be anything: neither a huge file nor a huge folder holds the list up.
_CONFIG_BYTES, _MOST_ENTRIES = 4 << 20, 4096
_WEIGHTS, _GGUF = ".safetensors", ".gguf"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class FoundModel:
    """A model that `--model` can name.

    Parameters
    ----------
    name
        What to give to `--model`.
    family
        `model_type` of its config; GGUF for a file of that format, which is not looked into.
    byte_count
        Of its weights.
    where
        For people.
    """

    name: str
    family: str
    byte_count: int
    where: str


def found_models(here: Path, variables: Mapping[str, str]) -> list[FoundModel]:
    """Return the models in the hub's cache, then those in a folder and in the folders of it.

    What cannot be read is left out: it is no model that could be used.

    Parameters
    ----------
    here
        The folder.
    variables
        Of the process; they say where the hub's cache lies.
    """
    return [*_of_the_hub(hub_cache(variables)), *_of_a_folder(here)]


def hub_cache(variables: Mapping[str, str]) -> Path:
    """Return the folder that huggingface_hub keeps, as it finds it, without importing it."""
    # The second is the older name.
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if variables.get(name):
            return _expanded(variables[name])
    home = variables.get("HF_HOME")
    if not home:
        home = f"{variables.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return _expanded(home) / "hub"


def _expanded(path: str) -> Path:
    path = os.path.expandvars(path)
    try:
        return Path(path).expanduser()
    except RuntimeError:
        # Of a user who is none here, or a process without a home: then it is a folder's name.
        return Path(path)


def _of_the_hub(cache: Path) -> Iterator[FoundModel]:
    for repository in _entries(cache):
        kind, *names = repository.name.split("--")
        if kind != "models" or not names:
            continue
        for snapshot in _entries(repository / "snapshots"):
            if _COMMIT.fullmatch(snapshot.name):
                name = f"{'/'.join(names)}@{snapshot.name}"
                yield from _model(snapshot, name, "in the hub's cache")


def _of_a_folder(here: Path) -> Iterator[FoundModel]:
    for one in _entries(here):
        size = _file_bytes(one) if one.suffix == _GGUF else None
        if size is not None:
            yield FoundModel(f"./{one.name}", "GGUF", size, "a file here")
        else:
            yield from _model(one, f"./{one.name}", "a folder here")


def _file_bytes(file: Path) -> int | None:
    """Return how long an ordinary file is; None where it is none, or cannot be looked at."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _model(folder: Path, name: str, where: str) -> Iterator[FoundModel]:
    weights = [file for file in _entries(folder) if file.suffix == _WEIGHTS]
    if not weights:
        return
    try:
        config = read_json_object(folder / "config.json", _CONFIG_BYTES)
        size = sum(file.stat().st_size for file in weights)
    except (ModelError, OSError):
        return
    family = config.get("model_type")
    # Printed to a terminal: a name that is none could move its cursor.
    if isinstance(family, str) and re.fullmatch(r"[\w.-]{1,40}", family):
        yield FoundModel(name, family, size, where)


def _entries(folder: Path) -> list[Path]:
    """Return what lies in a folder, sorted; nothing where it cannot be looked into."""
    try:
        found = sorted(one for one in folder.iterdir() if one.name.isprintable())
    except OSError:
        return []
    return found[:_MOST_ENTRIES]
