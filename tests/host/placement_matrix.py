# SPDX-License-Identifier: Apache-2.0
"""Where rows lie, what scores them and how they come: one table for all tests of placement.

None of it may change an output bit. A `Way` is one line of the matrix budget x device x policy x
path x batch; `every` lists those that can be, `pairs` so few of them that any two values of two
columns meet somewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import combinations, product

from hillinfer.engine.budget_plan import BudgetPlan, kernel_spec
from hillinfer.engine.runtime import Runtime
from hillinfer.kv.pool_policies import POOL_POLICIES
from hillinfer.model_shape import ModelShape
from hillinfer.settings import HOST_DEVICES, Settings
from hillinfer.shadow.store import STREAM_BUFFERS, shadow_bytes


class Budget(StrEnum):
    """How much DRAM there is."""

    ALL_HOT = "all hot"
    SOME_HOT = "some hot"
    LEAST = "least"

    def byte_count(
        self, shape: ModelShape, settings: Settings, tokens: int, sequences: int = 1
    ) -> int:
        """Return M0 for sequences of at most so many tokens each."""
        plan = BudgetPlan.with_whole_shadow(shape, settings, tokens, sequences)
        rows = sequences * tokens * shape.layers * shape.row_bytes
        hot = {Budget.ALL_HOT: 2 * rows + (1 << 20), Budget.SOME_HOT: rows // 3, Budget.LEAST: 0}
        return plan.required_bytes + hot[self]


class Path(StrEnum):
    """How a decode step gets at what it wants."""

    HOT = "hot"
    COLD = "cold"
    PREFETCHED = "prefetched"
    STREAMED = "streamed"


# Those that score in this process; tests with kernels or cards name theirs.
DEVICES = (*sorted(HOST_DEVICES), "core")
BATCHES = (1, 3)


@dataclass(frozen=True)
class Way:
    """One line of the matrix.

    Parameters
    ----------
    budget
        How much DRAM there is.
    device
        What scores, as in the settings.
    policy
        Of the hot pools, as in the settings.
    path
        How rows come, or shadows where they are streamed.
    batch
        Sequences that decode side by side.
    """

    budget: Budget = Budget.ALL_HOT
    device: str = "nvme"
    policy: str = "lru"
    path: Path = Path.HOT
    batch: int = 1

    def __str__(self) -> str:
        return "-".join(str(getattr(self, one.name)).replace(" ", "_") for one in fields(self))

    @property
    def can_be(self) -> bool:
        """Whether the columns go together."""
        if self.path is Path.STREAMED:
            # A device with room for shadows gets them before the drive does.
            return self.device in HOST_DEVICES
        return (self.path is Path.HOT) == (self.budget is Budget.ALL_HOT)

    def settings(self, chosen: Settings) -> Settings:
        """Return settings with this device, policy and path.

        A device gets all that it has room for, rather than what this machine's rates say.
        """
        if self.device not in HOST_DEVICES:
            chosen = chosen.changed(beta=0.0)
        return chosen.changed(
            device=self.device,
            pool_policy=self.policy,
            prefetch_blocks=4 if self.path is Path.PREFETCHED else 0,
        )

    def open(self, shape, chosen, cold_dir, tokens, **given) -> Runtime:
        """Return a runtime for sequences of at most so many tokens; `given` goes to it."""
        settings = self.settings(chosen)
        budget = self.budget.byte_count(shape, settings, tokens, self.batch)
        if self.path is Path.STREAMED:
            # The least budget has no room for what it takes to stream.
            budget += STREAM_BUFFERS * shadow_bytes(kernel_spec(shape, settings))
            given = {"shadow_limit_bytes": 0} | given
        return Runtime(shape, settings, budget, cold_dir, **given)

    def was_taken(self, statistics) -> bool:
        """Say whether the counts of a run are those of this path."""
        if self.path is Path.STREAMED:
            return statistics.shadow_read_bytes > 0
        if statistics.shadow_read_bytes:
            return False
        return (statistics.cold_rows_read > 0) == (self.path is not Path.HOT)


COLUMNS = {
    "budget": tuple(Budget),
    "device": DEVICES,
    "policy": tuple(POOL_POLICIES),
    "path": tuple(Path),
    "batch": BATCHES,
}


def every(**columns) -> Iterator[Way]:
    """Yield every line that can be; columns that are given have these values and no others."""
    unknown = columns.keys() - COLUMNS.keys()
    assert not unknown, f"the matrix has no column {unknown}"
    for values in product(*(COLUMNS | columns).values()):
        way = Way(*values)
        if way.can_be:
            yield way


def met(way: Way) -> set[tuple[tuple[str, object], ...]]:
    """Return the pairs of values that meet in a line."""
    values = [(one.name, getattr(way, one.name)) for one in fields(way)]
    return set(combinations(values, 2))


def pairs(**columns) -> list[Way]:
    """Return lines in which all pairs meet that can; always the same ones."""
    left = list(every(**columns))
    missing = set().union(*map(met, left))
    found = []
    while missing:
        best = max(left, key=lambda way: len(met(way) & missing))
        missing -= met(best)
        found.append(best)
    return found
