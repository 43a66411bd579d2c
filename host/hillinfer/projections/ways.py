# SPDX-License-Identifier: Apache-2.0
"""Ways to compute a model's linear layers: in steps, fused, by rows, prepacked, FP16, INT8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch
from torch.nn.functional import linear

from hillinfer.errors import SettingsError, UnsupportedFeatureError
from hillinfer.kv.sequence import NUMBER_TYPES
from hillinfer.native.library import native_library
from hillinfer.native.signatures import FewRows

# --- Products of few rows ---

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


# --- The interface ---


class Restores(Enum):
    """What the plain weight can be had from, bit for bit, while it is packed."""

    NOTHING = auto()
    FROM_COPY = auto()
    FROM_SHARED_MEMORY = auto()


class PackedLinear(Protocol):
    """Weights of one or several linear layers that share their input, as one matrix."""

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Return (..., outputs) of (..., inputs), in the type of `states`."""

    @property
    def held_bytes(self) -> int:
        """Bytes that packing allocated and that live as long as this does."""

    def plain_weight(self) -> torch.Tensor:
        """Return the weight (outputs, inputs) bit for bit; called where a way restores it."""


class ProjectionWay:
    """One way to compute linear layers; a subclass overrides `pack`, and says what it holds.

    Parameters
    ----------
    least_layers
        Layers that must share an input for packing to change anything.
    restores
        Of what `pack` returns. It decides what the model's own weights do meanwhile: stay, are let
        go, or live in the packed memory.
    packing_copies
        Float32 copies of a matrix that packing makes for a moment, beside what it holds.
    """

    least_layers: ClassVar[int] = 1
    restores: ClassVar[Restores] = Restores.NOTHING
    packing_copies: ClassVar[int] = 0

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear | None:
        """Pack one matrix; None leaves the layers as they are, which is what stock means.

        `weight` is (outputs, inputs), contiguous, on the CPU, float32 or bfloat16, and not to be
        changed; `bias` is (outputs,). Raises UnsupportedFeatureError where this machine or this
        weight cannot be packed.
        """
        return None

    def in_steps(self, model: Any) -> AbstractContextManager[object]:
        """Return what is entered for each decode step of a model; nothing, as a rule."""
        return nullcontext()

    def held_bytes(self, outputs: int, inputs: int, bias: int, item_bytes: int) -> int:
        """Return the bytes that a packed matrix allocates, before it is packed.

        `bias` counts its items, 0 without one; `item_bytes` is that of the model's type.
        """
        return 0


# --- In steps ---


class Steps(ProjectionWay):
    """Products of decode steps by the native library, all others as the model has them.

    Of float32 and bfloat16 weights on the CPU; nothing is packed and no weight moves, so prompts
    have the bits of the model alone.
    """

    def in_steps(self, model: Any) -> AbstractContextManager[object]:
        """Return the products of the native library; see `StepProducts`."""
        # Not above: that module needs `LayerGroup`, whose module needs this one.
        from hillinfer.projections.step_products import StepProducts

        return StepProducts(model)


# --- FP16 ---

_LARGEST = torch.finfo(torch.float16).max


class Fp16(ProjectionWay):
    """FBGEMM's packed FP16 weights; inputs, products and sums are float32.

    Weights of float32 are rounded to 11 bits, half the bytes; those of bfloat16 keep their bits
    down to 2^-14 and lose some below. The model's own weights stay, since they cannot be had back.
    """

    packing_copies: ClassVar[int] = 2

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Round and pack, and refuse weights beyond the range of FP16."""
        largest = float(weight.abs().max())
        if not largest <= _LARGEST:
            raise UnsupportedFeatureError(
                f"projections='fp16': a weight of {largest:g} is beyond FP16's {_LARGEST:g}: use "
                "projections='fused'"
            )
        try:
            packed = torch.ops.quantized.linear_prepack_fp16(
                weight.float(), None if bias is None else bias.float()
            )
        except RuntimeError as error:
            raise UnsupportedFeatureError(
                "projections='fp16': this torch has no FBGEMM for this machine "
                f"({str(error).splitlines()[0]}): use projections='fused'"
            ) from error
        held = 2 * weight.numel() + (0 if bias is None else 4 * bias.numel())
        return _Fp16Linear(packed, held)

    def held_bytes(self, outputs: int, inputs: int, bias: int, item_bytes: int) -> int:
        """Return two for each weight, four for each item of a bias; see `ProjectionWay`."""
        return 2 * outputs * inputs + 4 * bias


@dataclass(frozen=True)
class _Fp16Linear:
    packed: Any
    held_bytes: int

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(states.float(), self.packed)
        return out.to(states.dtype)

    def plain_weight(self) -> torch.Tensor:
        raise NotImplementedError("rounded weights give nothing back")


# --- INT8 ---

_LARGEST_CODE = 127
# From here on widening the codes once costs less than torch's kernel, which is made for few rows.
_MANY_ROWS = 64
# The kernel reads a row of codes in vectors of this many and runs past the end of any other.
_VECTOR = 16


class Int8(ProjectionWay):
    """INT8 weights, inputs as they are: activations are not quantised.

    A weight is rounded to the nearest of 255 multiples of its output's scale, a bfloat16. With few
    rows torch's weight-only kernel computes, on inputs in bfloat16 and with float32 sums; with
    more the codes are widened and products are float32. The model's own weights stay,
    since they cannot be had back.
    """

    packing_copies: ClassVar[int] = 3

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Code every output's weights with a scale of its own."""
        wide = weight.float()
        tiny = torch.finfo(torch.float32).tiny
        # Codes follow from the scale as it is stored, so rounding the scale loses nothing more.
        scales = (wide.abs().amax(1) / _LARGEST_CODE).clamp_min(tiny).to(torch.bfloat16)
        codes = (wide / scales.float()[:, None]).round_().clamp_(-_LARGEST_CODE, _LARGEST_CODE)
        return _Int8Linear(codes.to(torch.int8), scales, bias)

    def held_bytes(self, outputs: int, inputs: int, bias: int, item_bytes: int) -> int:
        """Return those of codes, scales and bias; see `ProjectionWay`."""
        return outputs * inputs + 2 * outputs + bias * item_bytes


