# SPDX-License-Identifier: Apache-2.0
"""Errors about models that a user can act on."""

from hillinfer.errors import HillInferError


class ModelError(HillInferError):
    """A model is not where it was said to be, is not a model, or is of an unknown kind."""


class FetchError(HillInferError):
    """A registry model could not be fetched, or is not what it should be."""


class FitError(HillInferError):
    """Weights, activations, DRAM budget or cold pool do not fit this machine."""
