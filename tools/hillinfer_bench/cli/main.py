# SPDX-License-Identifier: Apache-2.0
"""The `hillinfer-bench` command, which measures HillInfer: its subcommands."""

from __future__ import annotations

from hillinfer.cli.ending import Program
from hillinfer_bench.cli.decode import decode
from hillinfer_bench.cli.pool_picture import pool_picture
from hillinfer_bench.cli.pools import pools
from hillinfer_bench.cli.quality import quality
from hillinfer_bench.cli.trace_picture import trace_picture

main = Program(
    "hillinfer-bench",
    "Measures of HillInfer: decode beside rivals, selection quality, pool policies, pictures.",
    (decode, quality, pools, pool_picture, trace_picture),
)
