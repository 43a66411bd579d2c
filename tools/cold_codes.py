# SPDX-License-Identifier: Apache-2.0
"""`python tools/cold_codes.py`: how cold coded tokens are read fastest.

What the real model selects is recorded as `hillinfer-bench pools --exact` does, and played to the
pools of the product. What is cold then is read from real files in both ways, by turns: 16-bit rows,
which are coded on arrival, and codes in a densely packed file. So it is for another shape, with the
same positions.
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

from hillinfer.model_shape import ModelShape
from hillinfer.models.loader import ModelOutline
from hillinfer.models.sources import ModelSource
from hillinfer.settings import Settings
from hillinfer.shadow.values import CODE_SHARE
from hillinfer.system.machine import NumberType, ProcessorFacts
from hillinfer_bench.quality.forced_reading import Prefix, compute_threads, selecting
from hillinfer_bench.quality.texts import standard_library_samples
from hillinfer_bench.replay.code_recording import record_coded
from hillinfer_bench.replay.code_split import SharedMemory
from hillinfer_bench.replay.cold_codes import (
    ColdReading,
    ColdReads,
    DriveCost,
    coder_of,
    cold_rows,
    table,
)

MODEL = "smollm2-135m"
# Llama-3.1-8B's KV heads, on as many layers as the recorded model has.
_KV_HEADS, _QUERY_HEADS, _HEAD_DIM = 8, 32, 128


def main() -> None:
    """Record, replay, read and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=int, default=2, help="parts of the Python reference")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--last", type=int, default=24)
    parser.add_argument("--alpha", type=float, default=0.2)
    parser.add_argument("--exact", type=float, default=0.02)
    parser.add_argument("--dram-budget", nargs="+", default=["25%", "33%"])
    parser.add_argument("--cold-dir", type=Path, required=True, help="directory on the drive")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    settings = Settings().changed(alpha=chosen.alpha, exact=chosen.exact)
    outline = ModelOutline.read(ModelSource.locate(MODEL, print), NumberType.AUTO)
    samples = standard_library_samples(outline.tokenizer, chosen.context)[: chosen.parts]
    loaded = outline.load()
    start = chosen.context - chosen.last
    traces = []
    with compute_threads(ProcessorFacts.read().cores):
        for sample in samples:
            ids = sample.token_ids[: chosen.context]
            prefix = Prefix.read(loaded.model, ids[:start])
            with selecting(loaded.model):
                traces.append(record_coded(loaded.model, prefix, ids, settings, sample.name))
    large = replace(loaded.shape, kv_heads=_KV_HEADS, query_heads=_QUERY_HEADS, head_dim=_HEAD_DIM)
    shapes: dict[str, ModelShape] = {loaded.name: loaded.shape, "llama-3.1-8b": large}
    found: list[tuple[str, str, str, ColdReads]] = []
    with closing(ColdReading(chosen.cold_dir)) as reading:
        for name, shape in shapes.items():
            for budget in chosen.dram_budget:
                memory = SharedMemory.of_budget(shape, settings, chosen.context, budget)
                for trace in traces:
                    rows = cold_rows(trace, memory, CODE_SHARE)
                    own = reading.both(shape, coder_of(trace, shape), rows)
                    found += [(name, trace.selected.text, budget, one) for one in own]
        curve = reading.curve
        cost = DriveCost.of([one for *_, one in found])
        report = {
            "label": "measured",
            "model": loaded.name,
            "settings": {key: str(value) for key, value in vars(chosen).items()},
            "processor": ProcessorFacts.read().name,
            "engine": reading.engine_name,
            "io_mode": reading.mode.value,
            "curve": curve.as_json(),
            "cost": asdict(cost),
            "rows": [
                {"shape": shape, "text": text, "budget": budget, **asdict(one)}
                for shape, text, budget, one in found
            ],
        }
    print(
        "scattered reads, MB/s by KiB: "
        + ", ".join(
            f"{size >> 10}: {rate / 1e6:.0f}"
            for size, rate in zip(curve.sizes, curve.reads, strict=True)
        )
    )
    print(table(found))
    print(cost.text())
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
