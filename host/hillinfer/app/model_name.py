# SPDX-License-Identifier: Apache-2.0
"""Names of the latency models that β can be solved from."""

from __future__ import annotations

from enum import StrEnum


class ModelName(StrEnum):
    """What `--beta auto` minimises; it changes speed alone."""

    SCORES_THEN_ROWS = "scores_then_rows"
    PARALLEL = "parallel"
    TWO_LINKS = "two_links"
