# SPDX-License-Identifier: Apache-2.0
"""Fetches a model of the hub in a process of its own, which a signal to its parent can end.

Run by its path with `REPOSITORY REVISION CACHE PATTERN...`; one JSON object says what came of it.
"""

from __future__ import annotations

import json
import sys
from enum import StrEnum


class Came(StrEnum):
    """What comes of a fetch, as the object's only name says it."""

    FOLDER = "folder"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    FAILED = "failed"


def main() -> None:
    """Fetch, and write the folder, or why there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repository, revision, cache, *patterns = sys.argv[1:]
    try:
        said = snapshot_download(
            repository, revision=revision, cache_dir=cache, allow_patterns=patterns
        )
        came = Came.FOLDER
    except LocalEntryNotFoundError as error:
        came, said = Came.UNREACHABLE, str(error)
    except (HFValidationError, HfHubHTTPError) as error:
        came, said = Came.REFUSED, str(error)
    except Exception as error:
        came, said = Came.FAILED, f"{type(error).__name__}: {error}"
    print(json.dumps({came: said}))


if __name__ == "__main__":
    main()
