# SPDX-License-Identifier: Apache-2.0
"""Launches of the compiled HLS C++ that tell the order of their writes."""

import ctypes
import re
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from executions import csim

from hillinfer_model.kernel_spec import BEAT_BYTES

_WRITERS = {"score_tokens": "write_scores.h", "make_shadow": "write_shadow.h"}
_RECORDER = "recorded_beats.h"
_WRITTEN = re.compile(r"(?<!const )\bBeat \*(?=(scores|shadow|status)\b)")
_WRITE = np.dtype([("port", "<u8"), ("beat", "<u8"), ("content", np.uint8, BEAT_BYTES)])
_STATUS_PORT = 1


@dataclass(frozen=True)
class Write:
    """One beat that a kernel wrote: whether to the status buffer, where in its buffer, and what."""

    to_status: bool
    beat: int
    content: np.ndarray


@cache
def _recording_library(kernel, spec):
    """Build a kernel whose written pointers are of the recording classes."""
    from hillinfer_hw.csim_build import HARDWARE, HLS, compile_sources, rendered_sources

    writer = _WRITERS[kernel]
    sources = rendered_sources(kernel, spec)
    sources[writer] = (HLS / writer).read_text(encoding="utf-8")
    for name in (f"{kernel}.cpp", writer):
        sources[name], count = _WRITTEN.subn(_recording_type, sources[name])
        assert count == 2, f"{name} writes through {count} pointers, not the output and the status"
    recorder = HARDWARE / "testbench" / "writes" / _RECORDER
    sources[_RECORDER] = recorder.read_text(encoding="utf-8")
    return compile_sources(f"{kernel}.cpp", sources, ["-include", _RECORDER])


def _recording_type(pointer):
    return "RecordedStatus " if pointer[1] == "status" else "RecordedOutput "


def run_recorded(kernel, spec, launch):
    """Run a launch in a kernel; return its result and its writes in their order."""

    def build(kernel, spec, scheduling):
        return _recording_library(kernel, spec)

    execution = replace(csim("sequential")(), build=build)
    run = execution.make_shadow if kernel == "make_shadow" else execution.score
    result = run(spec, launch)
    library = ctypes.CDLL(str(_recording_library(kernel, spec)))
    library.count_writes.restype = ctypes.c_uint64
    record = np.empty(library.count_writes(), dtype=_WRITE)
    library.take_writes(ctypes.c_void_p(record.ctypes.data))
    writes = [
        Write(one["port"] == _STATUS_PORT, int(one["beat"]), one["content"]) for one in record
    ]
    return result, writes
