# SPDX-License-Identifier: Apache-2.0
"""`hillinfer documents`: looking at documents of a store, choosing their forms, and plans."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hillinfer.catalogue.catalogue import Catalogue
from hillinfer.catalogue.planning import DRAM, Plan, PlanRules, make_plan, options_of, tier_of
from hillinfer.catalogue.records import (
    RESTING,
    CatalogueError,
    DocumentUse,
    KnownDocument,
    check_stored,
    document_uses,
    with_expected_forms,
)
from hillinfer.cli.forms.measuring import MEASURING_COMMANDS
from hillinfer.cli.forms.shown import (
    document_facts,
    document_line,
    form_lines,
    plan_facts,
    plan_lines,
)
from hillinfer.cli.store_keys import Directory, Json, tell
from hillinfer.errors import SettingsError
from hillinfer.placement.options import UTILITIES
from hillinfer.placement.policies import DEFAULT_PLACEMENT, PLACEMENT_POLICIES
from hillinfer.secrecy.key_sources import WithoutKey
from hillinfer.store.store import Store
from hillinfer.values import ByteSize, format_bytes

DocumentName = Annotated[
    str, typer.Argument(help="First digits of its name, as documents ls has it, or its title.")
]


@dataclass(frozen=True)
class OpenedCatalogue:
    """A catalogue, its documents, and their uses by the store's index."""

    catalogue: Catalogue
    documents: tuple[KnownDocument, ...]
    uses: Mapping[bytes, DocumentUse]


@contextmanager
def opened_catalogue(directory: Path) -> Iterator[OpenedCatalogue]:
    """Open the catalogue of a store, whose key is not needed for that."""
    with Store(directory, key=WithoutKey()) as store, Catalogue(store.places) as catalogue:
        documents = tuple(with_expected_forms(catalogue.documents()))
        keys = [one.key for one in documents]
        yield OpenedCatalogue(
            catalogue, documents, document_uses(store.database, keys, time.time())
        )


# --- Looking ---


def ls(
    name: Annotated[
        str | None, typer.Argument(help="Of one document: each form that was measured, too.")
    ] = None,
    *,
    store: Directory,
    as_json: Json = False,
) -> None:
    """List documents: form, tier, bytes, measured quality, expected first token, hits."""
    with opened_catalogue(store) as opened:
        shown = opened.documents if name is None else (opened.catalogue.find(name),)
    if as_json:
        print(
            json.dumps([document_facts(one, opened.uses.get(one.key)) for one in shown], indent=2)
        )
        return
    for one in shown:
        print(document_line(one, opened.uses.get(one.key)))
        for line in form_lines(one) if name is not None else ():
            print(line)


# --- Choosing by hand ---


def pin(name: DocumentName, *, store: Directory, as_json: Json = False) -> None:
    """Keep a document in the form that it has: no plan changes it."""
    with opened_catalogue(store) as opened:
        document = opened.catalogue.find(name)
        check_stored(document, opened.uses)
        if document.form not in RESTING and document.of_form(document.form) is None:
            raise CatalogueError(
                f"'{document.shown}' lies as {document.form}, which a server chose and no command "
                f"measures: hillinfer documents form {document.name} FORM pins it as another"
            )
        opened.catalogue.pin(document.key, document.form)
    _told(document, f"pinned as {document.form}", document.form, as_json=as_json)


def unpin(name: DocumentName, *, store: Directory, as_json: Json = False) -> None:
    """Leave a document to plans again."""
    with opened_catalogue(store) as opened:
        document = opened.catalogue.find(name)
        opened.catalogue.unpin(document.key)
    _told(document, "not pinned any more", document.form, as_json=as_json)


def form(
    name: DocumentName,
    chosen: Annotated[
        str,
        typer.Argument(
            metavar="FORM", help="rows, text, or a form that was measured, like held or int4."
        ),
    ],
    *,
    store: Directory,
    as_json: Json = False,
) -> None:
    """Choose a document's form by hand; it is pinned there."""
    with opened_catalogue(store) as opened:
        document = opened.catalogue.find(name)
        check_stored(document, opened.uses)
        check_measured(document, chosen)
        opened.catalogue.pin(document.key, chosen)
    measured = document.of_form(chosen)
    said = f"pinned as {chosen}"
    if measured is not None:
        said += (
            f", {format_bytes(measured.byte_count)} in memory, quality {measured.lower:.3f}, first "
            f"token {measured.opening_seconds:.3f} s"
        )
    _told(document, said, chosen, as_json=as_json)


