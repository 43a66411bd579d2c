# SPDX-License-Identifier: Apache-2.0
"""`hillinfer store put`, `export` and `import`: documents that go into a store and out of it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hillinfer.cli.console import (
    error_console,
    panics_unsaid,
    quiet_transformers,
    reading_view,
)
from hillinfer.cli.generate import STEPS, Asking, GenerateRequest
from hillinfer.cli.parsing import (
    AcceptOption,
    ColdDirOption,
    Directory,
    DtypeOption,
    Json,
    KeyFileOption,
    KeyringOption,
    ModelOption,
    PassphraseOption,
    PrefillChunkOption,
    ProjectionsOption,
    PromptStyleOption,
    ReuseOption,
    SaltOption,
    SizeOption,
    SpecialTokensOption,
    StoredName,
    ThreadsOption,
    tell,
)
from hillinfer.cli.questions import read_document, reads_stdin
from hillinfer.cli.store import StoreUse, named_by
from hillinfer.errors import SettingsError
from hillinfer.generate.prompt import PromptStyle
from hillinfer.generate.special_tokens import SpecialTokens
from hillinfer.generate.tokens import Sampling
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.native.library import native_library
from hillinfer.secrecy.key_sources import key_source
from hillinfer.settings import AUTO, QuestionReading, Settings
from hillinfer.store.pool_files import StoreError, insist
from hillinfer.store.store import Store
from hillinfer.store_namespaces import token_ids
from hillinfer.system.files import check_apart, check_outside
from hillinfer.system.machine import NumberType
from hillinfer.values import ByteSize, format_bytes

if TYPE_CHECKING:
    from hillinfer.models.loader import LoadedModel
    from hillinfer.reuse.stored_prompts import StoredPrompts

# Of one text, and not of all that a program has open.
ReadingBudgetOption = Annotated[
    str,
    typer.Option(
        "--dram-budget", help="64MiB, 2GiB, or 25% of the KV cache, while the text is read."
    ),
]


def put(
    *,
    context: typer.Context,
    store: Directory,
    model: ModelOption = DEFAULT_MODEL,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Text to read; - for standard input.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The text itself.")] = None,
    prompt_style: PromptStyleOption = PromptStyle.AUTO,
    special_tokens: SpecialTokensOption = SpecialTokens.TEXT,
    prefill_chunk: PrefillChunkOption = 1024,
    dram_budget: ReadingBudgetOption = AUTO,
    cold_dir: ColdDirOption = None,
    dtype: DtypeOption = NumberType.AUTO,
    threads: ThreadsOption = None,
    projections: ProjectionsOption = STEPS,
    store_size: SizeOption = None,
    reuse: ReuseOption = "longest",
    salt: SaltOption = "",
    store_accept: AcceptOption = None,
    key_file: KeyFileOption = None,
    passphrase_file: PassphraseOption = None,
    keyring: KeyringOption = None,
    as_json: Json = False,
) -> None:
    """Read a document into a store, ahead of its questions."""
    # Nothing is answered that a failure could not cost.
    key = key_source(key_file, passphrase_file, keyring)
    named = named_by(context)
    use = StoreUse.of(store, store_size, reuse, salt, key, insist, named, store_accept)
    request = reading_request(
        model=model,
        number_type=dtype,
        document=read_document(prompt_file, prompt),
        prompt_style=prompt_style,
        special_tokens=special_tokens,
        cold_dir=cold_dir,
        dram_budget=dram_budget,
        chunk_tokens=prefill_chunk,
        threads=threads,
        projections=projections,
        store=use,
        prompt_file=None if reads_stdin(prompt_file, prompt) else prompt_file,
    )
    # Importing torch takes seconds: bad options and an install without the library are told first.
    native_library()
    quiet_transformers()
    from hillinfer.cli.run import run

    told = run(request, context.obj).store
    assert told is not None, "a document was read and a store is named"
    stored, refused = told.stored_tokens, told.refused_chunks
    line = (
        f"{told.found_tokens + stored} of {told.prompt_tokens} tokens are stored, {stored} of "
        f"them new{f', {refused} chunks refused' * (refused > 0)}"
    )
    tell(asdict(told), line, as_json=as_json)


def reading_request(
    *,
    cold_dir: Path | None,
    dram_budget: str,
    store: StoreUse | None,
    **given: Any,
) -> GenerateRequest:
    """Return a run that reads a document into a store and answers nothing.

    `cold_dir` and `dram_budget` are as their options say, the others as in `GenerateRequest`.
    Raises SettingsError where one of them is out of range.
    """
    return GenerateRequest(
        questions=(),
        asking=Asking.NOWHERE,
        question_reading=QuestionReading.CHUNKS,
        max_new_tokens=1,
        sampling=Sampling(),
        settings=Settings().changed(cold_dir=cold_dir),
        budget=None if dram_budget == AUTO else ByteSize.parse(dram_budget),
        report=None,
        compare=None,
        store=store,
        **given,
    )


def export(
    context: typer.Context,
    name: StoredName,
    directory: Annotated[Path, typer.Argument(help="Of the session; not there yet, or empty.")],
    *,
    store: Directory,
    model: ModelOption = DEFAULT_MODEL,
    dtype: DtypeOption = NumberType.AUTO,
    shadow: Annotated[str, typer.Option(help="How keys are coded: int8, int4 or int2.")] = "int4",
    salt: SaltOption = "",
    key_file: KeyFileOption = None,
    passphrase_file: PassphraseOption = None,
    keyring: KeyringOption = None,
    as_json: Json = False,
) -> None:
    """Write a stored prompt as a session, for generate --session and load_session."""
    check_outside((("DIR", directory),), (("--store", store),))
    mode = Settings().changed(shadow=shadow).shadow
    if mode is None:
        raise SettingsError("--shadow auto needs a cache to suit: give int8, int4 or int2")
    # torch takes seconds to import: help and bad options do not wait for it.
    from hillinfer.sessions.writing import prepare_target

    prepare_target(directory)
    with Store(store, key=key_source(key_file, passphrase_file, keyring)) as opened:
        ids = token_ids(opened, name)
        loaded, prompts = loaded_prompts(context, opened, model, dtype, salt)
        found = opened.find(prompts.namespace, ids, salt.encode())
        if found is None or found.tokens < len(ids):
            raise StoreError(
                f"'{name}' was not stored by {loaded.name} in {loaded.model.dtype}: give the "
                "--model, --dtype and --salt that stored it; what was stored for --reuse exact "
                "or by --projections is no session"
            )
        from hillinfer.reuse.session_exchange import export_session
        from hillinfer.sessions.fingerprint import ModelIdentity

        identity = ModelIdentity(loaded.model).fingerprint(mode, loaded.tokenizer)
        view = reading_view(error_console())
        with found, view.stage("export", found.tokens) as advance:
            told = export_session(found, directory, identity, advance)
    tell(
        {"directory": str(directory), **asdict(told)},
        f"{directory}: a session of {told.tokens} tokens, {format_bytes(told.byte_count)}",
        as_json=as_json,
    )


def import_(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(help="Of the session; it stays as it is.")],
    *,
    store: Directory,
    model: ModelOption = DEFAULT_MODEL,
    dtype: DtypeOption = NumberType.AUTO,
    salt: SaltOption = "",
    key_file: KeyFileOption = None,
    passphrase_file: PassphraseOption = None,
    keyring: KeyringOption = None,
    as_json: Json = False,
) -> None:
    """Store what a session holds of its document; rows of answers are left out."""
    check_apart((("DIR", directory), ("--store", store)))
    from hillinfer.sessions.opening import SavedSession

    key = key_source(key_file, passphrase_file, keyring)
    with Store(store, raising=insist, key=key) as opened, SavedSession(directory) as session:
        loaded, prompts = loaded_prompts(context, opened, model, dtype, salt)
        from hillinfer.reuse.session_exchange import import_session
        from hillinfer.sessions.fingerprint import ModelIdentity

        own = session.manifest
        identity = ModelIdentity(loaded.model).fingerprint(own.shadow, loaded.tokenizer)
        own.fingerprint.check(identity, directory)
        with reading_view(error_console()).stage("import", session.tokens) as advance:
            told = import_session(opened, session, prompts.namespace, salt.encode(), advance)
    stored = told.found_tokens + told.stored_tokens
    tell(
        asdict(told),
        f"{stored} of {told.tokens} tokens are stored, {told.stored_tokens} of them new; "
        f"{told.dense_tokens} were read densely",
        as_json=as_json,
    )


def loaded_prompts(
    context: typer.Context, store: Store, model: str, dtype: NumberType, salt: str
) -> tuple[LoadedModel, StoredPrompts]:
    """Return a model, and the store as it uses it; ModelError where there is no such model."""
    quiet_transformers()
    from hillinfer.cli.preflight import Surroundings
    from hillinfer.models.loader import ModelOutline
    from hillinfer.reuse.stored_prompts import StoredPrompts

    around = context.obj or Surroundings()
    source = around.locate(model, error_console().print)
    with panics_unsaid():
        outline = ModelOutline.read(source, dtype)
    loaded = outline.load()
    return loaded, StoredPrompts(store, loaded.model, salt.encode())


DOCUMENT_COMMANDS = (put, export, import_)
