# SPDX-License-Identifier: Apache-2.0
"""The `hillinfer-bench` command, which measures HillInfer: its subcommands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hillinfer.cli.console import error_console, quiet_transformers, reading_view
from hillinfer.cli.parsing import Program
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.system.files import check_apart, prepare_report
from hillinfer.system.machine import NumberType
from hillinfer_bench.cli.evicpress import evicpress
from hillinfer_bench.cli.frontier import frontier, frontier_picture
from hillinfer_bench.cli.hosts import hosts
from hillinfer_bench.cli.serving import serving
from hillinfer_bench.cli.slim import slim
from hillinfer_bench.cli.storing import first_steps, sealed_pool, storing
from hillinfer_bench.decode.request import BenchRequest, Chosen
from hillinfer_bench.figures.canvas import require_matplotlib, save_figure
from hillinfer_bench.figures.documents_figure import (
    PlanRecord,
    documents_figure,
    documents_text,
)
from hillinfer_bench.figures.prune_figure import prune_figure, prune_text, read_seen_blocks
from hillinfer_bench.figures.store_figures import StoreRecord, store_figure, store_text
from hillinfer_bench.figures.timeline_figures import TimelineRecord, timeline_figure
from hillinfer_bench.figures.trace_figures import TraceRecord, lanes_figure, step_text
from hillinfer_bench.quality.texts import TextsRequest
from hillinfer_bench.replay.request import PoolsRequest
from hillinfer_bench.report.kinds import kinds_table, read_reports
from hillinfer_bench.traces.request import DEFAULT_SHARES, TracesRequest

# Options that several subcommands have.
Model = Annotated[
    str, typer.Option(help="Registry name, folder, GGUF file, or organisation/name on the hub.")
]
Texts = Annotated[
    list[Path] | None,
    typer.Option(
        help="UTF-8 text whose beginning is read; give it again for more. By default parts of the "
        "Python reference."
    ),
]
Context = Annotated[int, typer.Option(help="Tokens of each text.")]
Last = Annotated[int, typer.Option(help="Tokens of it that are read sparsely, as decode steps.")]
Alphas = Annotated[list[float] | None, typer.Option(help="Importance rate, or several.")]
Dtype = Annotated[
    NumberType, typer.Option(help="auto: the model's own, float32 where a CPU is slow at it.")
]
Threads = Annotated[int | None, typer.Option(help="Compute threads; by default one per core.")]
JsonOut = Annotated[
    Path | None, typer.Option(help="Where the figures go as JSON; a picture lies beside it.")
]
_QUALITY_ALPHAS, _POOLS_ALPHAS = (0.05, 0.1, 0.2), (0.1, 0.2)


def _only(what: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        help=f"Only this {what}; give it again for more."
    )
    return option


def decode(
    plan: Annotated[
        str,
        typer.Option(
            help="quick, goals, full, or paper for its figures 12 to 16a; estimated: a minute, ten "
            "minutes, hours, ten minutes of 2 cores."
        ),
    ] = "quick",
    model: Annotated[
        str,
        typer.Option(help="Real model: it is measured, and its selections are replayed by others."),
    ] = DEFAULT_MODEL,
    systems: Annotated[list[str] | None, _only("system")] = None,
    contexts: Annotated[list[int] | None, _only("context")] = None,
    alphas: Annotated[list[float] | None, _only("α")] = None,
    models: Annotated[list[str] | None, _only("model or shape")] = None,
    batches: Annotated[list[int] | None, _only("batch")] = None,
    budgets: Annotated[list[float] | None, _only("DRAM budget, such as 0.2 of the KV")] = None,
    shadows: Annotated[list[str] | None, _only("shadow")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Measured steps of every case, in place of the plan's.")
    ] = None,
    dtype: Dtype = NumberType.AUTO,
    threads: Threads = None,
    cold_dir: Annotated[
        Path | None, typer.Option(help="Directory on the drive, for everybody's rows.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Where the figures go as JSON; pictures lie beside it.")
    ] = Path("build/reports/bench.json"),
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Trace of the one HillInfer system of the one case left; see trace-picture."
        ),
    ] = None,
) -> None:
    """Let HillInfer, its rivals and transformers' caches decode in turns and compare them."""
    chosen = Chosen(
        systems=tuple(systems or ()),
        contexts=tuple(contexts or ()),
        alphas=tuple(alphas or ()),
        models=tuple(models or ()),
        batches=tuple(batches or ()),
        budgets=tuple(budgets or ()),
        shadows=tuple(shadows or ()),
        steps=steps,
    )
    request = BenchRequest(plan, model, dtype, chosen, threads, cold_dir, out, trace)
    quiet_transformers()
    # torch and transformers take seconds to import: help and bad options do not wait for them.
    from hillinfer_bench.decode.run import run

    console = error_console()
    print(run(request, console.print, reading_view(console).stage))


