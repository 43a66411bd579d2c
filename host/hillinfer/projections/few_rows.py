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


class FewRowsLayers:
    """Linear layers of one input, described once for the library and called again and again.

    What a row gets has the same bits whatever rows are beside it, and with any number of threads.
    torch's products of two to eight rows read weights several times over. Threads share all of the
    layers at once, which takes less time than one layer after the other; each has the bits that it
    has alone. Any thread may call.

    Parameters
    ----------
    layers
        Their weights, which must stay where they are, all of one type.
    variant
        Number of an instruction set of the native library.
    """

    def __init__(self, layers: Sequence[Weights], variant: int) -> None:
        self._kept = list(layers)
        self._variant = variant
        first = layers[0][0]
        self._inputs, self._dtype = first.shape[1], first.dtype
        self._widths = [weight.shape[0] for weight, _ in layers]
        told = [
            FewRows(
                inputs=self._inputs,
                weights=weight.data_ptr(),
                bias=None if bias is None else bias.data_ptr(),
                outputs=weight.shape[0],
                number_type=NUMBER_TYPES[first.dtype],
            )
            for weight, bias in layers
        ]
        self._count, self._table = len(told), FewRows * len(told)
        # Each call has a copy, because another thread may call meanwhile.
        self._told = bytes(self._table(*told))
        self._function = native_library().functions.hillinfer_few_rows

    def takes(self, states: torch.Tensor) -> bool:
        """Return whether an input (..., inputs) has few rows, of the layers' type, on the CPU."""
        inputs = self._inputs
        fits = states.shape[-1] == inputs and states.numel() <= MOST_ROWS * inputs
        return fits and states.is_cpu and states.dtype is self._dtype

    def outputs(self, states: torch.Tensor) -> list[torch.Tensor]:
        """Return what each layer makes of some states, (..., outputs); `takes` says so of them."""
        inputs, shape = self._inputs, states.shape
        rows, stride = states, inputs
        if states.numel() != inputs:
            rows = states.reshape(-1, inputs)
            stride = rows.stride(0)
        if rows.stride(-1) != 1:
            rows, stride = rows.contiguous(), inputs
        table = self._table.from_buffer_copy(self._told)
        address, count = rows.data_ptr(), rows.numel() // inputs
        outer, threads, outputs = shape[:-1], torch.get_num_threads(), []
        for one, width in zip(table, self._widths, strict=True):
            out = states.new_empty((*outer, width))
            outputs.append(out)
            one.rows, one.row_count, one.row_stride = address, count, stride
            one.out, one.threads = out.data_ptr(), threads
        outcome = self._function(self._variant, table, self._count)
        if outcome:
            native_library().check("hillinfer_few_rows", outcome)
        return outputs
