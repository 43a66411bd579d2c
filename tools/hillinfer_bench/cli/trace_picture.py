# SPDX-License-Identifier: Apache-2.0
"""`hillinfer-bench trace-picture`: one step of a trace, in words and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hillinfer.system.files import check_apart, prepare_report
from hillinfer_bench.figures.canvas import require_matplotlib, save_figure
from hillinfer_bench.figures.trace_figures import TraceRecord, lanes_figure, step_text


def trace_picture(
    file: Annotated[Path, typer.Argument(help="Trace that generate or bench wrote.")],
    *,
    step: Annotated[
        int | None, typer.Option(help="Which step; by default the decode step of median time.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the picture goes: SVG by its name, else PNG.")
    ] = None,
) -> None:
    """Say how busy each lane was in one step and how much compute hid, and draw it."""
    if out is not None:
        require_matplotlib()
        check_apart((("FILE", file), ("--out", out)))
        prepare_report(out, "--out", "the picture")
    record = TraceRecord.read(file)
    trace = record.step(record.median_step if step is None else step)
    if out is not None:
        save_figure(lanes_figure(trace, file.name), out)
    kind = "decode steps" if record.decode_steps else "steps"
    count = len(record.decode_steps or record.steps)
    chosen = f"the median of {count} {kind}" if step is None else f"one of {len(record.steps)}"
    print(step_text(trace, chosen))
    if out is not None:
        print(out)