@dataclass(frozen=True)
class _Int8Linear:
    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        rows = states.reshape(-1, states.shape[-1])
        if len(rows) < _MANY_ROWS and rows.shape[1] % _VECTOR == 0:
            few = rows.to(torch.bfloat16).contiguous()
            out = torch._weight_int8pack_mm(few, self.codes, self.scales).to(states.dtype)
        else:
            wide = linear(rows.float(), self.codes.float()) * self.scales.float()
            out = wide.to(states.dtype)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*states.shape[:-1], -1)

    @property
    def held_bytes(self) -> int:
        parts = (self.codes, self.scales, self.bias)
        return sum(one.nbytes for one in parts if one is not None)

    def plain_weight(self) -> torch.Tensor:
        raise NotImplementedError("rounded weights give nothing back")


# --- Fused layers ---


class Fused(ProjectionWay):
    """Query, key and value projection in one product, gate and up projection in another.

    The same products are summed; at most the order of summing changes. The model's weights move
    into the joined matrix, so nothing is held twice.
    """

    least_layers: ClassVar[int] = 2
    restores: ClassVar[Restores] = Restores.FROM_SHARED_MEMORY

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Keep the joined matrix as it is."""
        return _FusedLinear(weight, bias)

    def held_bytes(self, outputs: int, inputs: int, bias: int, item_bytes: int) -> int:
        """Return those of a joined bias; see `ProjectionWay`."""
        return bias * item_bytes


@dataclass(frozen=True)
class _FusedLinear:
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return linear(states, self.weight, self.bias)

    @property
    def held_bytes(self) -> int:
        # The weight is the model's own; only a joined bias is new.
        return 0 if self.bias is None else self.bias.nbytes

    def plain_weight(self) -> torch.Tensor:
        return self.weight


# --- Prepacked weights ---


class Prepacked(ProjectionWay):
    """oneDNN's own order of the joined weights; the same numbers up to the order of summing.

    The plain weight comes back from the packed one bit for bit, so the model's own is let go
    unless another module, such as a tied embedding, needs it.
    """

    restores: ClassVar[Restores] = Restores.FROM_COPY

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Reorder the weight once, for any number of rows of the input."""
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            raise UnsupportedFeatureError(
                f"projections='prepacked': oneDNN cannot pack {str(weight.dtype)[6:]} weights on "
                f"this machine ({str(error).splitlines()[0]}): use float32, or projections='fused'"
            ) from error
        return _PrepackedLinear(packed, bias)

    def held_bytes(self, outputs: int, inputs: int, bias: int, item_bytes: int) -> int:
        """Return those of a reordered copy; see `ProjectionWay`."""
        return (outputs * inputs + bias) * item_bytes


@dataclass(frozen=True)
class _PrepackedLinear:
    packed: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            states, self.packed, self.bias, "none", [], ""
        )
        return out

    @property
    def held_bytes(self) -> int:
        # Opaque tensors do not tell their size; oneDNN pads the outputs of a block, if at all.
        weight = self.packed.numel() * self.packed.dtype.itemsize
        return weight + (0 if self.bias is None else self.bias.nbytes)

    def plain_weight(self) -> torch.Tensor:
        return self.packed.to_dense()


# --- Few rows ---


class Rows(Fused):
    """Few rows by the native library, which reads each weight once; more of them by torch.

    What a row gets has the same bits whatever rows are beside it. So up to 16 sequences that step
    together have the tokens that each has alone. The same numbers as stock up to the order of
    summing; weights are where `Fused` has them.
    """

    least_layers: ClassVar[int] = 1

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Keep the joined matrix as it is."""
        return _RowsLinear(weight, bias, native_library().variants[0].number)


@dataclass(frozen=True)
class _RowsLinear(_FusedLinear):
    variant: int

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        if self._layers.takes(states):
            return self._layers.outputs(states)[0]
        return super().__call__(states)

    @cached_property
    def _layers(self) -> FewRowsLayers:
        return FewRowsLayers([(self.weight, self.bias)], self.variant)


# --- The table of ways ---

PROJECTIONS: Mapping[str, type[ProjectionWay]] = MappingProxyType(
    {
        "steps": Steps,
        "stock": ProjectionWay,
        "fused": Fused,
        "rows": Rows,
        "prepacked": Prepacked,
        "fp16": Fp16,
        "int8": Int8,
    }
)


def make_projections(name: str) -> ProjectionWay:
    """Return the way of a name, or raise SettingsError naming those there are."""
    if name not in PROJECTIONS:
        raise SettingsError(
            f"projections={name!r} is unknown: choose one of {', '.join(PROJECTIONS)}"
        )
    return PROJECTIONS[name]()