def quality(
    model: Model = DEFAULT_MODEL,
    texts: Texts = None,
    context: Context = 4096,
    last: Last = 128,
    alpha: Alphas = None,
    dtype: Dtype = NumberType.AUTO,
    threads: Threads = None,
    out: JsonOut = None,
) -> None:
    """Compare rules, shadows and other ways to select with the full cache, on real text."""
    alphas = tuple(alpha or _QUALITY_ALPHAS)
    request = TextsRequest(model, dtype, tuple(texts or ()), context, last, alphas, threads, out)
    quiet_transformers()
    from hillinfer_bench.quality.run import run

    console = error_console()
    print(run(request, console.print, reading_view(console).stage))


def precision(
    model: Model = DEFAULT_MODEL,
    texts: Texts = None,
    context: Context = 4096,
    last: Last = 128,
    row: Annotated[
        list[int] | None,
        typer.Option(help="Number of a row, from 0; give it again for more. All if none."),
    ] = None,
    dtype: Dtype = NumberType.AUTO,
    threads: Threads = None,
    out: JsonOut = None,
) -> None:
    """Compare how many selected tokens are exact and how the others are coded, on real text."""
    request = TextsRequest(model, dtype, tuple(texts or ()), context, last, (), threads, out)
    quiet_transformers()
    from hillinfer_bench.precision.run import run

    console = error_console()
    print(run(request, frozenset(row or ()), console.print, reading_view(console).stage))


def pools(
    model: Model = DEFAULT_MODEL,
    texts: Texts = None,
    context: Context = 4096,
    last: Last = 256,
    alpha: Alphas = None,
    exact: Annotated[float, typer.Option(help="Exact share; below 1 both pools.")] = 1.0,
    dram_budget: Annotated[list[str] | None, typer.Option(help="For --exact below 1.")] = None,
    dtype: Dtype = NumberType.AUTO,
    threads: Threads = None,
    out: JsonOut = None,
) -> None:
    """Record what a model selects and replay it with every pool policy, next to Belady's bound."""
    alphas, budgets = tuple(alpha or _POOLS_ALPHAS), tuple(dram_budget or PoolsRequest.budgets)
    texts_of = (model, dtype, tuple(texts or ()), context, last, alphas, threads, out)
    request = PoolsRequest(*texts_of, exact, budgets)
    quiet_transformers()
    from hillinfer_bench.replay.run import run

    console = error_console()
    print(run(request, console.print, reading_view(console).stage))


def traces(
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            help="Trace in Mooncake's format, .jsonl or .jsonl.xz; give it again for more. By "
            "default the two that come along."
        ),
    ] = None,
    capacities: Annotated[
        list[float] | None,
        typer.Option(help="Blocks held over distinct ones; give it again for more."),
    ] = None,
    copies: Annotated[
        int, typer.Option(help="Copies of each trace for the model of larger stores; 0 for none.")
    ] = 8,
    index_chunks: Annotated[
        int,
        typer.Option(help="Chunks of an index that copies of the first trace fill; 0 for none."),
    ] = 0,
    processes: Annotated[int, typer.Option(help="Replays at once.")] = 2,
    out: Annotated[Path | None, typer.Option(help="Where the figures go as JSON.")] = None,
) -> None:
    """Replay public traces of requests with every way to evict and admit, and Belady's bound."""
    request = TracesRequest(
        tuple(trace or ()),
        tuple(capacities or DEFAULT_SHARES),
        copies,
        index_chunks,
        processes,
        out,
    )
    from hillinfer_bench.traces.run import run

    console = error_console()
    print(run(request, console.print, reading_view(console).stage))


