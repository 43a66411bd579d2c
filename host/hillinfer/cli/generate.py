# SPDX-License-Identifier: Apache-2.0
"""`hillinfer generate`: its options, validated, and the command over them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hillinfer.cli.console import quiet_transformers
from hillinfer.cli.parsing import (
    AcceptOption,
    AlphaOption,
    ColdDirOption,
    DtypeOption,
    EncryptOption,
    ExactFloorOption,
    ExactOption,
    HelpAll,
    KeyFileOption,
    KeyringOption,
    MaxNewTokensOption,
    ModelOption,
    PassphraseOption,
    PrefillChunkOption,
    ProjectionsOption,
    PromptStyleOption,
    QueryOption,
    ReuseOption,
    SaltOption,
    SeedOption,
    SizeOption,
    SpecialTokensOption,
    StoreOption,
    TemperatureOption,
    ThreadsOption,
)
from hillinfer.cli.prune import PruneOption, PruneUse, RankerOption
from hillinfer.cli.questions import read_document, reads_stdin
from hillinfer.cli.store import StoreUse, named_by
from hillinfer.errors import PromptError, SettingsError
from hillinfer.generate.prompt import PromptStyle, check_text
from hillinfer.generate.special_tokens import SpecialTokens
from hillinfer.generate.tokens import Sampling
from hillinfer.kv.pool_policies import POOL_POLICIES, make_pool_policy
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.native.library import native_library
from hillinfer.secrecy.key_sources import key_source
from hillinfer.settings import AUTO, IOChoice, ModelName, QuestionReading, Settings
from hillinfer.store.pool_files import insist
from hillinfer.system.machine import NumberType
from hillinfer.values import ByteSize, check_threads

# --- The request ---

STEPS, STOCK = "steps", "stock"
# With these a document's rows are those of the model alone.
PLAIN = (STEPS, STOCK)


class Compare(StrEnum):
    """What a run is compared with."""

    FULL = "full"


class Asking(StrEnum):
    """Where questions come from; from nowhere: the document is read and nothing is answered."""

    OPTIONS = "options"
    INTERACTIVE = "interactive"
    NOWHERE = "nowhere"


@dataclass(frozen=True)
class GenerateRequest:
    """One run of `hillinfer generate`.

    Raises SettingsError where a number is out of range.

    Parameters
    ----------
    model, number_type
        What to load, and in which type.
    document, prompt_style
        What to read, None where a session holds it, and whether it goes through the chat template.
    special_tokens
        How those in the document and in questions are read.
    questions
        About the document; empty where it is the whole prompt.
    asking, question_reading
        See the enumerations.
    max_new_tokens, sampling
        Of every answer.
    settings
        Of the cache, without the budget.
    budget
        DRAM budget; None for the default.
    chunk_tokens
        Tokens of one forward pass of prefill.
    threads
        Compute threads; None for torch's own choice.
    report
        Where `run.json` goes; None for nowhere.
    compare
        None for no comparison.
    session, save_session
        Directories of the session to use and of the one to save; None for none.
    projections
        Name in the table of projections: how linear layers are computed.
    store
        The store to look the document up in; None for none.
    prompt_file
        Where the document was read from; None where it was no file.
    prune
        How deeper layers are to see fewer tokens of the prompt; None for all of them.
    """

    model: str
    number_type: NumberType
    document: str | None
    prompt_style: PromptStyle
    questions: tuple[str, ...]
    asking: Asking
    question_reading: QuestionReading
    max_new_tokens: int
    sampling: Sampling
    settings: Settings
    budget: ByteSize | None
    chunk_tokens: int
    threads: int | None
    report: Path | None
    compare: Compare | None
    session: Path | None = None
    save_session: Path | None = None
    projections: str = STEPS
    store: StoreUse | None = None
    prompt_file: Path | None = None
    special_tokens: SpecialTokens = SpecialTokens.TEXT
    prune: PruneUse | None = None

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        for name, value in (
            ("max_new_tokens", self.max_new_tokens),
            ("prefill_chunk", self.chunk_tokens),
        ):
            if value < 1:
                raise SettingsError(f"{name}={value} must be at least 1")
        check_threads(self.threads)
        if self.questions and self.asking is Asking.INTERACTIVE:
            raise SettingsError("--question and --interactive exclude each other: give one")
        if self.compare and self.asking is Asking.INTERACTIVE:
            raise SettingsError("--compare full needs its questions beforehand: use --question")

        if self.document is None and not self.asks:
            raise SettingsError("--session needs something to answer: add --question")
        if self.document is None and self.save_session is not None:
            raise SettingsError(
                "--save-session needs a document to read: give it with --prompt-file"
            )
        if self.projections not in PLAIN and (self.session or self.save_session):
            raise SettingsError(
                f"--projections {self.projections} computes keys and values a little differently "
                f"than the model a session belongs to: use --projections {STEPS} with sessions"
            )
        if self.prune and self.session:
            raise SettingsError(
                "--prune has nothing to leave out of a session, which has been read: use it "
                "without --session"
            )
        if self.compare and self.only_reads:
            raise SettingsError("--compare full needs something to answer: add --question")

    @property
    def asks(self) -> bool:
        """Whether questions follow the document."""
        return bool(self.questions) or self.asking is Asking.INTERACTIVE

    @property
    def only_reads(self) -> bool:
        """Whether the document is read and kept and nothing is generated."""
        saves = self.save_session is not None and not self.asks
        return saves or self.asking is Asking.NOWHERE

    @property
    def forks(self) -> int:
        """Forks of the document's cache alive at a time: the last question needs none."""
        several = self.asking is Asking.INTERACTIVE or len(self.questions) > 1
        return int(several or self.completes)

    @property
    def completes(self) -> bool:
        """Whether a document that is read in stages is read whole in the end, to be kept."""
        return self.prune is not None and bool(self.save_session or self.store)


