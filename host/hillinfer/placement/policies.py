# SPDX-License-Identifier: Apache-2.0
"""Placement policies: which option each document gets, a small class each with one method."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping
from types import MappingProxyType

from hillinfer.errors import SettingsError
from hillinfer.placement.options import Context, Option
from hillinfer.placement.steps import Point, SlopeMerge
from hillinfer.placement.stock import Stock


class PlacementPolicy(ABC):
    """Chooses options. One object serves one stock: it may remember what it has seen."""

    @abstractmethod
    def plan(self, stock: Stock, touched: str | None) -> dict[str, int]:
        """Return numbers of options by name, of all documents whose option shall change.

        The plan must keep every budget and leave pinned documents at their option.

        Parameters
        ----------
        stock
            As it is, with `touched` in it unless that has left.
        touched
            What came, was used, was measured or left; None where a budget changed.
        """


# --- The paper's greedy ---


class LeastDrop(PlacementPolicy):
    """The paper's: a newcomer takes its best option, then least utility is given up till it fits.

    EvicPress section 4.4. What it leaves open is settled so: the tier's size is that after each
    change (Algorithm 1 tests S_T and assigns S, and would never end); a change is chosen by its
    drop alone, not per byte; the tier below is then treated likewise; nothing ever moves up,
    because section 4.4 and Algorithm 1 have no such change.
    """

    def plan(self, stock: Stock, touched: str | None) -> dict[str, int]:
        """Return the newcomer's option, and what others give up for it."""
        draft = _Draft(stock)
        for name in sorted(stock.fresh):
            if stock.contexts[name].pinned is None:
                draft.take(name, self.first(stock, stock.contexts[name]))
        for tier in stock.limited:
            while draft.used[tier.name] > (tier.budget or 0):
                drops = self._drops(draft, tier.name)
                if not drops:
                    break
                _, name, number = min(drops)
                draft.take(name, number)
        return draft.plan

    def first(self, stock: Stock, context: Context) -> int:
        """Return the option that a newcomer takes: that of the highest utility."""
        return max(range(len(context.options)), key=lambda number: context.values[number])

    def cost(self, drop: float, saved: int) -> float:
        """Return what is to be least of a change: the utility it gives up."""
        return drop

    def _drops(self, draft: _Draft, tier: str) -> list[tuple[float, str, int]]:
        """Return what every change on a tier costs: it shrinks a form there or moves it down."""
        drops: list[tuple[float, str, int]] = []
        rank = draft.stock.rank
        for name, context in draft.stock.contexts.items():
            old = draft.option(name)
            if old.tier != tier or context.pinned is not None:
                continue
            at = draft.number(name)
            for number, option in enumerate(context.options):
                saved = old.byte_count - (option.byte_count if option.tier == tier else 0)
                if saved > 0 and rank(option) >= rank(old):
                    drop = context.utility(at) - context.utility(number)
                    drops.append((self.cost(drop, saved), name, number))
        return drops


class PrintedAlgorithm(LeastDrop):
    """The paper's Algorithm 1, whose newcomer takes the option of the highest quality.

    Of equals the one on the fastest tier: the algorithm knows one tier only.
    """

    def first(self, stock: Stock, context: Context) -> int:
        """Return the option of the highest quality, on the fastest tier that has it."""

        def order(number: int) -> tuple[float, int]:
            option = context.options[number]
            return option.quality, -stock.rank(option)

        return max(range(len(context.options)), key=order)


class LeastDropPerByte(LeastDrop):
    """As the paper's greedy, but gives up the least utility per byte that is saved."""

    def cost(self, drop: float, saved: int) -> float:
        """Return the utility given up for each byte."""
        return drop / saved


class _Draft:
    """A stock as a plan would have it."""

    def __init__(self, stock: Stock) -> None:
        self.stock = stock
        self.plan: dict[str, int] = {}
        self.used = {tier.name: stock.used(tier.name) for tier in stock.tiers}
        for name, context in stock.contexts.items():
            if context.pinned is not None:
                self.take(name, context.pinned)

    def number(self, name: str) -> int:
        return self.plan[name] if name in self.plan else self.stock.chosen(name)

    def option(self, name: str) -> Option:
        return self.stock.contexts[name].options[self.number(name)]

    def take(self, name: str, number: int) -> None:
        old, new = self.option(name), self.stock.contexts[name].options[number]
        self.used[old.tier] -= old.byte_count
        self.used[new.tier] += new.byte_count
        self.plan[name] = number


