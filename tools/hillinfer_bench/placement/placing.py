# SPDX-License-Identifier: Apache-2.0
"""Plays events to a placement policy: documents put, used, measured anew, pinned and removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hillinfer.errors import BudgetError, SettingsError
from hillinfer.placement.options import (
    Context,
    FadingUses,
    Option,
    Tier,
    Uses,
    Utility,
    above_floor,
)
from hillinfer.placement.policies import PlacementPolicy
from hillinfer.placement.stock import Change, Stock


class Placing:
    """Keeps documents where a policy wants them, event by event.

    Every method returns changes in the order in which they are to be made. No budget is passed on
    the way, and a document whose change has not been made yet can always be answered from what
    it rests as.

    Parameters
    ----------
    tiers
        Fastest first; the last one without a budget.
    policy
        Of its own.
    utility
        What a use is worth.
    uses
        How uses count; None: faded, to the half in an hour.
    floor
        Least quality of a form; options below it are left out. 0 for none.

    Attributes
    ----------
    stock
        To look at.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        policy: PlacementPolicy,
        utility: Utility,
        uses: Uses | None = None,
        floor: float = 0.0,
    ) -> None:
        self.stock = Stock(tiers)
        self._policy, self._utility = policy, utility
        self._uses = FadingUses() if uses is None else uses
        self._floor = floor
        self._origin: float | None = None

    def put(self, name: str, options: Sequence[Option], now: float) -> list[Change]:
        """Take in a document that was used just now, or the newer measurements of one.

        Parameters
        ----------
        name
            Of the document.
        options
            All there are, one of them at least on the tier without a budget.
        now
            Seconds; of all events the latest.

        Raises
        ------
        SettingsError
            Where there is no such option, or one names an unknown tier.
        BudgetError
            Where it is pinned and its form does not fit any more.
        """
        self._begin(now)
        old = self.stock.contexts.get(name)
        kept = above_floor(options, self._floor)
        values = tuple(self._utility.value(option) for option in kept)
        context = Context(name, kept, values, weight=0.0)
        if old is None:
            context = self._after_use(context, now)
        else:
            context = replace(context, weight=old.weight, last_used=old.last_used)
            if old.pinned is not None:
                context = self._pinned(context, old.options[old.pinned].form)
        return self._entered(context)

    def used(self, name: str, now: float) -> list[Change]:
        """Count a use of a document."""
        self._begin(now)
        return self._entered(self._after_use(self._known(name), now))

    def remove(self, name: str) -> list[Change]:
        """Forget a document."""
        self._known(name)
        gone = self.stock.drop(name)
        return [gone, *self.stock.arrange(self._policy.plan(self.stock, name))]

    def pin(self, name: str, form: str) -> list[Change]:
        """Keep a document in a form, on the fastest tier where pinned documents leave room.

        Raises
        ------
        SettingsError
            Where the document is unknown, or has no such form.
        BudgetError
            Where no tier has room beside what is pinned already.
        """
        return self._entered(self._pinned(self._known(name), form))

    def unpin(self, name: str) -> list[Change]:
        """Leave a document to the policy again."""
        return self._entered(replace(self._known(name), pinned=None))

    def resize(self, tier: str, budget: int) -> list[Change]:
        """Give a tier another budget; forms give way before the rest of the memory is taken.

        Raises
        ------
        BudgetError
            Where pinned documents alone take more.
        """
        if tier in {one.name for one in self.stock.limited} and budget < self.stock.pinned(tier):
            raise BudgetError(
                f"a budget of {budget} bytes for {tier} is below the {self.stock.pinned(tier)} "
                "bytes of its pinned documents: give it more, or unpin one"
            )
        self.stock.resize(tier, budget)
        return self.stock.arrange(self._policy.plan(self.stock, None))

    def per_hour(self, name: str, now: float) -> float:
        """Return how often a document is used in an hour."""
        self._begin(now)
        return self._uses.per_hour(self._known(name).weight, self._since(now))

    # --- inside ----------------------------------------------------------------------------

    def _known(self, name: str) -> Context:
        if name not in self.stock.contexts:
            raise SettingsError(f"no document is called {name!r}: put it first")
        return self.stock.contexts[name]

    def _entered(self, context: Context) -> list[Change]:
        old = self.stock.contexts.get(context.name)
        first = self.stock.put(context)
        changes = self.stock.arrange(self._policy.plan(self.stock, context.name))
        # Newer measurements of what stays as it is are no change.
        stays = old is not None and first.before is not None and first.after is not None
        is_same = stays and first.before.place == first.after.place  # type: ignore[union-attr]
        return changes if is_same else [first, *changes]

    def _after_use(self, context: Context, now: float) -> Context:
        weight = self._uses.used(context.weight, self._since(now))
        return replace(context, weight=weight, last_used=now)

    def _pinned(self, context: Context, form: str) -> Context:
        options = [
            (self.stock.rank(option), number)
            for number, option in enumerate(context.options)
            if option.form == form
        ]
        if not options:
            there = ", ".join(dict.fromkeys(option.form for option in context.options))
            raise SettingsError(f"{context.name} has no form {form!r}: choose one of {there}")
        old = self.stock.contexts.get(context.name)
        sizes: list[str] = []
        for _, number in sorted(options):
            option = context.options[number]
            beside = self.stock.pinned(option.tier)
            if old is not None and old.pinned is not None:
                mine = old.options[old.pinned]
                beside -= mine.byte_count if mine.tier == option.tier else 0
            budget = self.stock.free(option.tier) + self.stock.used(option.tier)
            if beside + option.byte_count <= budget:
                return replace(context, pinned=number)
            sizes.append(f"{option.byte_count} bytes on {option.tier}, where {beside} are pinned")
        raise BudgetError(
            f"{context.name} as {form} would take {' or '.join(sizes)}: no budget has that room; "
            "give it more, or unpin a document"
        )

    def _begin(self, now: float) -> None:
        """Begin time, or begin it anew where weights would become too large for a number."""
        if self._origin is None:
            self._origin = now
        since = now - self._origin
        if since > self._uses.longest:
            for context in list(self.stock.contexts.values()):
                weight = self._uses.moved(context.weight, since)
                self.stock.put(replace(context, weight=weight))
            self.stock.refresh()
            self._origin = now

    def _since(self, now: float) -> float:
        assert self._origin is not None, "time has begun"
        return now - self._origin
