# SPDX-License-Identifier: Apache-2.0
"""From what a user types after `--model` to checked files; which models lie on this machine."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hillinfer.errors import ModelError, one_line
from hillinfer.models import hub_child
from hillinfer.models.json_files import (
    check_settings,
    check_size,
    check_tokenizer,
    read_json_object,
)
from hillinfer.models.registry_model import REGISTRY_MODELS
from hillinfer.models.weights import StoredTensor, stored_tensors
from hillinfer.system.processes import SessionGuard, end_session

# --- Models that lie on this machine ---

# What is looked through may be anything: neither a huge file nor a huge folder holds the list up.
_CONFIG_BYTES, _MOST_ENTRIES = 4 << 20, 4096
_WEIGHTS, _GGUF = ".safetensors", ".gguf"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class FoundModel:
    """A model that `--model` can name.

    `family` is the `model_type` of its config; GGUF for a file of that format, which is not looked
    into. `byte_count` is that of its weights; `where` it lies is for people.
    """

    name: str
    family: str
    byte_count: int
    where: str


def found_models(here: Path, variables: Mapping[str, str]) -> list[FoundModel]:
    """Return the models in the hub's cache, then those in a folder and in the folders of it.

    What cannot be read is left out: it is no model that could be used. The process's variables say
    where the hub's cache lies.
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


# --- Models of the hub ---

