# SPDX-License-Identifier: Apache-2.0
"""The choice between exact and sparse reading of a question."""

from __future__ import annotations

from enum import StrEnum


class QuestionReading(StrEnum):
    """How the tokens after the document are read."""

    CHUNKS = "chunks"
    SINGLY = "singly"
