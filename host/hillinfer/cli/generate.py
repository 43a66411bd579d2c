# SPDX-License-Identifier: Apache-2.0
"""`hillinfer generate`: answer from a long text with the KV cache on a drive."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hillinfer.cli.console import quiet_transformers
from hillinfer.cli.request import (
    STOCK,
    Asking,
    Compare,
    GenerateRequest,
    StoreUse,
    read_document,
    reads_stdin,
)
from hillinfer.generate.prompt import PromptError, PromptStyle, check_text
from hillinfer.generate.sampling import Sampling
from hillinfer.generate.special_tokens import SpecialTokens
from hillinfer.kv.pool_policies import POOL_POLICIES, make_pool_policy
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.settings import IOChoice, ModelName, QuestionReading, Settings
from hillinfer.system.machine import NumberType
from hillinfer.values import ByteSize

_AUTO = "auto"
_DEFAULTS = Settings()


def generate(
    *,
    model: Annotated[
        str,
        typer.Option(help="Registry name, folder, GGUF file, or organisation/name on the hub."),
    ] = DEFAULT_MODEL,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Text to read; - for standard input.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The text itself.")] = None,
    question: Annotated[
        list[str] | None,
        typer.Option(help="Question about the text; give it again to ask several."),
    ] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", help="Ask for questions, a line each, until an end.")
    ] = False,
    prompt_style: Annotated[
        PromptStyle, typer.Option(help="auto uses the model's chat template, plain does not.")
    ] = PromptStyle.AUTO,
    special_tokens: Annotated[
        SpecialTokens,
        typer.Option(
            help="Special tokens in texts and questions, like <|im_end|>: text reads them as "
            "characters, control obeys them."
        ),
    ] = SpecialTokens.TEXT,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Probability mass to draw from.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Tokens to draw from; 0 for all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
    alpha: Annotated[
        float, typer.Option(help="Share of the context that each step selects.")
    ] = _DEFAULTS.alpha,
    max_selected: Annotated[
        int | None, typer.Option(help="Most tokens a step selects; unlimited by default.")
    ] = None,
    kept_sinks: Annotated[
        int, typer.Option(help="First tokens that are always selected.")
    ] = _DEFAULTS.kept_sinks,
    kept_recent: Annotated[
        int, typer.Option(help="Newest tokens that are always selected.")
    ] = _DEFAULTS.kept_recent,
    rule: Annotated[str, typer.Option(help="weight_sum or raw_sum.")] = _DEFAULTS.rule.value,
    scope: Annotated[str, typer.Option(help="layer or kv_head.")] = _DEFAULTS.scope.value,
    query: Annotated[
        str,
        typer.Option(
            help="Tokens are scored with the true query, or a predicted one so that reading "
            "overlaps with computing; auto: what suits the model's family."
        ),
    ] = _DEFAULTS.query.value,
    shadow: Annotated[str, typer.Option(help="auto, int8, int4 or int2.")] = _AUTO,
    dram_budget: Annotated[
        str,
        typer.Option(
            help="64MiB, 2GiB, or 25% of the KV cache; auto: 25% or what a shadow in DRAM needs."
        ),
    ] = _AUTO,
    pool_policy: Annotated[
        str, typer.Option(help=f"Which rows are hot: {', '.join(POOL_POLICIES)}.")
    ] = _DEFAULTS.pool_policy,
    pool_sizes: Annotated[
        str, typer.Option(help="Hot pools of layers: equal, or by measured misses.")
    ] = _DEFAULTS.pool_sizes.value,
    pool_timeline: Annotated[
        Path | None,
        typer.Option(help="CSV of what happens to the pools; see hillinfer-bench pool-picture."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Trace of compute, scoring, reads and copies; see hillinfer-bench trace-picture."
        ),
    ] = None,
    cold_dir: Annotated[
        Path | None, typer.Option(help="Directory on the drive; by default in the user's cache.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="What scores: nvme, golden, core, csim, xrt or pynq.")
    ] = _DEFAULTS.device,
    beta: Annotated[
        str,
        typer.Option(
            help="Host-scored to device-scored segments; 0: the device scores all; auto: by the "
            "rates of this machine."
        ),
    ] = _AUTO,
    beta_model: Annotated[
        str, typer.Option(help=f"What --beta auto makes least: {', '.join(ModelName)}.")
    ] = _DEFAULTS.beta_model.value,
    xclbin: Annotated[
        Path | None, typer.Option(help="Image of the card's kernels, for --device xrt or pynq.")
    ] = None,
    pynq_python: Annotated[
        Path | None,
        typer.Option(
            help="Python of `make pynq-env`, for --device pynq; by default HILLINFER_PYNQ_PYTHON, "
            "or build/pynq-env of the source tree."
        ),
    ] = None,
    io: Annotated[
        str, typer.Option(help=f"How the drive is read: {', '.join(IOChoice)}.")
    ] = _DEFAULTS.io.value,
    block_rows: Annotated[
        int, typer.Option(help="Rows read and attended to at a time.")
    ] = _DEFAULTS.block_rows,
    prefetch_blocks: Annotated[
        int, typer.Option(help="Blocks of rows read before their layer begins.")
    ] = _DEFAULTS.prefetch_blocks,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens of one forward pass.")] = 1024,
    sparse_question: Annotated[
        bool,
        typer.Option("--sparse-question", help="Read the question token by token, as in decode."),
    ] = False,
    dtype: Annotated[
        NumberType, typer.Option(help="auto: the model's own, float32 where a CPU is slow at it.")
    ] = NumberType.AUTO,
    threads: Annotated[int | None, typer.Option(help="Compute threads.")] = None,
    projections: Annotated[
        str,
        typer.Option(help="How linear layers are computed: stock, fused, prepacked, fp16 or int8."),
    ] = STOCK,
    report: Annotated[Path | None, typer.Option(help="Where run.json goes.")] = None,
    save_session: Annotated[
        Path | None,
        typer.Option(
            help="Directory, not there yet, to keep the read document in; without a question "
            "nothing else is done."
        ),
    ] = None,
    session: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a saved document to answer from; with --prompt-file only what "
            "differs is read."
        ),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            envvar="HILLINFER_STORE",
            help="Directory of a store: what it holds of the text is not read again, and what is "
            "read is stored; see hillinfer store.",
        ),
    ] = None,
    store_size: Annotated[
        str | None,
        typer.Option(
            envvar="HILLINFER_STORE_SIZE",
            help="Make the store where there is none yet, of this size, like 200GB.",
        ),
    ] = None,
    reuse: Annotated[
        str,
        typer.Option(
            help="longest: all stored tokens, by groups of 64; exact: what gives the bits of a run "
            "that reads everything."
        ),
    ] = "longest",
    salt: Annotated[
        str,
        typer.Option(
            envvar="HILLINFER_STORE_SALT",
            help="Of a tenant: what is stored with another one is not found.",
        ),
    ] = "",
    compare: Annotated[
        Compare | None, typer.Option(help="Also run the ordinary cache, side by side.")
    ] = None,
) -> None:
    """Answer from a long text; the text goes to standard output, all else to standard error."""
    settings = Settings().changed(
        alpha=alpha,
        max_selected=max_selected,
        kept_sinks=kept_sinks,
        kept_recent=kept_recent,
        rule=rule,
        scope=scope,
        query=query,
        shadow=shadow,
        pool_policy=pool_policy,
        pool_sizes=pool_sizes,
        pool_timeline=pool_timeline,
        trace=trace,
        cold_dir=cold_dir,
        device=device,
        beta=beta,
        beta_model=beta_model,
        xclbin=xclbin,
        pynq_python=pynq_python,
        io=io,
        block_rows=block_rows,
        prefetch_blocks=prefetch_blocks,
    )
    make_pool_policy(pool_policy)
    budget = None if dram_budget == _AUTO else ByteSize.parse(dram_budget)
    sampling = Sampling(temperature, top_k, top_p, seed)
    from_session = session is not None and prompt_file is None and prompt is None
    if interactive and not from_session and reads_stdin(prompt_file, prompt):
        raise PromptError(
            "--interactive takes questions from standard input: give the text with --prompt-file"
        )
    for one in question or ():
        check_text(one, "--question")
    request = GenerateRequest(
        model=model,
        number_type=dtype,
        document=None if from_session else read_document(prompt_file, prompt),
        prompt_style=prompt_style,
        special_tokens=special_tokens,
        questions=tuple(question or ()),
        asking=Asking.INTERACTIVE if interactive else Asking.OPTIONS,
        question_reading=QuestionReading.SINGLY if sparse_question else QuestionReading.CHUNKS,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        settings=settings,
        budget=budget,
        chunk_tokens=prefill_chunk,
        threads=threads,
        report=report,
        compare=compare,
        session=session,
        save_session=save_session,
        projections=projections,
        store=StoreUse.of(store, store_size, reuse, salt),
        prompt_file=None if reads_stdin(prompt_file, prompt) else prompt_file,
    )
    # torch and transformers take seconds to import: help and bad options do not wait for them.
    quiet_transformers()
    from hillinfer.cli.run import run

    run(request)
