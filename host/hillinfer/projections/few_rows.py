# SPDX-License-Identifier: Apache-2.0
"""A linear layer for few rows: each weight is read once for all of them."""

from __future__ import annotations

import torch

from hillinfer.native.library import native_library
from hillinfer.native.signatures import FewRows

MOST_ROWS = 16
"""With more rows products take longer than reading weights, and torch's own are as good."""


def is_few(states: torch.Tensor, inputs: int) -> bool:
    """Return whether `few_rows` takes an input of a layer of so many inputs."""
    fits = states.shape[-1] == inputs and states.numel() <= MOST_ROWS * inputs
    return fits and states.dtype is torch.float32 and states.is_cpu


def few_rows(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, variant: int
) -> torch.Tensor:
    """Return a linear layer's outputs for few rows.

    What a row gets has the same bits whatever rows are beside it, and with any number of threads.
    torch's products of two to eight rows read weights several times over.

    Parameters
    ----------
    states
        float32 (..., inputs), of which `is_few` says so.
    weight, bias
        float32 (outputs, inputs), contiguous, and (outputs,) or None.
    variant
        Number of an instruction set of the native library.
    """
    outputs, inputs = weight.shape
    rows = states.reshape(-1, inputs)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty((*states.shape[:-1], outputs), dtype=torch.float32, device="cpu")
    given = FewRows(
        rows.data_ptr(),
        len(rows),
        rows.stride(0),
        inputs,
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        outputs,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    native_library().call("hillinfer_few_rows", variant, given)
    return out
