# SPDX-License-Identifier: Apache-2.0
"""Linear layers for few rows: each weight is read once for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hillinfer.kv.sequence import NUMBER_TYPES
from hillinfer.native.library import native_library
from hillinfer.native.signatures import FewRows

MOST_ROWS = 16
"""With more rows products take longer than reading weights, and torch's own are as good."""

FEW_ROWS_TYPES = (torch.float32, torch.bfloat16)
"""Of inputs, weights and outputs alike; sums are made in float32, and rounded once at their end."""

Weights = tuple[torch.Tensor, torch.Tensor | None]
"""(outputs, inputs) of one of `FEW_ROWS_TYPES`, contiguous, and a bias (outputs,) or None."""


def is_few(states: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether `few_rows` takes an input of a layer with such weights."""
    inputs = weight.shape[1]
    fits = states.shape[-1] == inputs and states.numel() <= MOST_ROWS * inputs
    return fits and states.is_cpu and states.dtype is weight.dtype in FEW_ROWS_TYPES


def few_rows(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, variant: int
) -> torch.Tensor:
    """Return a linear layer's outputs for few rows.

    What a row gets has the same bits whatever rows are beside it, and with any number of threads.
    torch's products of two to eight rows read weights several times over.

    Parameters
    ----------
    states
        (..., inputs), of which `is_few` says so.
    weight, bias
        As in `Weights`.
    variant
        Number of an instruction set of the native library.
    """
    return few_rows_of_each(states, [(weight, bias)], variant)[0]


def few_rows_of_each(
    states: torch.Tensor, layers: Sequence[Weights], variant: int
) -> list[torch.Tensor]:
    """Return the outputs of several layers of one input, each with the bits that it has alone.

    Threads share all of the layers at once, which takes less time than one layer after the other.
    Parameters as in `few_rows`.
    """
    inputs = states.shape[-1]
    rows = states.reshape(-1, inputs)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    count, shape, threads = len(rows), states.shape[:-1], torch.get_num_threads()
    address, stride, number_type = rows.data_ptr(), rows.stride(0), NUMBER_TYPES[rows.dtype]
    given, outputs = [], []
    for weight, bias in layers:
        width = len(weight)
        out = torch.empty((*shape, width), dtype=rows.dtype, device="cpu")
        outputs.append(out)
        own = weight.data_ptr(), None if bias is None else bias.data_ptr()
        rest = width, out.data_ptr(), threads, number_type
        given.append(FewRows(address, count, stride, inputs, *own, *rest))
    table = (FewRows * len(given))(*given)
    native_library().call("hillinfer_few_rows", variant, table, len(given))
    return outputs
