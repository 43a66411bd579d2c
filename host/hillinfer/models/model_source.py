# SPDX-License-Identifier: Apache-2.0
"""From what a user types after `--model` to files on this machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hillinfer.models.errors import ModelError
from hillinfer.models.hub_model import hub_model
from hillinfer.models.model_files import CONFIG, read_config
from hillinfer.models.registry_model import REGISTRY_MODELS

_GGUF = ".gguf"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ModelSource:
    """Files of one model.

    Parameters
    ----------
    name
        As the user named it.
    folder
        Folder with config, tokenizer and weights, or the one that the GGUF file lies in.
    gguf_file
        Name of the GGUF file in `folder`; None for an ordinary folder.
    commit
        Of a model of the hub; None for any other.
    """

    name: str
    folder: Path
    gguf_file: str | None = None
    commit: str | None = None

    @classmethod
    def locate(cls, name: str, say: Callable[[str], None]) -> ModelSource:
        """Find a registry model, a folder, a GGUF file or a model of the hub, in this order.

        Registry and hub models are fetched where they are not on this machine yet.

        Parameters
        ----------
        name
            Registry name, path, or `organisation/name` on the hub, with `@` and a commit, branch
            or tag where it is not to be the newest.
        say
            Called with one line before each step that takes time.

        Raises
        ------
        ModelError
            Where nothing of that name is found, or what is found is no model.
        FetchError
            Where the registry model cannot be fetched.
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
        _check_model_type(found.folder)
        return cls(name, found.folder, commit=found.commit)

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
