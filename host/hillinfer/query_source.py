# SPDX-License-Identifier: Apache-2.0
"""Which query chooses a layer's tokens."""

from __future__ import annotations

from enum import StrEnum


class QuerySource(StrEnum):
    """The query that tokens are scored with; it changes which tokens are selected.

    `true` is the layer's own, known when its attention begins; `predicted` is made from the input
    of the layer before it, so that scoring and reading overlap with that layer's computation
    (HillInfer section 4.3). `auto` takes what a table says for the model's family.
    """

    AUTO = "auto"
    TRUE = "true"
    PREDICTED = "predicted"