# --- The command ---

_DEFAULTS = Settings()
# The options that people need; the help shows the others where all are asked for.
SHOWN = frozenset(
    {
        "model",
        "prompt_file",
        "prompt",
        "question",
        "interactive",
        "max_new_tokens",
        "temperature",
        "alpha",
        "dram_budget",
        "cold_dir",
        "store",
        "report",
        "help_all",
    }
)


def generate(
    *,
    context: typer.Context,
    model: ModelOption = DEFAULT_MODEL,
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
    prompt_style: PromptStyleOption = PromptStyle.AUTO,
    special_tokens: SpecialTokensOption = SpecialTokens.TEXT,
    max_new_tokens: MaxNewTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_p: Annotated[float, typer.Option(help="Probability mass to draw from.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Tokens to draw from; 0 for all.")] = 0,
    seed: SeedOption = 0,
    alpha: AlphaOption = AUTO,
    max_selected: Annotated[
        int | None, typer.Option(help="Most tokens a step selects; unlimited by default.")
    ] = None,
    exact: ExactOption = AUTO,
    exact_floor: ExactFloorOption = _DEFAULTS.exact_floor,
    kept_sinks: Annotated[
        int, typer.Option(help="First tokens that are always selected.")
    ] = _DEFAULTS.kept_sinks,
    kept_recent: Annotated[
        int, typer.Option(help="Newest tokens that are always selected.")
    ] = _DEFAULTS.kept_recent,
    rule: Annotated[str, typer.Option(help="weight_sum or raw_sum.")] = _DEFAULTS.rule.value,
    scope: Annotated[str, typer.Option(help="layer or kv_head.")] = _DEFAULTS.scope.value,
    query: QueryOption = _DEFAULTS.query.value,
    shadow: Annotated[str, typer.Option(help="auto, int8, int4 or int2.")] = AUTO,
    dram_budget: Annotated[
        str,
        typer.Option(
            help="64MiB, 2GiB, or 25% of the KV cache; auto: 25% or what a shadow in DRAM needs."
        ),
    ] = AUTO,
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
    cold_dir: ColdDirOption = None,
    encrypt_cold_pool: EncryptOption = _DEFAULTS.encrypt_cold_pool.value,
    device: Annotated[
        str, typer.Option(help="What scores: nvme, golden, core, csim, xrt or pynq.")
    ] = _DEFAULTS.device,
    beta: Annotated[
        str,
        typer.Option(
            help="Host-scored to device-scored segments; 0: the device scores all; auto: by the "
            "rates of this machine."
        ),
    ] = AUTO,
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
    prefill_chunk: PrefillChunkOption = 1024,
    prune: PruneOption = None,
    prune_ranker: RankerOption = "weights",
    sparse_question: Annotated[
        bool,
        typer.Option("--sparse-question", help="The same as --question-reading singly."),
    ] = False,
    question_reading: Annotated[
        QuestionReading | None,
        typer.Option(
            help="chunks: question tokens attend to all; singly: each selects, as in decode; "
            "one-set: a chunk attends to one selected set; auto: whichever rates say is soonest "
            "behind a store's document. By default chunks, or singly where that is sooner there."
        ),
    ] = None,
    dtype: DtypeOption = NumberType.AUTO,
    threads: ThreadsOption = None,
    projections: ProjectionsOption = STEPS,
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
    store: StoreOption = None,
    store_size: SizeOption = None,
    reuse: ReuseOption = "longest",
    salt: SaltOption = "",
    store_accept: AcceptOption = None,
    key_file: KeyFileOption = None,
    passphrase_file: PassphraseOption = None,
    keyring: KeyringOption = None,
    store_strict: Annotated[
        bool, typer.Option("--store-strict", help="End where the store fails, for tests.")
    ] = False,
    compare: Annotated[
        Compare | None, typer.Option(help="Also run the ordinary cache, side by side.")
    ] = None,
    help_all: HelpAll = False,
) -> None:
    """Answer from a long text; the text goes to standard output, all else to standard error."""
    settings = Settings().changed(
        alpha=alpha,
        max_selected=max_selected,
        exact=exact,
        exact_floor=exact_floor,
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
        encrypt_cold_pool=encrypt_cold_pool,
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
        question_reading=_question_reading(question_reading, sparse=sparse_question),
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature, top_k, top_p, seed),
        settings=settings,
        budget=None if dram_budget == AUTO else ByteSize.parse(dram_budget),
        chunk_tokens=prefill_chunk,
        threads=threads,
        report=report,
        compare=compare,
        session=session,
        save_session=save_session,
        projections=projections,
        store=StoreUse.of(
            store,
            store_size,
            reuse,
            salt,
            key_source(key_file, passphrase_file, keyring),
            insist if store_strict else None,
            named_by(context),
            store_accept,
        ),
        prompt_file=None if reads_stdin(prompt_file, prompt) else prompt_file,
        prune=None if prune is None else PruneUse(prune, prune_ranker),
    )
    # Importing torch takes seconds: bad options and an install without the library are told first.
    native_library()
    quiet_transformers()
    from hillinfer.cli.run import run

    run(request, context.obj)


def _question_reading(named: QuestionReading | None, *, sparse: bool) -> QuestionReading:
    """Return how questions are read; SettingsError where both options say otherwise."""
    if sparse and named not in (None, QuestionReading.SINGLY):
        raise SettingsError(
            f"--sparse-question means --question-reading singly, and {named} is named: give one"
        )
    return QuestionReading.SINGLY if sparse else named or QuestionReading.CHUNKS
