# SPDX-License-Identifier: Apache-2.0
"""Compiles `few_bits.cpp` for the processor that it runs on."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).with_name("few_bits.cpp")
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno"),
    *("-fno-trapping-math", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread", "-w"),
)
# gcc alone knows this one.
_WIDE = "-mprefer-vector-width=512"
_LONG, _POINTER = ctypes.c_int64, ctypes.c_void_p
_ARGUMENTS = {
    "few_bits_unit_bytes": [_POINTER],
    "few_bits_code_keys": [_POINTER, _POINTER, _LONG, _LONG, _POINTER],
    "few_bits_code_values": [_POINTER, _POINTER, _LONG, _LONG, _POINTER],
    "few_bits_begin": [_POINTER, _POINTER],
    "few_bits_attend": [
        *(_POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER),
        *(ctypes.c_int32, _POINTER),
    ],
}


@cache
def native_codes() -> ctypes.CDLL | None:
    """Return the library, compiled once in a process; None where nothing here compiles it."""
    named = (os.environ.get("CXX"), "c++", "g++", "clang++")
    compiler = next((name for name in named if name and shutil.which(name)), None)
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="hillinfer-bench-") as folder:
        made = Path(folder) / "few_bits.so"
        for flags in ((*_FLAGS, _WIDE), _FLAGS):
            command = [compiler, *flags, str(_SOURCE), "-o", str(made)]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                library = ctypes.CDLL(str(made))
                break
        else:
            return None
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = _LONG if name == "few_bits_unit_bytes" else None
    return library
