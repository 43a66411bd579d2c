# SPDX-License-Identifier: Apache-2.0
"""Simulated kernels for tests: a small one, and mutants of it."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from hillinfer_hw.build_cache import cached
from hillinfer_hw.memory_model import STALLS
from hillinfer_hw.rtl import RtlSession
from hillinfer_hw.rtl_files import render_rtl
from hillinfer_hw.toolchain import MissingToolError
from hillinfer_hw.verilate import build
from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.launch_result import STATUS_FILL

# Several blocks per segment, and builds in seconds.
SMALL = KernelSpec(
    64, 2, 1, key_mode=KeyMode.INT8, rule=Rule.RAW_SUM, segment_tokens=512, block_tokens=64
)

LATE_ANSWERS = replace(STALLS, name="late answers", write_latency=(0, 600))


def statuses(run):
    """(tokens complete, error) of each status beat; None where none was written."""
    return [
        None
        if np.all(beat == STATUS_FILL)
        else tuple(int.from_bytes(beat[i : i + 4].tobytes(), "little") for i in (12, 16))
        for beat in run.result.status
    ]


@cache
def session(kernel="score_tokens", spec=SMALL):
    """A kernel from power-up on; tests of one process share it, so launches follow launches."""
    try:
        return RtlSession(spec, kernel)
    except MissingToolError as missing:
        pytest.skip(str(missing))


def mutant(file, old, new, kernel="score_tokens", spec=SMALL):
    """A kernel with one line of one source changed."""
    source = render_rtl(spec, kernel)
    path = next(path for path in source.files if path.name == file)
    text = path.read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} times {old!r}"
    changed = text.replace(old, new)

    def write(folder: Path):
        (folder / file).write_text(changed)

    own = cached("rtl-mutants", [changed.encode()], write) / file
    files = tuple(own if each == path else each for each in source.files)
    try:
        library = build(replace(source, files=files))
    except MissingToolError as missing:
        pytest.skip(str(missing))
    return RtlSession(spec, kernel, library=library)


def early_status():
    """A kernel whose status beats do not wait for the responses of what they count."""
    return mutant(
        "writer.sv",
        ".in_valid(done_valid && done_marked && !done_status && !done_error && !failed\n"
        "            && !status_failed),\n"
        "        .in_ready(unused_ready), .in_data({done_index, done_count}),",
        ".in_valid(takes && block_ends),\n"
        "        .in_ready(unused_ready), .in_data({index, count_next}),",
    )
