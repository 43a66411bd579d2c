# SPDX-License-Identifier: Apache-2.0
"""The one place where what transformers and its parts raise over a model's files becomes a line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hillinfer.errors import HillInferError

# --- Errors about models ---


class ModelError(HillInferError):
    """A model is not where it was said to be, is not a model, or is of an unknown kind."""


class FetchError(HillInferError):
    """A registry model could not be fetched, or is not what it should be."""


class FitError(HillInferError):
    """Weights, activations, DRAM budget or cold pool do not fit this machine."""


# --- Libraries' exceptions as one line ---

_MOST_LETTERS = 300
_NOT_OURS = (KeyboardInterrupt, SystemExit, GeneratorExit, HillInferError)


@contextmanager
def one_line(what: str, fix: str = "") -> Iterator[None]:
    """Turn whatever a library raises in a block into a ModelError that names it.

    Libraries raise anything over hostile files, and panics of those in Rust are no Exception.
    Interrupts and errors of HillInfer's own pass.

    Parameters
    ----------
    what
        What cannot be done, as it goes on after "cannot".
    fix
        What helps.
    """
    try:
        yield
    except _NOT_OURS:
        raise
    except BaseException as error:
        said = " ".join(str(error).split())
        if len(said) > _MOST_LETTERS:
            said = said[:_MOST_LETTERS] + " …"
        raise ModelError(
            f"cannot {what}: {type(error).__name__}: {said}" + (f"; {fix}" if fix else "")
        ) from error
