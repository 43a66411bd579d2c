# SPDX-License-Identifier: Apache-2.0
"""Models of the hub, each of one commit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hillinfer.models.errors import ModelError
from hillinfer.models.library_calls import one_line

# No code and no pickles: nothing else is read.
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubModel:
    """Files of a model of the hub.

    Parameters
    ----------
    folder
        Where they lie.
    commit
        Of which they are.
    """

    folder: Path
    commit: str


def hub_model(name: str, say: Callable[[str], None]) -> HubModel:
    """Return a model of the hub, from the hub's cache on this machine where it is there.

    Parameters
    ----------
    name
        `organisation/name`, with `@` and a commit, branch or tag where it is not to be `main`.
    say
        Called with a line before a step that takes time, and where the name says no commit.

    Raises
    ------
    ModelError
        Where there is no such model or revision, or it cannot be fetched.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repository, at, revision = name.partition("@")
    if at and not revision:
        raise ModelError(f"'{name}' names no revision: write a commit after the @")
    wanted = revision or "main"

    def snapshot(*, local: bool) -> Path:
        return Path(
            snapshot_download(
                repository, revision=wanted, allow_patterns=_FILES, local_files_only=local
            )
        )

    with one_line(f"fetch {name} from the hub", "check the network, try again"):
        try:
            folder = snapshot(local=True)
            if not any(folder.glob("*.safetensors")):
                # Another program wanted the tokenizer alone, say.
                raise LocalEntryNotFoundError(f"{folder} has no weights")
        except (LocalEntryNotFoundError, HFValidationError):
            say(f"looking for {name} on the hub")
            try:
                folder = snapshot(local=False)
            except LocalEntryNotFoundError as error:
                raise ModelError(
                    f"'{name}' is neither a path nor in the local cache of the hub, and the hub "
                    "cannot be reached: fetch it on a machine with a network and give its folder "
                    "to --model"
                ) from error
            except (HFValidationError, HfHubHTTPError) as error:
                raise ModelError(
                    f"'{name}' is neither a path nor a model that the hub gives out"
                ) from error
    commit = folder.name
    if not _COMMIT.fullmatch(commit):
        raise ModelError(f"the hub's cache gives {folder} for {name}, which is of no commit")
    if revision != commit:
        say(f"model: {name} is commit {commit} now; --model {repository}@{commit} keeps to it")
    return HubModel(folder, commit)
