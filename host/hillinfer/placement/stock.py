# SPDX-License-Identifier: Apache-2.0
"""The accountant of forms: what each document lies as, and changes that never pass a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hillinfer.errors import BudgetError, SettingsError
from hillinfer.placement.options import Context, Option, Tier


@dataclass(frozen=True)
class Change:
    """One document takes another form or place.

    Parameters
    ----------
    context
        Its name.
    before, after
        None where it was not there before, or goes.
    """

    context: str
    before: Option | None
    after: Option | None


class Stock:
    """Tiers, the documents whose forms lie there, and how many bytes they take.

    Every document has an option on a tier without a budget, where it rests: its text, or the
    stored rows, which are always kept. So it can give back what it takes at any time.

    Parameters
    ----------
    tiers
        Fastest first; the last one has no budget.

    Attributes
    ----------
    contexts
        By name, in the order that they came.
    fresh
        Names of what came or was measured since a policy last planned.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        names = [tier.name for tier in tiers]
        if len({*names}) < len(names):
            raise SettingsError(f"tiers {', '.join(names)}: each name may be there once")
        if not tiers or tiers[-1].budget is not None:
            raise SettingsError(
                "the last tier must have no budget: documents rest there; add Tier('text')"
            )
        self._tiers = {tier.name: tier for tier in tiers}
        self._ranks = {name: rank for rank, name in enumerate(names)}
        self._used = dict.fromkeys(names, 0)
        self._pinned = dict.fromkeys(names, 0)
        self._chosen: dict[str, int] = {}
        self._rests: dict[str, int] = {}
        self.contexts: dict[str, Context] = {}
        self.fresh: set[str] = set()

    # --- what is there ---------------------------------------------------------------------

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """All tiers, fastest first."""
        return tuple(self._tiers.values())

    @property
    def limited(self) -> tuple[Tier, ...]:
        """The tiers that have a budget, fastest first."""
        return tuple(tier for tier in self.tiers if tier.budget is not None)

    def rank(self, option: Option) -> int:
        """Return the number of an option's tier, 0 for the fastest, or raise SettingsError."""
        if option.tier not in self._ranks:
            raise SettingsError(
                f"form {option.form}: tier {option.tier!r} is unknown: choose one of "
                f"{', '.join(self._ranks)}"
            )
        return self._ranks[option.tier]

    def used(self, tier: str) -> int:
        """Return the bytes that forms take on a tier."""
        return self._used[tier]

    def pinned(self, tier: str) -> int:
        """Return the bytes that pinned documents take on a tier, or will once it is planned."""
        return self._pinned[tier]

    def free(self, tier: str) -> float:
        """Return the bytes that are left of a tier's budget; infinite where it has none."""
        budget = self._tiers[tier].budget
        return float("inf") if budget is None else budget - self._used[tier]

    def chosen(self, name: str) -> int:
        """Return the number of the option that a document lies as."""
        return self._chosen[name]

    def option(self, name: str) -> Option:
        """Return the option that a document lies as."""
        return self.contexts[name].options[self._chosen[name]]

    def rest(self, name: str) -> int:
        """Return the number of the best option that takes nothing of any budget."""
        return self._rests[name]

    def utility(self) -> float:
        """Return the sum of all documents' utilities."""
        return sum(one.utility(self._chosen[name]) for name, one in self.contexts.items())

    # --- changes ---------------------------------------------------------------------------

    def put(self, context: Context) -> Change:
        """Take in a document, or what is newly known of it.

        What comes rests until a policy chooses. What is there keeps its form and tier where they
        are still among its options and take no more bytes than are free; else it rests.

        Raises
        ------
        SettingsError
            Where an option is on no known tier, or none of them is without a budget.
        """
        for option in context.options:
            self.rank(option)
        resting = [
            number
            for number, option in enumerate(context.options)
            if self._tiers[option.tier].budget is None
        ]
        if not resting:
            raise SettingsError(
                f"{context.name} has no option on a tier without a budget: add its text"
            )
        old = self.contexts.get(context.name)
        before = None if old is None else self.option(context.name)
        chosen = rest = max(resting, key=lambda number: context.values[number])
        if before is not None:
            self._used[before.tier] -= before.byte_count
            kept = context.find(*before.place)
            if kept is not None:
                size = context.options[kept].byte_count
                # A budget that shrank may be passed until the policy has planned.
                if size <= max(before.byte_count, self.free(before.tier)):
                    chosen = kept
        if old is None or old.options != context.options:
            self.fresh.add(context.name)
        self._count_pin(old, -1)
        self._count_pin(context, 1)
        self.contexts[context.name] = context
        self._rests[context.name] = rest
        self._take(context.name, chosen)
        return Change(context.name, before, self.option(context.name))

    def drop(self, name: str) -> Change:
        """Forget a document, and what it takes."""
        before = self.option(name)
        self._used[before.tier] -= before.byte_count
        self._count_pin(self.contexts[name], -1)
        for table in (self.contexts, self._chosen, self._rests):
            del table[name]
        self.fresh.discard(name)
        return Change(name, before, None)

    def resize(self, tier: str, budget: int) -> None:
        """Give a tier another budget; where less is left than forms take, plans must shrink them.

        Raises
        ------
        SettingsError
            Where there is no such tier, or it has no budget.
        """
        if tier not in self._tiers or self._tiers[tier].budget is None:
            names = ", ".join(one.name for one in self.limited)
            raise SettingsError(f"tier {tier!r} has no budget: choose one of {names}")
        self._tiers[tier] = Tier(tier, budget)

    def refresh(self) -> None:
        """Have policies look at every document again."""
        self.fresh.update(self.contexts)

    def arrange(self, plan: Mapping[str, int]) -> list[Change]:
        """Bring documents to their planned options, and return the changes in order.

        What takes less is changed first, and nothing that does not fit at that moment. Where two
        wait for each other's room, one rests meanwhile.

        Parameters
        ----------
        plan
            Numbers of options, by name; what is not named stays.

        Raises
        ------
        BudgetError
            Where the plan needs more than some budget.
        """
        self._check(plan)
        waiting = {name: number for name, number in plan.items() if number != self._chosen[name]}
        changes: list[Change] = []
        while waiting:
            ready = [name for name, number in waiting.items() if self._fits(name, number)]
            for name in sorted(ready, key=lambda name: self._growth(name, waiting[name])):
                if self._fits(name, waiting[name]):
                    changes.append(self._move(name, waiting.pop(name)))
            if waiting and not ready:
                held = [name for name in waiting if self._chosen[name] != self._rests[name]]
                changes.append(self._move(held[0], self._rests[held[0]]))
        self.fresh.clear()
        return changes

    # --- inside ----------------------------------------------------------------------------

    def _check(self, plan: Mapping[str, int]) -> None:
        needed = dict(self._used)
        for name, number in plan.items():
            old, new = self.option(name), self.contexts[name].options[number]
            needed[old.tier] -= old.byte_count
            needed[new.tier] += new.byte_count
        for tier in self.limited:
            if needed[tier.name] > (tier.budget or 0):
                raise BudgetError(
                    f"forms on {tier.name} would take {needed[tier.name]} bytes of {tier.budget}: "
                    "give it more, or unpin a document"
                )

    def _count_pin(self, context: Context | None, sign: int) -> None:
        if context is not None and context.pinned is not None:
            option = context.options[context.pinned]
            self._pinned[option.tier] += sign * option.byte_count

    def _growth(self, name: str, number: int) -> int:
        """Return how many bytes more a document takes of budgets; below 0 where it gives back."""
        old, new = self.option(name), self.contexts[name].options[number]
        return self._charged(new) - self._charged(old)

    def _charged(self, option: Option) -> int:
        return 0 if self._tiers[option.tier].budget is None else option.byte_count

    def _fits(self, name: str, number: int) -> bool:
        old, new = self.option(name), self.contexts[name].options[number]
        own = old.byte_count if old.tier == new.tier else 0
        return new.byte_count <= own or new.byte_count - own <= self.free(new.tier)

    def _take(self, name: str, number: int) -> None:
        option = self.contexts[name].options[number]
        self._chosen[name] = number
        self._used[option.tier] += option.byte_count

    def _move(self, name: str, number: int) -> Change:
        before = self.option(name)
        self._used[before.tier] -= before.byte_count
        self._take(name, number)
        return Change(name, before, self.option(name))
