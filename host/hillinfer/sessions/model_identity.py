# SPDX-License-Identifier: Apache-2.0
"""What sessions know of the model at hand."""

from __future__ import annotations

from typing import Any

from hillinfer.sessions.fingerprint import Fingerprint
from hillinfer.sessions.weights import weights_digest
from hillinfer_model.choices import KeyMode


class ModelIdentity:
    """Fingerprints of one loaded model; its weights are read at most once.

    Parameters
    ----------
    model
        A causal language model of transformers.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._weights: str | None = None

    def without_weights(self, shadow: KeyMode, tokenizer: Any = None) -> Fingerprint:
        """Return what is known at once; parameters as in `Fingerprint.of`."""
        return Fingerprint.of(self._model.config, self._model.dtype, shadow, tokenizer)

    def fingerprint(self, shadow: KeyMode, tokenizer: Any = None) -> Fingerprint:
        """Return the whole fingerprint; parameters as in `Fingerprint.of`."""
        if self._weights is None:
            self._weights = weights_digest(self._model)
        return self.without_weights(shadow, tokenizer).with_weights(self._weights)
