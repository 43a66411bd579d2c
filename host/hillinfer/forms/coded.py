# SPDX-License-Identifier: Apache-2.0
"""The form that has codes of every key and value in memory: precision by weight.

Each token of an answer attends to exact rows for the best of what it selects, and to codes for the
others, so few rows are read. Nothing is dropped.
"""

from __future__ import annotations

from typing import Any

import torch

from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.errors import SettingsError
from hillinfer.forms.form import DocumentStates, Form, FormRates, FormSeconds, MadeForm
from hillinfer.forms.shadowed import MadeShadows
from hillinfer.hf.attach import Attachment
from hillinfer.model_shape import ModelShape
from hillinfer.shadow.store import shadow_bytes
from hillinfer.shadow.values import slot_bytes
from hillinfer_model.step_need import ExactShare, step_need


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
                "attach with exact below 1, like exact=0.1, and shadow int8 or int4"
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
        share = ExactShare(
            settings.importance_rate,
            settings.exact_share,
            settings.exact_floor,
            settings.kept_tokens,
        )
        spec = kernel_spec(shape, settings)
        need = step_need(spec, settings.scope, shape.layers, tokens, share)
        reading = need.exact_row_bytes / rates.tier_bytes
        return FormSeconds(reading, rates.token_seconds + reading)