def check_measured(document: KnownDocument, chosen: str) -> None:
    """Refuse a form that a document cannot be placed as.

    Raises
    ------
    SettingsError
        Where there is no such form, or its share is out of range.
    CatalogueError
        Where it was not measured for this document.
    """
    if chosen in RESTING or document.of_form(chosen) is not None:
        return
    # Says of names and shares what is wrong with them; it takes seconds to import.
    from hillinfer.forms.table import make_form

    make_form(chosen)
    known = ", ".join(one.form for one in document.measured) or "none"
    raise CatalogueError(
        f"form {chosen} was not measured for '{document.shown}', and without its quality nothing "
        f"says what it loses; measured are {known}: hillinfer documents measure {document.name} "
        f"--form {chosen}"
    )


def rm(name: DocumentName, *, store: Directory, as_json: Json = False) -> None:
    """Forget a document's forms and measurements; its stored rows stay."""
    with opened_catalogue(store) as opened:
        document = opened.catalogue.find(name)
        opened.catalogue.remove(document.key)
    _told(document, "forgotten; its stored rows stay", document.form, as_json=as_json)


def _told(document: KnownDocument, said: str, now: str, *, as_json: bool) -> None:
    facts = {"name": document.name, "form": now, "tier": tier_of(now), "now": said}
    tell(facts, f"{document.name} is {said}", as_json=as_json)


# --- Plans ---


def plan(
    *,
    store: Directory,
    dram_budget: Annotated[
        str, typer.Option(help="Memory for forms: 64MiB, 2GiB, or 25% of all documents' rows.")
    ] = "25%",
    alpha: Annotated[
        float, typer.Option(help="Seconds that an answer of quality 1 is worth, beside one of 0.")
    ] = 1.0,
    floor: Annotated[
        float, typer.Option(help="Least quality of a form, from 0 to 1, however seldom it is used.")
    ] = 0.0,
    policy: Annotated[
        str, typer.Option(help=f"Which: {', '.join(PLACEMENT_POLICIES)}.")
    ] = DEFAULT_PLACEMENT,
    utility: Annotated[
        str, typer.Option(help=f"What counts of a use: {', '.join(UTILITIES)}.")
    ] = "answer",
    apply: Annotated[
        bool, typer.Option("--apply", help="Have documents lie so from now on.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say which form each document had better take, what that changes and why."""
    size = ByteSize.parse(dram_budget)
    with opened_catalogue(store) as opened:
        held = sum(
            opened.uses[one.key].token_bytes * one.tokens
            for one in opened.documents
            if one.key in opened.uses
        )
        rules = PlanRules(size.resolve(held), alpha, floor, policy, utility)
        made = make_plan(opened.documents, opened.uses, rules)
        _check_budget(made)
        if apply:
            opened.catalogue.set_forms([(one.document.key, one.after) for one in made.changes])
    if as_json:
        print(json.dumps({**plan_facts(made), "is_applied": apply}, indent=2))
        return
    for line in plan_lines(made):
        print(line)


def _check_budget(made: Plan) -> None:
    """Refuse a budget that holds no form of any document."""
    sizes = [
        (option.byte_count, option.form, one.document.shown)
        for one in made.documents
        for option in options_of(one.document)
        if option.tier == DRAM
    ]
    least = min(sizes, default=None)
    if least is not None and least[0] > made.rules.dram_budget:
        raise SettingsError(
            f"a budget of {format_bytes(made.rules.dram_budget)} is below the smallest form of any "
            f"document, {least[1]} of '{least[2]}' with {format_bytes(least[0])}: raise "
            "--dram-budget"
        )


CATALOGUE_COMMANDS = (ls, *MEASURING_COMMANDS, pin, unpin, form, plan, rm)
