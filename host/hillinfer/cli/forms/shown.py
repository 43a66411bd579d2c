# SPDX-License-Identifier: Apache-2.0
"""How `hillinfer documents` shows documents and plans, as lines and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hillinfer.catalogue.planning import (
    Plan,
    PlannedDocument,
    drive_options,
    options_of,
    tier_of,
)
from hillinfer.catalogue.records import ROWS, DocumentUse, KnownDocument
from hillinfer.cli.console import printable
from hillinfer.placement.options import packed_form
from hillinfer.values import format_bytes

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


# --- inside ---


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
