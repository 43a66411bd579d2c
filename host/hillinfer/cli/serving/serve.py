# SPDX-License-Identifier: Apache-2.0
"""`hillinfer serve`: its options, and a model behind OpenAI's interface."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hillinfer.catalogue.planning import DocumentRules
from hillinfer.cli.console import error_console, panics_unsaid, quiet_transformers
from hillinfer.cli.generate import PLAIN, STEPS
from hillinfer.cli.parsing import (
    AcceptOption,
    AlphaOption,
    BudgetOption,
    ColdDirOption,
    DtypeOption,
    EncryptOption,
    ExactFloorOption,
    ExactOption,
    HelpAll,
    KeyFileOption,
    KeyringOption,
    ModelOption,
    PassphraseOption,
    PrefillChunkOption,
    ProjectionsOption,
    QueryOption,
    ReuseOption,
    SaltOption,
    SizeOption,
    StoreOption,
    ThreadsOption,
    whole_bytes,
)
from hillinfer.cli.store import StoreUse, named_by, opened_store
from hillinfer.errors import SettingsError
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.native.library import native_library
from hillinfer.secrecy.key_sources import key_source
from hillinfer.serve.rules import KEY_VARIABLE, ApiKeys, ServerRules
from hillinfer.settings import AUTO, Settings
from hillinfer.system.machine import NumberType
from hillinfer.values import ByteSize, check_threads

if TYPE_CHECKING:
    from hillinfer.models.sources import ModelSource
    from hillinfer.serve.served_model import ServedModel

# What the extra `serve` brings.
_MODULES = ("fastapi", "uvicorn", "prometheus_client", "python_multipart")
_DEFAULTS, _RULES = Settings(), ServerRules()
# As in `hillinfer generate`.
SHOWN = frozenset(
    {
        "model",
        "host",
        "port",
        "api_key_file",
        "parallel",
        "context_tokens",
        "files",
        "alpha",
        "dram_budget",
        "cold_dir",
        "store",
        "store_size",
        "help_all",
    }
)


class DocumentsKept(StrEnum):
    """Whether a program that answers keeps stored documents ready."""

    PLACED = "placed"
    RESTING = "resting"


def rules_of(kept: DocumentsKept, floor: float, drive: str | None) -> DocumentRules | None:
    """Return how documents are placed; SettingsError where the floor is out of range."""
    size = ByteSize(byte_count=0) if drive is None else ByteSize.parse(drive)
    if size.byte_count is None:
        raise SettingsError(f"document drive={drive} is a share: give bytes, like 4GiB")
    rules = DocumentRules(floor, drive_budget=size.byte_count)
    return rules if kept is DocumentsKept.PLACED else None


@dataclass(frozen=True)
class ServeRequest:
    """One run of `hillinfer serve`.

    `store` is where prompts are looked up, None for nowhere; `documents` of it rest where None;
    `threads` is None for torch's own choice; `projections` says how linear layers are computed.
    """

    model: str
    number_type: NumberType
    settings: Settings
    rules: ServerRules
    store: StoreUse | None
    threads: int | None
    projections: str
    documents: DocumentRules | None = None

    def located(self) -> ModelSource:
        """Return where the model's files lie, fetched where they are not on this machine yet.

        The main thread's, which signals end while it waits for a network.
        """
        from hillinfer.models.sources import ModelSource

        return ModelSource.locate(self.model, error_console().print)

    @contextmanager
    def opened(self, source: ModelSource) -> Iterator[ServedModel]:
        """Load the model and open the store; entered in the thread that uses them."""
        import torch

        from hillinfer.models.loader import ModelOutline
        from hillinfer.projections.attachment import ProjectionAttachment
        from hillinfer.projections.ways import make_projections
        from hillinfer.serve.served_model import StoreOfServer, served_model

        console = error_console()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        way = make_projections(self.projections)
        store, _ = opened_store(self.store, None, console)
        try:
            with panics_unsaid():
                outline = ModelOutline.read(source, self.number_type)
            loaded = outline.load()
            steps = ProjectionAttachment(loaded.model, way).steps
            stored = None
            if store is not None and self.store is not None:
                made_by = {} if self.projections in PLAIN else {"projections": self.projections}
                stored = StoreOfServer(
                    *(store, self.store.reuse, self.store.salt, made_by, self.documents),
                    self.store.accept,
                )
            with served_model(loaded, self.settings, self.rules, stored, steps) as served:
                yield served
        finally:
            if store is not None:
                store.close()


def serve(
    *,
    context: typer.Context,
    model: ModelOption = DEFAULT_MODEL,
    host: Annotated[
        str, typer.Option(help="Address to listen at; others than this machine's need a key.")
    ] = _RULES.host,
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = _RULES.port,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help=f"API keys, one a line; {KEY_VARIABLE} has another one."),
    ] = None,
    alias: Annotated[
        str | None, typer.Option(help="What clients call the model; its own name by default.")
    ] = None,
    parallel: Annotated[
        int,
        typer.Option(help="Sequences that decode together; 1 gives each request its own bits."),
    ] = _RULES.parallel,
    queue: Annotated[
        int, typer.Option(help="Requests that wait at most; others get status 429.")
    ] = _RULES.queue,
    context_tokens: Annotated[
        int | None,
        typer.Option(
            "--context", help="Most tokens of prompt and answer; by default the model's positions."
        ),
    ] = None,
    answer_tokens: Annotated[
        int, typer.Option(help="Most tokens of an answer whose request names no number.")
    ] = _RULES.answer_tokens,
    max_body: Annotated[str, typer.Option(help="Largest request.")] = "32MiB",
    files: Annotated[
        Path | None,
        typer.Option(help="Directory that files of clients are kept in; else until the end."),
    ] = None,
    max_files: Annotated[str, typer.Option(help="Most that all files of clients take.")] = "1GiB",
    max_seconds: Annotated[
        float, typer.Option(help="Most time of a request, waiting included.")
    ] = _RULES.seconds,
    drain_seconds: Annotated[
        float, typer.Option(help="How long requests may go on after SIGTERM.")
    ] = _RULES.drain_seconds,
    prefill_chunk: PrefillChunkOption = _RULES.chunk_tokens,
    alpha: AlphaOption = AUTO,
    exact: ExactOption = AUTO,
    exact_floor: ExactFloorOption = _DEFAULTS.exact_floor,
    query: QueryOption = _DEFAULTS.query.value,
    shadow: Annotated[str, typer.Option(help="int8, int4 or int2.")] = "int4",
    dram_budget: BudgetOption = "25%",
    cold_dir: ColdDirOption = None,
    encrypt_cold_pool: EncryptOption = _DEFAULTS.encrypt_cold_pool.value,
    dtype: DtypeOption = NumberType.AUTO,
    threads: ThreadsOption = None,
    projections: ProjectionsOption = STEPS,
    store: StoreOption = None,
    store_size: SizeOption = None,
    reuse: ReuseOption = "longest",
    documents: Annotated[
        DocumentsKept,
        typer.Option(
            help="placed: documents that were put and measured are kept in memory where they gain "
            "most, while nobody waits; resting: each is read from the store."
        ),
    ] = DocumentsKept.PLACED,
    document_floor: Annotated[
        float, typer.Option(help="Least quality of a form that a document is placed as.")
    ] = DocumentRules.floor,
    document_drive: Annotated[
        str | None,
        typer.Option(
            help="Most that packed forms of documents take on each of the store's drives, like "
            "4GiB; by default, and of an encrypted store, none."
        ),
    ] = None,
    salt: SaltOption = "",
    store_accept: AcceptOption = None,
    key_file: KeyFileOption = None,
    passphrase_file: PassphraseOption = None,
    keyring: KeyringOption = None,
    help_all: HelpAll = False,
) -> None:
    """Answer requests of OpenAI's clients; ends at SIGTERM, when those that are there are answered.

    Where it listens goes to standard output, a JSON line for each request to standard error.
    """
    settings = Settings().changed(
        alpha=alpha,
        exact=exact,
        exact_floor=exact_floor,
        query=query,
        shadow=shadow,
        dram_budget=dram_budget,
        cold_dir=cold_dir,
        encrypt_cold_pool=encrypt_cold_pool,
    )
    check_threads(threads)
    request = ServeRequest(
        model=model,
        number_type=dtype,
        settings=settings,
        rules=ServerRules(
            host=host,
            port=port,
            keys=ApiKeys.read(api_key_file, os.environ),
            parallel=parallel,
            queue=queue,
            chunk_tokens=prefill_chunk,
            answer_tokens=answer_tokens,
            context_tokens=context_tokens,
            body_bytes=whole_bytes(max_body, "--max-body like 32MiB"),
            files=files,
            files_bytes=whole_bytes(max_files, "--max-files like 32MiB"),
            seconds=max_seconds,
            drain_seconds=drain_seconds,
            alias=alias,
        ),
        store=StoreUse.of(
            store,
            store_size,
            reuse,
            salt,
            key_source(key_file, passphrase_file, keyring),
            named_by=named_by(context),
            accept=store_accept,
        ),
        threads=threads,
        projections=projections,
        documents=rules_of(documents, document_floor, document_drive),
    )
    # Said before anything that takes time.
    native_library()
    check_extra()
    quiet_transformers()
    from hillinfer.serve.http.running import Server, check_address
    from hillinfer.serve.http.telemetry import Spans

    check_address(request.rules)
    spans = Spans.of_variables(os.environ)
    try:
        opening = partial(request.opened, request.located())
        Server(request.rules, opening, say=partial(print, flush=True), spans=spans).run()
    finally:
        spans.close()


def check_extra() -> None:
    """Refuse, by SettingsError, to go on without any module that the extra `serve` brings."""
    missing = [name for name in _MODULES if find_spec(name) is None]
    if missing:
        raise SettingsError(
            f"{', '.join(missing)} is not installed: pip install 'hillinfer[serve]'"
        )
