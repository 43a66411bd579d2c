# SPDX-License-Identifier: Apache-2.0
"""How the memory is divided that copies to and from a GPU go through."""

from __future__ import annotations

from dataclasses import dataclass

from hillinfer.model_shape import ModelShape
from hillinfer.storage.aligned_buffer import PAGE_BYTES, round_up

# One is filled while another is copied, for the layer at hand and for the one ahead.
ROW_BUFFERS = 4
QUERY_BUFFERS = 4
_QUERY_ITEM_BYTES = 4
_CACHE_LINE = 64


@dataclass(frozen=True)
class StagingPlan:
    """Buffers of rows on their way to a GPU, and of rows and queries on their way from it.

    Parameters
    ----------
    buffer_rows
        Rows of each of `ROW_BUFFERS` buffers.
    arriving_rows
        New tokens' rows that may be under way at a time.
    row_bytes, query_bytes
        Of one.
    """

    buffer_rows: int
    arriving_rows: int
    row_bytes: int
    query_bytes: int

    @classmethod
    def of(cls, shape: ModelShape, byte_count: int) -> StagingPlan:
        """Divide the whole pages of so many bytes, or as few as one row in each buffer takes.

        Parameters
        ----------
        shape
            The model's.
        byte_count
            What there is.
        """
        query = round_up(shape.query_heads * shape.head_dim * _QUERY_ITEM_BYTES, _CACHE_LINE)
        pages = byte_count // PAGE_BYTES * PAGE_BYTES
        rows = (pages - QUERY_BUFFERS * query) // shape.row_bytes
        # One for each layer of a step, where that leaves most of it to the buffers.
        arriving = max(1, min(shape.layers, rows // 4))
        return cls(max(1, (rows - arriving) // ROW_BUFFERS), arriving, shape.row_bytes, query)

    @property
    def byte_count(self) -> int:
        """Bytes of all buffers, in whole pages."""
        rows = ROW_BUFFERS * self.buffer_rows + self.arriving_rows
        return round_up(rows * self.row_bytes + QUERY_BUFFERS * self.query_bytes, PAGE_BYTES)
