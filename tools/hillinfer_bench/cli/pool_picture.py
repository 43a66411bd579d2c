# SPDX-License-Identifier: Apache-2.0
"""`hillinfer-bench pool-picture`: what happened to the pools, as heat maps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hillinfer.system.files import check_apart, prepare_report
from hillinfer_bench.figures.canvas import require_matplotlib, save_figure
from hillinfer_bench.figures.pool_figures import TimelineRecord, timeline_figure


def pool_picture(
    file: Annotated[
        Path, typer.Argument(help="Timeline that `hillinfer generate --pool-timeline` wrote.")
    ],
    *,
    out: Annotated[Path, typer.Option(help="Where the PNG goes.")],
) -> None:
    """Draw hits, promotions, demotions, reads and waits per layer and step."""
    require_matplotlib()
    check_apart((("FILE", file), ("--out", out)))
    prepare_report(out, "--out", "the picture")
    record = TimelineRecord.read(file)
    save_figure(timeline_figure(record, file.name), out)
    print(out)
