# SPDX-License-Identifier: Apache-2.0
"""`hillinfer documents put` and `measure`: documents that come, and what their forms lose."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hillinfer.catalogue.catalogue import Catalogue
from hillinfer.catalogue.records import CatalogueError, KnownDocument, check_stored, document_uses
from hillinfer.cli.console import error_console, quiet_transformers, reading_view
from hillinfer.cli.forms.commands import (
    DocumentName,
    document_facts,
    document_line,
    form,
    form_lines,
    ls,
    pin,
    plan,
    rm,
    unpin,
)
from hillinfer.cli.forms.documents import (
    ReadingBudgetOption,
    loaded_prompts,
    reading_request,
)
from hillinfer.cli.generate import STEPS
from hillinfer.cli.parsing import (
    ColdDirOption,
    Directory,
    DtypeOption,
    Json,
    KeyFileOption,
    KeyringOption,
    ModelOption,
    PassphraseOption,
    PrefillChunkOption,
    PromptStyleOption,
    SaltOption,
    SizeOption,
    SpecialTokensOption,
    ThreadsOption,
    tell,
)
from hillinfer.cli.questions import read_document, reads_stdin
from hillinfer.cli.store import StoreUse, named_by
from hillinfer.errors import PromptError, SettingsError
from hillinfer.generate.prompt import DocumentPrompt, PromptStyle, QuestionPrompt, check_text
from hillinfer.generate.special_tokens import SpecialTokens
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.native.library import native_library
from hillinfer.secrecy.key_sources import key_source
from hillinfer.settings import AUTO
from hillinfer.store.pool_files import insist
from hillinfer.store.store import Store
from hillinfer.store_namespaces import prefix_ids
from hillinfer.system.machine import NumberType

if TYPE_CHECKING:
    from hillinfer.forms.form import Form
    from hillinfer.models.loader import LoadedModel
    from hillinfer.reuse.stored_prompts import StoredPrompts

_ALL = "all"
_PROBES = 4
_INSTRUCTION = "\n\nRepeat the part of the text above that begins with:\n\n"

FormsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--form",
        help=f"To measure, like int4 or snapkv-0.5; give it again for more, {_ALL} for every one. "
        "By default held, int4, int8 and int2, of a short text the first ones.",
    ),
]
ProbesOption = Annotated[
    int | None,
    typer.Option(help="Parts of the text that are asked for, to choose by; by default up to 4."),
]
JudgeOption = Annotated[
    int, typer.Option("--judge", help="Other parts, which only say how good the choice was.")
]
QuestionsOption = Annotated[
    list[str] | None,
    typer.Option("--question", help="A question to measure by too; give it again for more."),
]
SeedOption = Annotated[int, typer.Option(help="Of the places of those parts.")]


def put(
    file: Annotated[Path, typer.Argument(help="Text to read; - for standard input.")],
    *,
    context: typer.Context,
    store: Directory,
    title: Annotated[
        str | None, typer.Option(help="What to call it; by default the file's name.")
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    prompt_style: PromptStyleOption = PromptStyle.AUTO,
    special_tokens: SpecialTokensOption = SpecialTokens.TEXT,
    prefill_chunk: PrefillChunkOption = 1024,
    dram_budget: ReadingBudgetOption = AUTO,
    cold_dir: ColdDirOption = None,
    dtype: DtypeOption = NumberType.AUTO,
    threads: ThreadsOption = None,
    store_size: SizeOption = None,
    forms: FormsOption = None,
    probes: ProbesOption = None,
    judge: JudgeOption = 0,
    questions: QuestionsOption = None,
    seed: SeedOption = 0,
    salt: SaltOption = "",
    key_file: KeyFileOption = None,
    passphrase_file: PassphraseOption = None,
    keyring: KeyringOption = None,
    as_json: Json = False,
) -> None:
    """Read a document into a store, and measure what its forms lose."""
    wishes = _Wishes(probes, judge, tuple(questions or ()), seed)
    key = key_source(key_file, passphrase_file, keyring)
    use = StoreUse.of(store, store_size, "longest", salt, key, insist, named_by(context))
    assert use is not None, "a store is named"
    text = read_document(file, None, "FILE")
    is_stdin = reads_stdin(file, None)
    request = reading_request(
        model=model,
        number_type=dtype,
        document=text,
        prompt_style=prompt_style,
        special_tokens=special_tokens,
        cold_dir=cold_dir,
        dram_budget=dram_budget,
        chunk_tokens=prefill_chunk,
        threads=threads,
        projections=STEPS,
        store=use,
        prompt_file=None if is_stdin else file,
    )
    # Importing torch takes seconds: bad options and an install without the library are told first.
    native_library()
    quiet_transformers()
    wanted = named_forms(forms)
    from hillinfer.cli.run import run

    run(request, context.obj)
    with use.opened() as opened, Catalogue(opened.places) as catalogue:
        loaded, prompts = loaded_prompts(context, opened, model, dtype, salt)
        prompt = DocumentPrompt(loaded.tokenizer, text, prompt_style, special_tokens)
        stored = prompts.stored_key(prompt.document_ids())
        if stored is None:
            raise CatalogueError(
                f"'{file}' has {len(prompt.document_ids())} tokens, and a store keeps whole groups "
                "of 64: give a longer text, or a store with more room"
            )
        stored_key, tokens, seconds = stored
        document = KnownDocument(
            stored_key,
            title or ("" if is_stdin else file.name),
            loaded.name,
            prompts.namespace.digest,
            tokens,
            time.time(),
        )
        ids = prompt.document_ids()[:tokens]
        catalogue.put(document)
        _measure(catalogue, document, loaded, prompts, ids, wanted, wishes, prompt, seconds)
        _tell(opened, catalogue, document, as_json=as_json)


def measure(
    name: DocumentName,
    *,
    context: typer.Context,
    store: Directory,
    model: Annotated[
        str | None, typer.Option(help="Where it lies now; by default where it was put from.")
    ] = None,
    dtype: DtypeOption = NumberType.AUTO,
    forms: FormsOption = None,
    probes: ProbesOption = None,
    judge: JudgeOption = 0,
    questions: QuestionsOption = None,
    prompt_style: PromptStyleOption = PromptStyle.AUTO,
    seed: SeedOption = 0,
    salt: SaltOption = "",
    key_file: KeyFileOption = None,
    passphrase_file: PassphraseOption = None,
    keyring: KeyringOption = None,
    as_json: Json = False,
) -> None:
    """Measure forms of a document anew, or others, or by questions that users asked."""
    wishes = _Wishes(probes, judge, tuple(questions or ()), seed)
    key = key_source(key_file, passphrase_file, keyring)
    with Store(store, raising=insist, key=key) as opened, Catalogue(opened.places) as catalogue:
        document = catalogue.find(name)
        check_stored(document, document_uses(opened.database, [document.key], time.time()))
        native_library()
        quiet_transformers()
        wanted = named_forms(forms)
        loaded, prompts = loaded_prompts(context, opened, model or document.model, dtype, salt)
        from hillinfer.catalogue.measuring import check_namespace
        from hillinfer.generate.prompt import PromptForm

        check_namespace(document, prompts.namespace, loaded.name)
        ids = prefix_ids(opened, document.key)
        prompt = QuestionPrompt(loaded.tokenizer, PromptForm.of(loaded.tokenizer, prompt_style))
        known = 0.0 if document.resting is None else document.resting.text
        _measure(catalogue, document, loaded, prompts, ids, wanted, wishes, prompt, known)
        _tell(opened, catalogue, document, as_json=as_json)


def named_forms(names: Sequence[str] | None) -> list[Form] | None:
    """Return forms by their names; None where none is named, which means the usual ones.

    Raises SettingsError where there is no such form, or one whose share is out of range.
    """
    from hillinfer.forms.table import make_form, usual_forms

    if names is None:
        return None
    if _ALL in names:
        return [one for one in usual_forms() if one.name != "text"]
    found = [make_form(name) for name in dict.fromkeys(names)]
    if any(one.name == "text" for one in found):
        raise SettingsError("form='text' is all there was: it needs no measuring, choose another")
    return found


# --- inside ---


@dataclass(frozen=True)
class _Wishes:
    """What options say of probes; SettingsError where nothing would be measured by them.

    PromptError where a question is empty or no UTF-8: a document is read before it is asked.
    """

    probes: int | None
    judge: int
    questions: tuple[str, ...]
    seed: int

    @property
    def is_usual(self) -> bool:
        """Whether nobody says how much is to be read."""
        return self.probes is None and not self.questions

    def __post_init__(self) -> None:
        if self.judge < 0 or (self.probes is not None and self.probes < 0):
            raise SettingsError(
                f"--probes {self.probes}, --judge {self.judge}: give 0 or more of each"
            )
        if self.probes == 0 and not self.questions:
            raise SettingsError(
                "--probes 0 and no --question: nothing would be measured; give one of them"
            )
        if self.seed < 0:
            raise SettingsError(f"--seed {self.seed}: give 0 or more")
        for one in self.questions:
            check_text(one, "--question")
            if not one.strip():
                raise PromptError("a question is empty: write it after --question")


def _measure(
    catalogue: Catalogue,
    document: KnownDocument,
    loaded: LoadedModel,
    prompts: StoredPrompts,
    ids: Sequence[int],
    named: Sequence[Form] | None,
    wishes: _Wishes,
    prompt: QuestionPrompt,
    prefill_seconds: float,
) -> None:
    """Measure a document's forms and keep what was found."""
    from hillinfer.catalogue.measuring import (
        ProbeWishes,
        measure_document,
        usual_form_names,
        usual_wishes,
    )
    from hillinfer.forms.probes import ProbeSizes
    from hillinfer.forms.table import make_form

    usual = usual_form_names(len(ids))
    forms = [make_form(one) for one in usual] if named is None else named
    parts = len(ids) // ProbeSizes().part - wishes.judge
    count = min(_PROBES, max(parts, 1)) if wishes.probes is None else wishes.probes
    instruction = loaded.tokenizer.encode(_INSTRUCTION, add_special_tokens=False)
    asked = tuple(tuple(prompt.question_ids(one)) for one in wishes.questions)
    told = ProbeWishes(count, wishes.judge, tuple(instruction), asked, wishes.seed)
    if wishes.is_usual:
        told = usual_wishes(
            len(ids),
            len(forms) - 1,
            instruction,
            wishes.judge,
            wishes.seed,
            # Whoever names forms wants to know of them.
            math.inf if named is not None else prefill_seconds or math.inf,
        )
    with reading_view(error_console()).stage("measure", len(forms) * len(ids)) as advance:

        def measured(done: int) -> None:
            advance(done * len(ids))

        found = measure_document(loaded.model, prompts, ids, forms, told, prefill_seconds, measured)
    catalogue.put(replace(document, resting=found.resting, measured=found.forms))


def _tell(store: Store, catalogue: Catalogue, document: KnownDocument, *, as_json: bool) -> None:
    known = catalogue.find(document.key.hex())
    use = document_uses(store.database, [known.key], time.time()).get(known.key)
    lines = [document_line(known, use), *form_lines(known)]
    tell(document_facts(known, use), "\n".join(lines), as_json=as_json)


CATALOGUE_COMMANDS = (ls, put, measure, pin, unpin, form, plan, rm)
