# SPDX-License-Identifier: Apache-2.0
"""Linear layers for few rows: each weight is read once for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hillinfer.native.library import native_library
from hillinfer.native.signatures import FewRows

MOST_ROWS = 16
"""With more rows products take longer than reading weights, and torch's own are as good."""

Weights = tuple[torch.Tensor, torch.Tensor | None]
"""float32 (outputs, inputs), contiguous, and a bias (outputs,) or None."""


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
    address, stride = rows.data_ptr(), rows.stride(0)
    given, outputs = [], []
    for weight, bias in layers:
        width = len(weight)
        out = torch.empty((*shape, width), dtype=torch.float32, device="cpu")
        outputs.append(out)
        own = weight.data_ptr(), None if bias is None else bias.data_ptr()
        given.append(FewRows(address, count, stride, inputs, *own, width, out.data_ptr(), threads))
    table = (FewRows * len(given))(*given)
    native_library().call("hillinfer_few_rows", variant, table, len(given))
    return outputs