# --- Least recently used ---


class LeastRecentlyUsed(PlacementPolicy):
    """Keeps one form of each document; what was not used for longest moves a tier down.

    Parameters
    ----------
    form
        Which. A document that has no such form on any tier with a budget rests.
    """

    def __init__(self, form: str = "held") -> None:
        self._form = form

    def plan(self, stock: Stock, touched: str | None) -> dict[str, int]:
        """Return the touched document on the fastest tier, and those that it pushes down."""
        draft = _Draft(stock)
        moving = sorted(stock.fresh | ({touched} if touched in stock.contexts else set()))
        for name in moving:
            if stock.contexts[name].pinned is None:
                draft.take(name, self._below(stock, name, None))
        for tier in stock.limited:
            while draft.used[tier.name] > (tier.budget or 0):
                there = [
                    (context.last_used, name)
                    for name, context in stock.contexts.items()
                    if draft.option(name).tier == tier.name and context.pinned is None
                ]
                if not there:
                    break
                _, name = min(there)
                draft.take(name, self._below(stock, name, draft.option(name)))
        return draft.plan

    def _below(self, stock: Stock, name: str, option: Option | None) -> int:
        """Return the form's option on the next tier down that it could ever lie on."""
        for tier in stock.limited:
            if option is not None and stock.rank(option) >= stock.tiers.index(tier):
                continue
            number = stock.contexts[name].find(self._form, tier.name)
            if number is not None:
                size = stock.contexts[name].options[number].byte_count
                if size <= (tier.budget or 0):
                    return number
        return stock.rest(name)


# --- Ours ---