# No code and no pickles: nothing else is read.
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def hub_model(name: str, say: Callable[[str], None]) -> Path:
    """Return the folder of a model of the hub, which its commit names, fetched where it is missing.

    The name is `organisation/name`, with `@` and a commit, branch or tag where it is not to be
    `main`. `say` is called with a line before a step that takes time, and where the name says no
    commit. Raises ModelError where there is no such model or revision, or it cannot be fetched.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    repository, at, revision = name.partition("@")
    if at and not revision:
        raise ModelError(f"'{name}' names no revision: write a commit after the @")
    wanted = revision or "main"
    # Where `hillinfer models` looks, whatever was imported before.
    cache = hub_cache(os.environ)
    with one_line(f"fetch {name} from the hub", "check the network, try again"):
        try:
            folder = Path(
                snapshot_download(
                    repository,
                    revision=wanted,
                    allow_patterns=_FILES,
                    local_files_only=True,
                    cache_dir=cache,
                )
            )
            if not any(folder.glob("*.safetensors")):
                # Another program wanted the tokenizer alone, say.
                raise LocalEntryNotFoundError(f"{folder} has no weights")
        except (LocalEntryNotFoundError, HFValidationError):
            say(f"looking for {name} on the hub")
            folder = _fetched(name, (repository, wanted, str(cache.absolute()), *_FILES))
    commit = folder.name
    if not _COMMIT.fullmatch(commit):
        raise ModelError(f"the hub's cache gives {folder} for {name}, which is of no commit")
    if revision != commit:
        say(f"model: {name} is commit {commit} now; --model {repository}@{commit} keeps to it")
    return folder


def _fetched(name: str, asked: Sequence[str]) -> Path:
    """Return the folder of a model that a process of its own fetches, and that ends with this one.

    The hub's library fetches in threads, which no signal ends and Python's own end waits for.
    """
    from huggingface_hub import constants

    own = {"HF_HUB_OFFLINE": "1" if constants.HF_HUB_OFFLINE else "0"}
    if not sys.stderr.isatty():
        own["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    place = Path(tempfile.mkdtemp(prefix="hillinfer-"))
    guard = SessionGuard(place)
    try:
        process = subprocess.Popen(
            # Not isolated: the library may lie where a variable says.
            [sys.executable, "-P", hub_child.__file__, *asked],
            cwd=place, env=os.environ | own, start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            out, _ = process.communicate()
        except BaseException:
            # Whatever ends the waiting ends it: nobody would take what it brings.
            end_session(process, place)
            raise
    finally:
        guard.close()
    try:
        ((came, said),) = json.loads(out).items()
    except ValueError:
        came, said = hub_child.Came.FAILED, f"its process ended with {process.returncode}"
    if came == hub_child.Came.FOLDER:
        return Path(said)
    if came == hub_child.Came.UNREACHABLE:
        raise ModelError(
            f"'{name}' is neither a path nor in the local cache of the hub, and the hub "
            "cannot be reached: fetch it on a machine with a network and give its folder "
            "to --model"
        )
    if came == hub_child.Came.REFUSED:
        raise ModelError(f"'{name}' is neither a path nor a model that the hub gives out")
    raise ModelError(
        f"cannot fetch {name} from the hub: {' '.join(said.split())[:300]}; check the network, "
        "try again"
    )


# --- Model folders ---

CONFIG = "config.json"
_MIB = 1 << 20
_OBJECTS = {
    "generation_config.json": _MIB,
    # 65,536 tokens of sound, say, take 12 MiB here, and 2 MiB of added_tokens.json.
    "tokenizer_config.json": 16 * _MIB,
    "special_tokens_map.json": _MIB,
    "added_tokens.json": 4 * _MIB,
}
_CONFIG_VALUES = 1 << 16
# transformers looks through all special tokens for each of them.
_MOST_SPECIAL = 1 << 14
_SPECIAL = ("extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens")
# Read by libraries in native code, in seconds at these sizes; the largest of today has 33 MiB.
_OTHERS = {
    "vocab.json": 32 * _MIB,
    "vocab.txt": 32 * _MIB,
    "merges.txt": 32 * _MIB,
    "tokenizer.model": 32 * _MIB,
    "spiece.model": 32 * _MIB,
    "chat_template.jinja": _MIB,
}
_TOKENIZER = "tokenizer.json"
_ADAPTER = "adapter_config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """Return a model folder's `config.json`, its settings checked.

    Raises ModelError as `read_json_object` and `check_settings` say.
    """
    settings = read_json_object(folder / CONFIG, _CONFIG_BYTES, _CONFIG_VALUES)
    check_settings(settings, folder)
    return settings


def check_folder(folder: Path) -> dict[str, StoredTensor]:
    """Check the files that transformers will read and return what the weights' headers say.

    Raises ModelError for the first file that is not what it should be, or too few weights for the
    layers.
    """
    settings = read_config(folder)
    if (folder / _ADAPTER).exists():
        raise ModelError(
            f"{folder} holds an adapter beside the model ({_ADAPTER}): merge them into one model, "
            "or remove the adapter's files"
        )
    for name, most in _OBJECTS.items():
        if (folder / name).exists():
            _check_special(folder / name, read_json_object(folder / name, most))
    for name, most in _OTHERS.items():
        if (folder / name).exists():
            check_size(folder / name, most)
    if (folder / _TOKENIZER).exists():
        check_tokenizer(folder / _TOKENIZER)
    templates = folder / "additional_chat_templates"
    for file in sorted(templates.iterdir()) if templates.is_dir() else ():
        check_size(file, _MIB)
    tensors = stored_tensors(folder)
    layers = settings.get("num_hidden_layers")
    if layers is not None and layers > len(tensors):
        raise ModelError(
            f"{folder} has num_hidden_layers={layers} in its config and {len(tensors)} tensors in "
            "its weights: they are not of one model, get it anew"
        )
    return tensors


def _check_special(file: Path, settings: dict[str, Any]) -> None:
    listed = [one for name in _SPECIAL if isinstance(one := settings.get(name), list | dict)]
    found = sum(map(len, listed)) + sum(name.endswith("_token") for name in settings)
    if found > _MOST_SPECIAL:
        raise ModelError(
            f"{file} has {found} special tokens, and a model has {_MOST_SPECIAL} at most: it is "
            "not what it should be, get the model anew"
        )


# --- What `--model` names ---

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ModelSource:
    """Files of one model.

    `name` is as the user named it; `folder` has config, tokenizer and weights, or the GGUF file,
    whose name there is `gguf_file`, None for an ordinary folder. `commit` is that of a model of the
    hub, None for any other.
    """

    name: str
    folder: Path
    gguf_file: str | None = None
    commit: str | None = None

    @classmethod
    def locate(cls, name: str, say: Callable[[str], None]) -> ModelSource:
        """Find a registry model, a folder, a GGUF file or a model of the hub, in this order.

        Registry and hub models are fetched where they are not on this machine yet. A name on the
        hub is `organisation/name`, with `@` and a commit, branch or tag where it is not to be the
        newest. `say` is called with one line before each step that takes time. Raises ModelError
        where nothing of that name is found, or what is found is no model, and FetchError where the
        registry model cannot be fetched.
        """
        if name in REGISTRY_MODELS:
            if Path(name).exists():
                say(f"model: {name} is the registry model; ./{name} is the folder here")
            return cls(name, REGISTRY_MODELS[name].fetch(say))
        path, is_folder, is_file = _place(name)
        if is_folder:
            _said_where(name, path, say)
            return cls._from_folder(name, path)
        if is_file:
            if path.suffix != _GGUF:
                raise ModelError(f"{name} is not a model: give a folder or a {_GGUF} file")
            return cls(name, path.parent, path.name)
        if _looks_like_a_path(name.partition("@")[0]):
            raise ModelError(f"there is no model at {name}: check the path after --model")
        if "/" not in name:
            raise ModelError(
                f"'{name}' is neither a folder, a {_GGUF} file nor a registry model "
                f"({', '.join(REGISTRY_MODELS)}); models of the hub are named organisation/name"
            )
        found = hub_model(name, say)
        _check_model_type(found)
        return cls(name, found, commit=found.name)

    @classmethod
    def _from_folder(cls, name: str, folder: Path) -> ModelSource:
        if (folder / CONFIG).exists():
            _check_model_type(folder)
            return cls(name, folder)
        files = sorted(file.name for file in folder.glob(f"*{_GGUF}"))
        if len(files) == 1:
            return cls(name, folder, files[0])
        if files:
            raise ModelError(f"{name} holds {len(files)} {_GGUF} files: name one of them")
        raise ModelError(f"{name} is not a model folder: it has no config.json")

    @property
    def path(self) -> Path:
        """The folder, or the GGUF file."""
        return self.folder / self.gguf_file if self.gguf_file else self.folder


def _place(name: str) -> tuple[Path, bool, bool]:
    """Return a name as a path, and whether a folder or a file is there."""
    try:
        # RuntimeError: the home of a user that is not there.
        path = Path(name).expanduser()
        return path, path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"cannot look at the model {name}: {reason}; check --model") from error


def _check_model_type(folder: Path) -> None:
    from transformers import CONFIG_MAPPING

    model_type = read_config(folder).get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"{folder} has the model type '{model_type!s:.60}', which transformers does not know: "
            "use a Llama, Mistral, Qwen2, Qwen3 or OPT model"
        )


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith(_GGUF) or name.count("/") > 1


def _said_where(name: str, folder: Path, say: Callable[[str], None]) -> None:
    """Say that a folder is used where its name could be a model's of the hub."""
    if _HUB_NAME.fullmatch(name):
        say(
            f"model: {name} is the folder {folder.absolute()}; the hub's model of that name is "
            f"{name}@main"
        )


def local_model(name: str) -> Path | None:
    """Return the folder or the file that holds a model, None for one that is fetched."""
    try:
        path = Path(name).expanduser()
        return path if name not in REGISTRY_MODELS and path.exists() else None
    except (OSError, RuntimeError, ValueError):
        # Whoever looks for the model says so.
        return None
