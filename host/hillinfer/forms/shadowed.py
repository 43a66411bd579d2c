# SPDX-License-Identifier: Apache-2.0
"""Forms of HillInfer's own, in an engine: key shadows in memory, and rows where the store has them.

Nothing is dropped. A document's shadows and checksums are read once; each answer then reads the
rows that it selects. Beside shadows, the rows that are hit most may be hot, or codes of all values
in memory: then an answer attends to exact rows for the best of what it selects, and to codes for
the others.
"""

from __future__ import annotations

from typing import Any

import torch

from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.errors import CacheUseError, SettingsError
from hillinfer.forms.form import (
    DocumentStates,
    Form,
    FormRates,
    FormSeconds,
    MadeForm,
    OpenedForm,
)
from hillinfer.generate.answering import Generation
from hillinfer.hf.attach import Attachment
from hillinfer.hf.cache import HillInferCache
from hillinfer.hf.stored_cache import StoredCache
from hillinfer.model_shape import ModelShape
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.shadow.store import shadow_bytes
from hillinfer.shadow.values import slot_bytes
from hillinfer_model.step_need import step_need

# --- Key shadows ---


class ShadowedForm(Form):
    """Keeps a document open in the engine; each opening is a fork, which reads and copies nothing.

    Parameters
    ----------
    attachment
        Of the model that answers; its settings say how shadows are coded and what is selected. Its
        budget holds the shadows of all documents that are kept so.
    prompts
        The store, as that model uses it; open as long as what is made is.
    """

    selects = True
    lies_in_engine = True
    reads_states = False

    def __init__(self, attachment: Attachment, prompts: StoredPrompts) -> None:
        self._attachment, self._prompts = attachment, prompts

    @property
    def name(self) -> str:
        """Like `shadow-int4`."""
        return f"shadow-{self._attachment.settings.key_mode}"

    def byte_count(self, shape: ModelShape, tokens: int) -> int:
        """Return the bytes of the shadows of all segments, the open one too, in every layer.

        What the engine keeps beside, like probe tokens, is some hundredths more and not in it.
        """
        spec = kernel_spec(shape, self._attachment.settings)
        return shape.layers * -(-tokens // spec.segment_tokens) * shadow_bytes(spec)

    def make(self, model: Any, states: DocumentStates) -> MadeForm:
        """Open the stored document; of the states only the token numbers are looked at.

        Raises
        ------
        CacheUseError
            Where the store has less of it than the states.
        BudgetError
            Where the attachment's budget has no room for its shadows.
        """
        cache = self._attachment.new_cache(expected_tokens=max(1, states.tokens))
        # As in `stored_states`: two tokens that nobody asks for.
        ids = [*states.ids, 0, 0]
        found = 0
        if isinstance(cache, StoredCache):
            # So what comes behind it is read in the soonest way, and stored, as behind any prefix.
            found = cache.look_up(torch.tensor([ids]))
        found = found or self._prompts.fill(cache, ids).found_tokens
        if found < states.tokens:
            cache.close()
            raise CacheUseError(
                f"the store has {found} of the document's {states.tokens} tokens: put it there "
                "again"
            )
        shape = ModelShape.from_config(model.config, model.dtype)
        return MadeShadows(cache, states.tokens, self.byte_count(shape, states.tokens))

    def seconds(self, rates: FormRates, shape: ModelShape, tokens: int) -> FormSeconds:
        """Return the time to read the selected rows, at the rate that single rows are read with."""
        rate = self._attachment.settings.importance_rate
        selected = rate * shape.token_bytes * tokens
        reading = selected / rates.tier_bytes
        return FormSeconds(reading, rates.token_seconds + reading)


class MadeShadows(MadeForm):
    """A document that is open in an engine.

    Parameters
    ----------
    cache
        Of all its tokens, which this closes.
    tokens, byte_count
        Of the document, and what it takes.
    """

    def __init__(self, cache: HillInferCache, tokens: int, byte_count: int) -> None:
        super().__init__(tokens)
        self._cache, self._byte_count = cache, byte_count

    @property
    def byte_count(self) -> int:
        """Bytes of what it keeps in memory."""
        return self._byte_count

    @property
    def cache(self) -> HillInferCache:
        """What is open there."""
        return self._cache

    def open(self) -> OpenedForm:
        """Return a fork, which reads and copies nothing."""
        return OpenedForm(self._cache.fork())

    def open_for(self, tokens: int, sequences: int) -> OpenedForm:
        """Return a fork that the engine makes room for, and counts, as for a cache of its own."""
        return OpenedForm(self._cache.fork_for(tokens, sequences))

    def close(self) -> None:
        """Close the cache; forks of it stay."""
        self._cache.close()


# --- Key shadows, and the rows that are hit most ---

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


# --- Codes of keys and values ---


class CodedForm(Form):
    """Keeps a document open in an engine that codes values beside keys; an opening is a fork.

    The engine has rows of its own on its drive, and those of the store stay. Codes are as many as
    its budget has room for: what is not there is read as a row and coded.

    Parameters
    ----------
    attachment
        Of the model that answers, with `exact` below 1: the share of selected tokens whose rows are
        attended to. Its budget holds codes and shadows of all documents that are kept so.

    Raises
    ------
    SettingsError
        Where the attachment codes no token.
    """

    selects = True
    lies_in_engine = True

    def __init__(self, attachment: Attachment) -> None:
        settings = attachment.settings
        if not settings.has_coded_tokens:
            raise SettingsError(
                f"exact={settings.exact_share} with shadow {settings.key_mode} codes no token: "
                "attach with exact below alpha, like exact=0.02, and shadow int8 or int4"
            )
        self._attachment = attachment

    @property
    def name(self) -> str:
        """Like `coded-int4`."""
        return f"coded-{self._attachment.settings.key_mode}"

    def byte_count(self, shape: ModelShape, tokens: int) -> int:
        """Return the bytes of all shadows, and of value codes of full segments.

        What the engine keeps beside is some hundredths more and not in it.
        """
        spec = kernel_spec(shape, self._attachment.settings)
        segments, full = -(-tokens // spec.segment_tokens), tokens // spec.segment_tokens
        codes = full * spec.segment_tokens * slot_bytes(spec)
        return shape.layers * (segments * shadow_bytes(spec) + codes)

    def make(self, model: Any, states: DocumentStates) -> MadeForm:
        """Give the states to the engine, which codes them and writes rows to its drive.

        Raises
        ------
        BudgetError
            Where the attachment's budget has no room.
        """
        shape = ModelShape.from_config(model.config, model.dtype)
        cache = self._attachment.new_cache()
        size = kernel_spec(shape, self._attachment.settings).segment_tokens
        try:
            for start in range(0, states.tokens, size):
                part = slice(start, min(start + size, states.tokens))
                cache.fill(
                    torch.tensor([states.ids[part]]),
                    [keys[None, :, part] for keys, _ in states.layers],
                    [values[None, :, part] for _, values in states.layers],
                )
        except BaseException:
            cache.close()
            raise
        return MadeShadows(cache, states.tokens, self.byte_count(shape, states.tokens))

    def seconds(self, rates: FormRates, shape: ModelShape, tokens: int) -> FormSeconds:
        """Return the time to read the exact rows, at the rate that single rows are read with."""
        settings = self._attachment.settings
        spec = kernel_spec(shape, settings)
        need = step_need(spec, settings.scope, shape.layers, tokens, settings.step_share)
        reading = need.exact_row_bytes / rates.tier_bytes
        return FormSeconds(reading, rates.token_seconds + reading)
