# SPDX-License-Identifier: Apache-2.0
"""The form that has key shadows and the rows that are hit most in memory; it drops nothing.

Which rows those are is learned by reading some of the document's own tokens again, each of which
selects. What it misses comes into the engine's hot pools, where it lies packed; an answer reads
from the store what it selects beside.
"""

from __future__ import annotations

from typing import Any

from hillinfer.errors import SettingsError
from hillinfer.forms.form import DocumentStates, FormRates, FormSeconds, MadeForm
from hillinfer.forms.shadowed import ShadowedForm
from hillinfer.generate.answering import Generation
from hillinfer.hf.attach import Attachment
from hillinfer.model_shape import ModelShape
from hillinfer.reuse.stored_prompts import StoredPrompts

# Its last tokens stand nearest to what is asked behind it.
_READ_AGAIN = 64


class LeadForm(ShadowedForm):
    """Keeps a document open in the engine, with a share of its rows in the hot pools at first.

    Pools are the engine's: rows that others hit more often take their places.

    Parameters
    ----------
    attachment, prompts
        As in `ShadowedForm`.
    share
        Of the rows, above 0 and up to 1.

    Raises
    ------
    SettingsError
        Where the share is none.
    """

    def __init__(self, attachment: Attachment, prompts: StoredPrompts, share: float) -> None:
        if not 0 < share <= 1:
            raise SettingsError(f"lead={share} is no share above 0 and up to 1")
        super().__init__(attachment, prompts)
        self._share = share

    @property
    def name(self) -> str:
        """Like `lead-0.1`."""
        return f"lead-{self._share:g}"

    def byte_count(self, shape: ModelShape, tokens: int) -> int:
        """Return the bytes of shadows, and of the share of rows where pools have room for it."""
        return super().byte_count(shape, tokens) + int(self._share * shape.token_bytes * tokens)

    def make(self, model: Any, states: DocumentStates) -> MadeForm:
        """Open the stored document, and have its most-hit rows come; otherwise as `ShadowedForm`.

        Tokens are read until so many rows were missed as the share says, 64 of them at most.
        """
        made = super().make(model, states)
        try:
            self._bring(model, made, states)
        except BaseException:
            made.close()
            raise
        return made

    def seconds(self, rates: FormRates, shape: ModelShape, tokens: int) -> FormSeconds:
        """Return the time to read what is selected beside the share of rows that is there."""
        found = super().seconds(rates, shape, tokens)
        missed = max(0.0, 1 - self._share / self._attachment.settings.importance_rate)
        reading = missed * found.opening
        return FormSeconds(reading, rates.token_seconds + reading)

    def _bring(self, model: Any, made: MadeForm, states: DocumentStates) -> None:
        opened = made.open()
        try:
            shape = ModelShape.from_config(model.config, model.dtype)
            most = self._share * shape.layers * states.tokens
            before = opened.cache.statistics().cold_rows_read
            generation = Generation(model, opened.cache)
            for token in states.ids[-_READ_AGAIN:]:
                if opened.cache.statistics().cold_rows_read - before >= most:
                    return
                generation.step(token)
        finally:
            opened.close()