class MergedHulls(PlacementPolicy):
    """Takes steps on the documents' upper hulls by gain per byte, up as well as down.

    Each tier with a budget merges the hulls of the documents that no faster tier holds. What a
    place on a slower tier costs is its price: the gain per byte of the best step that found no room
    there. A document's hull on a faster tier begins at the best that slower ones offer it at their
    prices.

    Parameters
    ----------
    hysteresis
        A document gives way to another only where that gains more by this part, so that two of
        about equal use do not take turns.
    """

    def __init__(self, hysteresis: float = 0.1) -> None:
        if hysteresis < 0:
            raise SettingsError(f"hysteresis={hysteresis} is below 0")
        self._hysteresis = hysteresis
        self._merges: dict[str, SlopeMerge] = {}
        self._prices: dict[str, float] = {}
        # Bytes that documents may share on each tier, and each document's sizes there.
        self._rooms: dict[str, int] = {}
        self._sizes: dict[str, dict[str, list[int]]] = {}
        # Whose hulls were drawn by older prices, in order.
        self._stale: dict[str, None] = {}

    @property
    def looked_at(self) -> int:
        """Entries of heaps that were looked at so far."""
        return sum(merge.looked_at for merge in self._merges.values())

    def plan(self, stock: Stock, touched: str | None) -> dict[str, int]:
        """Return where documents go once every tier has settled."""
        if not self._merges:
            self._merges = {tier.name: SlopeMerge(self._hysteresis) for tier in stock.limited}
            self._prices = dict.fromkeys(self._merges, 0.0)
            self._sizes = {tier: {} for tier in self._merges}
        if touched is not None and touched not in stock.contexts:
            for merge in self._merges.values():
                merge.remove(touched)
            for table in self._sizes.values():
                table.pop(touched, None)
        entered = stock.fresh | ({touched} if touched in stock.contexts else set())
        for name in sorted(entered | self._outgrown(stock)):
            self._enter(stock, stock.contexts[name])
        changed = entered | self._settle(stock)
        if self._price_again():
            self._stale = dict.fromkeys(stock.contexts)
        self._redraw(stock, max(_REDRAWN, len(entered)))
        # Again: what one tier gave up may have made room for what another passed over.
        for _ in range(_ROUNDS):
            changed |= self._settle(stock)
        for merge in self._merges.values():
            merge.keep()
        return {name: self._number(stock, name) for name in changed if name in stock.contexts}

    # --- inside ----------------------------------------------------------------------------

    def _outgrown(self, stock: Stock) -> set[str]:
        """Return the documents with options that fit a tier only now, or no longer."""
        rooms = {tier.name: (tier.budget or 0) - stock.pinned(tier.name) for tier in stock.limited}
        changed = {tier for tier in rooms if rooms[tier] != self._rooms.get(tier)}
        old, self._rooms = self._rooms, rooms
        found: set[str] = set()
        for tier in changed & old.keys():
            low, high = sorted((old[tier], rooms[tier]))
            found.update(
                name
                for name, sizes in self._sizes[tier].items()
                if sizes[-1] > low and bisect_right(sizes, low) != bisect_right(sizes, high)
            )
        return found

    def _redraw(self, stock: Stock, most: int) -> None:
        """Draw hulls by newer prices, of so many documents at most."""
        names = list(itertools.islice(self._stale, most))
        for name in names:
            del self._stale[name]
            if name in stock.contexts:
                self._enter(stock, stock.contexts[name])

    def _enter(self, stock: Stock, context: Context) -> None:
        """Take in what is known of a document wherever it competes."""
        for tier, table in self._sizes.items():
            sizes = [one.byte_count for one in context.options if one.tier == tier]
            table[context.name] = sorted(sizes) or [0]
        is_above = context.pinned is not None
        for tier, merge in self._merges.items():
            if is_above:
                merge.remove(context.name)
                continue
            merge.put(context.name, context.weight, *self._points(stock, context, tier))
            is_above = merge.point(context.name) is not None

    def _points(self, stock: Stock, context: Context, tier: str) -> tuple[list[Point], float]:
        """Return a document's points on a tier, and what slower tiers offer it."""
        base = context.values[stock.rest(context.name)]
        points: list[Point] = []
        is_below = False
        for other in self._merges:
            price = self._prices[other]
            for number, option in enumerate(context.options):
                # What no room could ever hold must hide nothing smaller on the hull.
                if option.tier != other or option.byte_count > self._rooms[other]:
                    continue
                value = context.values[number]
                if other == tier:
                    points.append(Point(number, option.byte_count, value))
                elif is_below and (context.weight or not price):
                    cost = price * option.byte_count / context.weight if price else 0.0
                    base = max(base, value - cost)
            is_below |= other == tier
        return points, base

    def _settle(self, stock: Stock) -> set[str]:
        """Settle tier after tier, and hand down what a faster one does not hold."""
        changed: set[str] = set()
        for tier in stock.limited:
            merge = self._merges[tier.name]
            merge.settle(self._rooms[tier.name])
            for name in merge.moved:
                if name in stock.contexts:
                    self._enter_below(stock, stock.contexts[name], tier.name)
            changed |= merge.moved
            merge.moved.clear()
        return changed

    def _enter_below(self, stock: Stock, context: Context, tier: str) -> None:
        is_above = self._merges[tier].point(context.name) is not None
        names = list(self._merges)
        for other in names[names.index(tier) + 1 :]:
            merge = self._merges[other]
            if is_above:
                merge.remove(context.name)
            elif context.name not in merge:
                merge.put(context.name, context.weight, *self._points(stock, context, other))
            is_above |= merge.point(context.name) is not None

    def _price_again(self) -> bool:
        """Bring prices up to date, and say whether one has moved far enough to matter."""
        has_moved = False
        for tier, merge in list(self._merges.items())[1:]:
            old, new = self._prices[tier], merge.wanted
            if max(old, new) > _PRICE_STEP * min(old, new):
                self._prices[tier] = new
                has_moved = True
        return has_moved

    def _number(self, stock: Stock, name: str) -> int:
        pinned = stock.contexts[name].pinned
        if pinned is not None:
            return pinned
        points = (merge.point(name) for merge in self._merges.values())
        return next((point.number for point in points if point is not None), stock.rest(name))


# By how much a price moves before all hulls are drawn again.
_PRICE_STEP = 1.5
# How many hulls are then drawn anew in an event, the others in those that follow.
_REDRAWN = 32
# How often tiers settle once prices are known.
_ROUNDS = 2

# --- The table of placement policies ---

DEFAULT_PLACEMENT = "hulls"
PLACEMENT_POLICIES: Mapping[str, Callable[[], PlacementPolicy]] = MappingProxyType(
    {
        DEFAULT_PLACEMENT: MergedHulls,
        "paper": LeastDrop,
        "paper-printed": PrintedAlgorithm,
        "per-byte": LeastDropPerByte,
        "lru": LeastRecentlyUsed,
    }
)


def make_placement_policy(name: str) -> PlacementPolicy:
    """Return the policy of a name, or raise SettingsError naming those there are."""
    if name not in PLACEMENT_POLICIES:
        raise SettingsError(
            f"placement={name!r} is unknown: choose one of {', '.join(PLACEMENT_POLICIES)}"
        )
    return PLACEMENT_POLICIES[name]()