def study(
    parts: Annotated[
        str,
        typer.Option(
            help="What is made, with commas between: modelled, accuracy, and measured of what "
            "`decode --plan paper` wrote to bench-paper.json beside --out."
        ),
    ] = "modelled,accuracy",
    model: Model = DEFAULT_MODEL,
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            help="UTF-8 book that is read on and chosen from; give it again for more. By default "
            "the Python reference."
        ),
    ] = None,
    longeval: Annotated[
        Path | None,
        typer.Option(help="File of LongEval's records of lines; made ones of its form if none."),
    ] = None,
    minutes: Annotated[
        float, typer.Option(help="After so much time no further question is asked.")
    ] = 60.0,
    share: Annotated[
        float, typer.Option(help="Of the questions of each task that are asked; lengths stay.")
    ] = 1.0,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Only questions whose names begin so, such as 'needle, 2000'; give it again for "
            "more. Tasks are text, lines, needle, choice and summary."
        ),
    ] = None,
    ways: Annotated[
        list[str] | None,
        typer.Option(
            help="Only ways whose titles begin so, such as 'HillInfer', beside the full cache; "
            "give it again for more."
        ),
    ] = None,
    record_lines: Annotated[int, typer.Option(help="Lines of a LongEval record that stay.")] = 40,
    threads: Annotated[int | None, typer.Option(help="Compute threads; one by default.")] = None,
    out: Annotated[
        Path,
        typer.Option(help="Where the figures go as JSON; a run goes on with what is there."),
    ] = Path("build/reports/study.json"),
) -> None:
    """Make the paper's tables: accuracy of every way to select, and latency on its machine."""
    quiet_transformers()
    from hillinfer_bench.study.run import StudyRequest, parse_parts, run
    from hillinfer_bench.study.tasks import TaskPlan

    given = TaskPlan(record_lines=record_lines, texts=tuple(texts or ()), longeval=longeval)
    request = StudyRequest(
        parse_parts(parts),
        model,
        given.shortened(share),
        minutes,
        threads,
        out,
        tuple(only or ()),
        tuple(ways or ()),
    )
    print(run(request, error_console().print))


def compare(
    files: Annotated[
        list[Path], typer.Argument(help="Reports of `decode`, as of two kinds of machine.")
    ],
) -> None:
    """Lay reports of several machines side by side, each figure with its kind of machine."""
    print(kinds_table(read_reports(files)))


def _prepare_picture(out: Path | None, *files: Path) -> None:
    """Refuse a place for a picture, where one is wanted, before anything is read for it."""
    if out is not None:
        require_matplotlib()
        check_apart((*(("FILE", file) for file in files), ("--out", out)))
        prepare_report(out, "--out", "the picture")


def pool_picture(
    file: Annotated[
        Path, typer.Argument(help="Timeline that `hillinfer generate --pool-timeline` wrote.")
    ],
    *,
    out: Annotated[Path, typer.Option(help="Where the PNG goes.")],
) -> None:
    """Draw hits, promotions, demotions, reads and waits per layer and step."""
    _prepare_picture(out, file)
    record = TimelineRecord.read(file)
    save_figure(timeline_figure(record, file.name), out)
    print(out)


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
    _prepare_picture(out, file)
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


def store_picture(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="What `hillinfer store stats --json` printed, and reports of `hillinfer generate`."
        ),
    ],
    *,
    out: Annotated[
        Path | None, typer.Option(help="Where the picture goes: SVG by its name, else PNG.")
    ] = None,
) -> None:
    """Say what a store holds and where the time to the first token went, and draw it."""
    _prepare_picture(out, *files)
    record = StoreRecord.read(files)
    if out is not None:
        save_figure(store_figure(record), out)
    print(store_text(record))
    if out is not None:
        print(out)


def documents_picture(
    file: Annotated[Path, typer.Argument(help="What `hillinfer documents plan --json` printed.")],
    *,
    out: Annotated[
        Path | None, typer.Option(help="Where the picture goes: SVG by its name, else PNG.")
    ] = None,
) -> None:
    """Say where documents lie and which forms are on their hulls, and draw it."""
    _prepare_picture(out, file)
    record = PlanRecord.read(file)
    if out is not None:
        save_figure(documents_figure(record), out)
    print(documents_text(record))
    if out is not None:
        print(out)


def prune_picture(
    file: Annotated[Path, typer.Argument(help="Report of `hillinfer generate --prune`.")],
    *,
    out: Annotated[
        Path | None, typer.Option(help="Where the picture goes: SVG by its name, else PNG.")
    ] = None,
) -> None:
    """Say which part of a prompt each layer saw, and draw which blocks."""
    _prepare_picture(out, file)
    found = read_seen_blocks(file)
    if out is not None:
        save_figure(prune_figure(found), out)
    print(prune_text(found))
    if out is not None:
        print(out)


main = Program(
    "hillinfer-bench",
    "Measures of HillInfer: decode beside rivals, selection quality, pools, traces, stores.",
    (
        decode,
        quality,
        precision,
        frontier,
        pools,
        traces,
        storing,
        sealed_pool,
        first_steps,
        serving,
        hosts,
        slim,
        evicpress,
        study,
        compare,
        pool_picture,
        trace_picture,
        store_picture,
        documents_picture,
        prune_picture,
        frontier_picture,
    ),
)
