# SPDX-License-Identifier: Apache-2.0
"""The header of a GGUF file, walked once before a library believes its counts."""

from __future__ import annotations

import mmap
from math import prod
from pathlib import Path
from struct import Struct
from typing import Any

from hillinfer.models.errors import ModelError
from hillinfer.models.json_object import check_size
from hillinfer.models.stored_tensor import StoredTensor

_MAGIC, _VERSIONS = 0x46554747, (2, 3)
_FILE_BYTES = 1 << 50
_STRING, _ARRAY = 8, 9
# By number of the type: u8, i8, u16, i16, u32, i32, f32, bool, u64, i64, f64.
_SCALARS = {
    number: Struct("<" + letter)
    for number, letter in zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
_U32, _U64 = Struct("<I"), Struct("<Q")
_MOST_NAMES, _MOST_DIMENSIONS, _DEPTH = 1 << 16, 4, 2
# The library makes an object of each: vocabularies of 260,000 tokens have 1.3 million with merges.
_MOST_ELEMENTS = 1 << 22
_MOST_WHOLE = 1 << 53
_ALIGNMENT = 32


class GgufHeader:
    """What a GGUF file says of itself.

    Parameters
    ----------
    file
        The file.

    Attributes
    ----------
    settings
        Its scalars and strings by name; arrays are left out.
    tensors
        Its tensors by name.

    Raises
    ------
    ModelError
        Where the file is no GGUF file, cut, or says what cannot be.
    """

    def __init__(self, file: Path) -> None:
        check_size(file, _FILE_BYTES)
        self.settings: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self._file, self._place, self._elements = file, 0, 0
        with file.open("rb") as opened:
            if file.stat().st_size < 24:
                raise self._wrong("it is cut: get it anew")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as self._data:
                self._walk()

    def _walk(self) -> None:
        if self._number(_U32) != _MAGIC:
            raise self._wrong("it is no GGUF file")
        if (version := self._number(_U32)) not in _VERSIONS:
            raise self._wrong(f"it is of GGUF version {version}, and 2 and 3 are read")
        tensors, settings = self._number(_U64), self._number(_U64)
        for what, count in (("tensors", tensors), ("settings", settings)):
            if count > _MOST_NAMES:
                raise self._wrong(f"it says it has {count} {what}, and {_MOST_NAMES} are read")
        for _ in range(settings):
            name = self._text()
            if name in self.settings:
                raise self._wrong(f"it has the setting {name[:80]} twice")
            self.settings[name] = self._value(self._number(_U32), 0)
        places = sorted(self._tensor() for _ in range(tensors))
        alignment = self.settings.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._wrong(f"its general.alignment is {alignment!r:.40}, no power of two")
        # One after the other, so a wrong count of tensors shows: their bytes would begin elsewhere.
        end = self._place
        start = -(-end // alignment) * alignment
        for offset, size, name in places:
            begin = -(-end // alignment) * alignment
            if start + offset != begin:
                raise self._wrong(f"{name[:80]} does not begin where the tensor before it ends")
            end = begin + size
            if end > len(self._data):
                raise self._wrong(f"it is cut before the end of {name[:80]}: get it anew")
        if len(self._data) - end >= alignment:
            raise self._wrong(f"it has {len(self._data) - end} bytes more than its tensors")

    def _tensor(self) -> tuple[int, int, str]:
        """Take one tensor and return its place after the header, its bytes and its name."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._text()
        dimensions = self._number(_U32)
        if dimensions > _MOST_DIMENSIONS:
            raise self._wrong(f"{name[:80]} has {dimensions} dimensions")
        shape = tuple(reversed([self._number(_U64) for _ in range(dimensions)]))
        kind, offset = self._number(_U32), self._number(_U64)
        if name in self.tensors:
            raise self._wrong(f"it has the tensor {name[:80]} twice")
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise self._wrong(f"{name[:80]} is of type {kind}, which nobody knows") from None
        if prod(shape) > _MOST_WHOLE or (shape and shape[-1] % block):
            raise self._wrong(f"{name[:80]} has the shape {shape}, which its type cannot have")
        self.tensors[name] = StoredTensor(name, shape)
        return offset, prod(shape) // block * block_bytes, name

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise self._wrong(f"a setting is of type {kind}, which nobody knows")
            return self._number(_SCALARS[kind])
        inner, count = self._number(_U32), self._number(_U64)
        self._elements += count
        if self._elements > _MOST_ELEMENTS or depth == _DEPTH:
            raise self._wrong(f"its lists have more than {_MOST_ELEMENTS} elements")
        if inner in _SCALARS:
            self._skip(count * _SCALARS[inner].size)
        else:
            for _ in range(count):
                if inner == _STRING:
                    self._skip(self._number(_U64))
                else:
                    self._value(inner, depth + 1)
        return None

    def _text(self) -> str:
        length = self._number(_U64)
        start = self._place
        self._skip(length)
        try:
            return self._data[start : self._place].decode()
        except UnicodeDecodeError as error:
            raise self._wrong(f"a name in it is no UTF-8 ({error})") from error

    def _number(self, how: Struct) -> Any:
        start = self._place
        self._skip(how.size)
        return how.unpack_from(self._data, start)[0]

    def _skip(self, count: int) -> None:
        self._place += count
        if self._place > len(self._data):
            raise self._wrong("it is cut: get it anew")

    def _wrong(self, what: str) -> ModelError:
        return ModelError(f"cannot read the model in {self._file}: {what}")
