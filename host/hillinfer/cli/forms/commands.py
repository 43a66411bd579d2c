# SPDX-License-Identifier: Apache-2.0
"""`hillinfer documents`: looking at documents of a store, choosing their forms, and plans."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hillinfer.catalogue.catalogue import Catalogue
from hillinfer.catalogue.planning import (
    DRAM,
    Plan,
    PlannedDocument,
    PlanRules,
    drive_options,
    make_plan,
    options_of,
    tier_of,
)
from hillinfer.catalogue.records import (
    RESTING,
    ROWS,
    CatalogueError,
    DocumentUse,
    KnownDocument,
    check_stored,
    document_uses,
    with_expected_forms,
)
from hillinfer.cli.console import printable
from hillinfer.cli.parsing import Directory, Json, tell
from hillinfer.errors import SettingsError
from hillinfer.placement.options import UTILITIES, packed_form
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

    def find(self, name: str) -> KnownDocument:
        """Return a document as `documents` has it; name and errors as of `Catalogue.find`."""
        found = self.catalogue.find(name)
        # One that came since is as it was measured.
        return next((one for one in self.documents if one.key == found.key), found)


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
        shown = opened.documents if name is None else (opened.find(name),)
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
            if opened.find(name).of_form(document.form) is not None:
                raise CatalogueError(
                    f"'{document.shown}' lies as {document.form}, which was not measured of it and "
                    f"is what others let expect: hillinfer documents measure {document.name} "
                    f"--form {document.form}, then pin it"
                )
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

    Raises SettingsError where there is no such form, or its share is out of range, and
    CatalogueError where it was not measured for this document.
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


# --- How documents and plans are shown ---

GONE = "gone"


def document_facts(document: KnownDocument, use: DocumentUse | None) -> dict[str, Any]:
    """Return what there is to say of a document, as JSON has it; `use` is None where it went."""
    facts: dict[str, Any] = {
        "name": document.name,
        "title": document.title,
        "model": document.model,
        "namespace": document.namespace.hex()[:12],
        "tokens": document.tokens,
        "form": document.form,
        "tier": GONE if use is None else tier_of(document.form),
        "is_pinned": document.is_pinned,
        "byte_count": _bytes(document, use),
        "quality": None,
        "first_token_seconds": None,
        "token_seconds": None,
        "hits": None if use is None else round(use.hits, 3),
        "uses_per_hour": None if use is None else round(use.per_hour, 3),
        "last_used": None if use is None else use.last,
        "put_at": document.put_at,
        "resting": None if document.resting is None else asdict(document.resting),
        "measured": [asdict(one) for one in document.measured],
    }
    if document.resting is not None:
        options = options_of(document)
        if use is not None and use.token_bytes:
            packed = packed_form(document.form)
            rows = use.token_bytes * document.tokens
            options += drive_options(document, rows, 1 if packed is None else packed[1])
        lies = next((one for one in options if one.form == document.form), None)
        if lies is not None:
            facts |= {
                "quality": lies.quality,
                "first_token_seconds": lies.first_token,
                "token_seconds": lies.token_seconds,
            }
    return facts


def document_line(document: KnownDocument, use: DocumentUse | None) -> str:
    """Return the line of a document."""
    facts = document_facts(document, use)
    measured = "not measured"
    if facts["quality"] is not None:
        seconds = facts["first_token_seconds"]
        measured = f"quality {facts['quality']:.3f}, first token {seconds:.3f} s"
    hits = "" if use is None else f", {use.hits:.1f} hits"
    pinned = ", pinned" * document.is_pinned
    return (
        f"{document.name}  {document.tokens:>8} tokens  {document.form:<12} {facts['tier']:<5} "
        f"{format_bytes(facts['byte_count']):>10}  {measured}{hits}{pinned}  "
        f"{printable(document.title)}"
    ).rstrip()


def form_lines(document: KnownDocument) -> list[str]:
    """Return a line for each form of a document that was measured."""
    lines = []
    for one in document.measured:
        if one.is_expected:
            lines.append(
                f"  {one.form:<14} {format_bytes(one.byte_count):>10}  not measured of it; lower "
                f"end {one.lower:.3f} by what others kept"
            )
            continue
        judged = "" if one.judged is None else f", judged {one.judged:.3f}"
        lines.append(
            f"  {one.form:<14} {format_bytes(one.byte_count):>10}  agreement {one.agreement:.3f}, "
            f"lower end {one.lower:.3f}, worst {one.worst:.3f}{judged}; opens in "
            f"{one.opening_seconds:.3f} s, a token in {one.token_seconds:.4f} s"
        )
    return lines


def plan_facts(plan: Plan) -> dict[str, Any]:
    """Return a plan, as JSON can say it; hillinfer-bench documents-picture draws it."""
    return {
        "rules": asdict(plan.rules),
        "used_bytes": plan.used,
        "utility_before": plan.utility_before,
        "utility_after": plan.utility_after,
        "documents": [_planned_facts(one) for one in plan.documents],
        "left_out": dict(plan.left_out),
    }


def plan_lines(plan: Plan) -> list[str]:
    """Return what a plan changes, and why, as lines."""
    lines = [
        f"{_change(one)}  {format_bytes(one.byte_count):>10}  quality {one.quality:.3f}, first "
        f"token {one.first_token:.3f} s: {one.reason}"
        for one in plan.documents
    ]
    lines += [f"{name}  is left out: {why}" for name, why in plan.left_out.items()]
    lines.append(
        f"{len(plan.changes)} of {len(plan.documents)} documents change; forms take "
        f"{format_bytes(plan.used)} of {format_bytes(plan.rules.dram_budget)}; utility "
        f"{plan.utility_before:.3f} -> {plan.utility_after:.3f} s an hour"
    )
    return lines


def _bytes(document: KnownDocument, use: DocumentUse | None) -> int:
    """Return what a document takes where it lies: on the drive for stored rows, else in memory."""
    measured = document.of_form(document.form)
    if measured is not None:
        return measured.byte_count
    if document.form == ROWS and use is not None:
        return use.token_bytes * document.tokens
    return 0


def _planned_facts(one: PlannedDocument) -> Mapping[str, Any]:
    return {
        "name": one.document.name,
        "title": one.document.title,
        "before": one.before,
        "after": one.after,
        "tier": one.tier,
        "byte_count": one.byte_count,
        "quality": one.quality,
        "first_token_seconds": one.first_token,
        "uses_per_hour": one.per_hour,
        "is_pinned": one.document.is_pinned,
        "reason": one.reason,
        "options": [asdict(point) for point in one.points],
    }


def _change(one: PlannedDocument) -> str:
    forms = one.after if one.before == one.after else f"{one.before} -> {one.after}"
    title = f" ({printable(one.document.title)})" if one.document.title else ""
    return f"{one.document.name}{title}  {forms:<20}"
