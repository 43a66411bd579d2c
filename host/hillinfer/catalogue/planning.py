# SPDX-License-Identifier: Apache-2.0
"""Plans which form each document takes and on which tier, with a reason for each choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hillinfer.catalogue.records import (
    RESTING,
    ROWS,
    TEXT,
    CatalogueError,
    DocumentUse,
    KnownDocument,
    with_expected_forms,
)
from hillinfer.errors import BudgetError, SettingsError
from hillinfer.placement.options import (
    UTILITIES,
    Context,
    Option,
    Tier,
    above_floor,
    on_drive,
    packed_form,
)
from hillinfer.placement.policies import DEFAULT_PLACEMENT, make_placement_policy
from hillinfer.placement.steps import Point, upper_hull
from hillinfer.placement.stock import Stock
from hillinfer.values import format_bytes

DRAM, DRIVE, REST = "dram", "drive", "rest"


@dataclass(frozen=True)
class PlanRules:
    """What a plan is made by.

    Parameters
    ----------
    dram_budget
        Bytes that forms may take in memory.
    alpha
        Seconds that an answer of quality 1 is worth, beside one of 0.
    floor
        Least quality of a form; 0 for none.
    policy, utility
        Names in the tables of the placement room.
    drive_budget
        Bytes that packed forms may take on each drive.
    drives
        How many there are.
    """

    dram_budget: int
    alpha: float = 1.0
    floor: float = 0.0
    policy: str = DEFAULT_PLACEMENT
    utility: str = "answer"
    drive_budget: int = 0
    drives: int = 1

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        for name in ("dram_budget", "drive_budget"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name}={getattr(self, name)} bytes are below 0")
        if not 0 <= self.alpha < float("inf"):
            raise SettingsError(f"alpha={self.alpha} is no number of seconds: give 0 or more")
        if not 0 <= self.floor <= 1:
            raise SettingsError(f"floor={self.floor} is not from 0 to 1")
        if self.utility not in UTILITIES:
            raise SettingsError(
                f"utility={self.utility!r} is unknown: choose one of {', '.join(UTILITIES)}"
            )
        make_placement_policy(self.policy)


@dataclass(frozen=True)
class DocumentRules:
    """How documents of a store are placed by a program that answers.

    Parameters
    ----------
    floor
        Least quality of a form that an answer comes from, unless a user pinned it.
    alpha
        Seconds that quality 1 is worth.
    drive_budget
        Bytes that forms may take, packed, on each drive of a store that is not encrypted.
    dram_budget
        Most bytes that forms may take in memory; None for half of an engine's.
    """

    floor: float = 0.9
    alpha: float = 1.0
    drive_budget: int = 0
    dram_budget: int | None = None

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        if not 0 <= self.floor <= 1:
            raise SettingsError(f"document floor={self.floor} is not from 0 to 1")
        PlanRules(self.dram_budget or 0, self.alpha, self.floor, drive_budget=self.drive_budget)


@dataclass(frozen=True)
class HullPoint:
    """An option of a document, as a picture of its hull shows it.

    Parameters
    ----------
    form, byte_count
        What it is.
    value
        What a use is worth, in seconds.
    is_on_hull, is_chosen
        Whether other options lie above it, and whether the plan takes it.
    """

    form: str
    byte_count: int
    value: float
    is_on_hull: bool
    is_chosen: bool


@dataclass(frozen=True)
class PlannedDocument:
    """What a plan says of one document.

    Parameters
    ----------
    document
        As the catalogue has it.
    before, after
        What it lies as, and what it had better.
    tier
        Where that lies: `dram`, `drive` for stored rows, or `text`.
    byte_count
        What it takes of the budget.
    quality, first_token
        That are expected of it, the latter in seconds.
    per_hour
        Uses in an hour.
    reason
        Why, in words.
    points
        All its options.
    """

    document: KnownDocument
    before: str
    after: str
    tier: str
    byte_count: int
    quality: float
    first_token: float
    per_hour: float
    reason: str
    points: tuple[HullPoint, ...]


@dataclass(frozen=True)
class Plan:
    """Where all documents go.

    Parameters
    ----------
    rules
        By which.
    documents
        Those that were measured and whose rows are stored.
    left_out
        Names of the others, and why.
    used
        Bytes of the budget that are taken.
    utility_before, utility_after
        Seconds an hour that all documents together are worth.
    """

    rules: PlanRules
    documents: tuple[PlannedDocument, ...]
    left_out: Mapping[str, str]
    used: int
    utility_before: float
    utility_after: float

    @property
    def changes(self) -> list[PlannedDocument]:
        """Those that take another form."""
        return [one for one in self.documents if one.before != one.after]


def tier_of(form: str) -> str:
    """Return where a form lies: `dram`, `drive` for packed ones and stored rows, or `text`."""
    packed = packed_form(form)
    if packed is not None:
        return drive_tier(packed[1])
    return {ROWS: DRIVE, TEXT: TEXT}.get(form, DRAM)


def drive_tier(drive: int) -> str:
    """Return the name of the tier that a drive is, by its number: `drive`, `drive2`."""
    return f"{DRIVE}{drive}" if drive > 1 else DRIVE


def options_of(document: KnownDocument) -> list[Option]:
    """Return what may be chosen for a document: how it rests, and its measured forms.

    Raises
    ------
    CatalogueError
        Where it was not measured.
    """
    times = document.resting
    if times is None:
        raise CatalogueError(
            f"'{document.shown}' was not measured: hillinfer documents measure {document.name}"
        )
    rest = [
        Option(ROWS, REST, 0, 1.0, times.rows, times.token),
        Option(TEXT, REST, 0, 1.0, times.text, times.token),
    ]
    return rest + [
        Option(one.form, DRAM, one.byte_count, one.lower, one.opening_seconds, one.token_seconds)
        for one in document.measured
        if one.form not in RESTING
    ]


def drive_options(document: KnownDocument, row_bytes: int, drives: int = 1) -> list[Option]:
    """Return measured forms as they lie packed on drives, each read at the rate of stored rows.

    Parameters
    ----------
    document
        That was measured.
    row_bytes
        Of its stored rows.
    drives
        How many there are.
    """
    assert document.resting is not None
    rows = document.resting.rows
    return [
        Option(
            on_drive(one.form, drive),
            drive_tier(drive),
            one.byte_count,
            one.lower,
            one.opening_seconds + rows * one.byte_count / row_bytes,
            one.token_seconds,
        )
        for drive in range(1, drives + 1)
        for one in document.measured
        if one.form not in RESTING
    ]


def make_plan(
    documents: Sequence[KnownDocument],
    uses: Mapping[bytes, DocumentUse],
    rules: PlanRules,
    options: Callable[[KnownDocument], Sequence[Option]] = options_of,
) -> Plan:
    """Return where documents had better go, from where they are.

    Parameters
    ----------
    documents
        Of a catalogue.
    uses
        How often each is asked for; those without are not stored any more.
    rules
        By which.
    options
        Returns what may be chosen for a document, the form that it is pinned as among them.

    Raises
    ------
    BudgetError
        Where pinned documents take more than the budget.
    """
    left_out = {
        one.name: "its rows are gone from the store" if one.key not in uses else "not measured"
        for one in documents
        if one.key not in uses or one.resting is None
    }
    # Whoever was not measured says nothing of others, and whoever is gone still does.
    taking_part = [one for one in with_expected_forms(documents) if one.name not in left_out]
    numbers = range(1, rules.drives + 1) if rules.drive_budget else ()
    packed = [Tier(drive_tier(number), rules.drive_budget) for number in numbers]
    stock = Stock((Tier(DRAM, rules.dram_budget), *packed, Tier(REST)))
    for one in taking_part:
        stock.put(_context(one, options(one), uses[one.key], rules))
    _check_pinned(taking_part, rules)
    _lie_as_before(stock, taking_part)
    before = stock.utility()
    stock.refresh()
    stock.arrange(make_placement_policy(rules.policy).plan(stock, None))
    planned = tuple(_planned(one, stock, uses[one.key]) for one in taking_part)
    return Plan(rules, planned, left_out, stock.used(DRAM), before, stock.utility())


# --- inside ---


def _context(
    document: KnownDocument, every: Sequence[Option], use: DocumentUse, rules: PlanRules
) -> Context:
    pinned_form = document.form if document.is_pinned else None
    # Whoever pins a form below the floor has chosen it.
    kept = [*above_floor(every, rules.floor)]
    kept += [one for one in every if one.form == pinned_form and one not in kept]
    utility = UTILITIES[rules.utility](rules.alpha)
    values = tuple(utility.value(option) for option in kept)
    context = Context(document.name, tuple(kept), values, use.per_hour, use.last)
    if pinned_form is None:
        return context
    number = context.find(pinned_form)
    if number is None:
        raise CatalogueError(
            f"'{document.shown}' is pinned as {pinned_form}, which was not measured: hillinfer "
            f"documents measure {document.name} --form {pinned_form}, or unpin it"
        )
    return Context(document.name, tuple(kept), values, use.per_hour, use.last, number)


def _check_pinned(documents: Sequence[KnownDocument], rules: PlanRules) -> None:
    sizes = {
        one.name: measured.byte_count
        for one in documents
        if one.is_pinned and (measured := one.of_form(one.form)) is not None
    }
    if sum(sizes.values()) > rules.dram_budget:
        most = max(sizes, key=lambda name: sizes[name])
        raise BudgetError(
            f"{len(sizes)} pinned documents take {format_bytes(sum(sizes.values()))}, and the "
            f"budget is {format_bytes(rules.dram_budget)}: raise --dram-budget, or hillinfer "
            f"documents unpin {most}"
        )


def _lie_as_before(stock: Stock, documents: Sequence[KnownDocument]) -> None:
    """Have documents lie as they do, as far as the budget holds that; pinned ones first."""
    for one in sorted(documents, key=lambda one: not one.is_pinned):
        number = stock.contexts[one.name].find(one.form)
        if number is None:
            continue
        option = stock.contexts[one.name].options[number]
        if option.byte_count <= stock.free(option.tier):
            stock.arrange({one.name: number})


def _planned(document: KnownDocument, stock: Stock, use: DocumentUse) -> PlannedDocument:
    context, number = stock.contexts[document.name], stock.chosen(document.name)
    chosen = context.options[number]
    points = [
        Point(at, option.byte_count, context.values[at])
        for at, option in enumerate(context.options)
        if option.tier == DRAM
    ]
    base = context.values[stock.rest(document.name)]
    hull = {point.number for point in upper_hull(points, base)} | {stock.rest(document.name)}
    return PlannedDocument(
        document,
        document.form,
        chosen.form,
        tier_of(chosen.form),
        chosen.byte_count,
        chosen.quality,
        chosen.first_token,
        use.per_hour,
        _reason(document, context, number, stock, use),
        tuple(
            HullPoint(option.form, option.byte_count, context.values[at], at in hull, at == number)
            for at, option in enumerate(context.options)
        ),
    )


def _reason(
    document: KnownDocument, context: Context, number: int, stock: Stock, use: DocumentUse
) -> str:
    """Say why an option was chosen, beside the best one that was not."""
    chosen = context.options[number]
    if document.is_pinned:
        return f"pinned as {chosen.form}"
    best = max(range(len(context.options)), key=lambda at: context.values[at])
    gain = context.values[number] - context.values[stock.rest(document.name)]
    asked = f"{use.per_hour:.2g} uses an hour"
    if chosen.tier == DRAM:
        said = f"{gain:.2f} s a use better than at rest, {asked}"
        if best != number:
            said += f"; no room for {_of(context, best)}"
        return said
    if best == number:
        return f"no form is worth more than {chosen.form}"
    size = context.options[best].byte_count
    if size > (stock.tiers[0].budget or 0):
        return f"{_of(context, best)} is more than the budget"
    return f"others gain more by the bytes of {_of(context, best)}; {asked}"


def _of(context: Context, number: int) -> str:
    option = context.options[number]
    return f"{option.form} ({format_bytes(option.byte_count)})"
