# SPDX-License-Identifier: Apache-2.0
"""Keys and values of rows, as attention computes with them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.counters import Counters
from hillinfer.storage.row_layout import RowLayout


class RowStates:
    """Brings rows to a model's device and takes keys and values out of them.

    Parameters
    ----------
    layout
        Says what is in a row.
    counters
        Where copies to the model's device are counted.
    """

    def __init__(self, layout: RowLayout, counters: Counters) -> None:
        self._layout = layout
        self._counters = counters

    def __call__(
        self, rows: NDArray[np.uint8], like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of rows in the type and on the device of a tensor.

        Parameters
        ----------
        rows
            uint8 (rows, row_bytes).
        like
            The tensor.

        Returns
        -------
        Keys and values, (kv_heads, rows, head_dim) each.
        """
        return self.split(self.bring(rows, like), like)

    def bring(self, rows: NDArray[np.uint8], like: torch.Tensor) -> torch.Tensor:
        """Return rows on the device of a tensor; on the processor they are those given."""
        tensor = torch.from_numpy(rows).to(like.device)
        if like.device.type != "cpu":
            self._counters.host_to_device_bytes += tensor.numel()
        return tensor

    def split(self, rows: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of rows that are on the model's device; see the call."""
        return (
            self._layout.keys(rows).transpose(0, 1).to(like.dtype),
            self._layout.values(rows).transpose(0, 1).to(like.dtype),
        )


def compute_type(query: torch.Tensor) -> torch.dtype:
    """Attention computes in the model's type, but FP16 kernels are slow and coarse on a CPU."""
    if query.dtype == torch.float16 and query.device.type == "cpu":
        return torch.float32
    return query.dtype
