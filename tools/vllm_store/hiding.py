# SPDX-License-Identifier: Apache-2.0
"""How much of reading is hidden behind computing, and how much can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Hiding:
    """A first token from the store, beside its parts alone; medians of rounds, in seconds.

    Parameters
    ----------
    rounds
        How many.
    stored
        First token of a prompt that comes from the store.
    compute
        The same of a prompt that is in vLLM's own prefix cache: computing the rest alone.
    read
        Bringing all rows to their blocks while nothing computes.
    first_layer
        Of that, until those of the first layer are there: no layer can compute meanwhile.
    busy
        Processor time of computing alone and reading alone together.
    busy_first_layer
        Of that, what the first layer's rows took.
    cores
        How many the process may use.
    """

    rounds: int
    stored: float
    compute: float
    read: float
    first_layer: float
    busy: float
    busy_first_layer: float
    cores: int

    @classmethod
    def of(cls, rounds: Sequence[Mapping[str, float]], cores: int) -> Hiding:
        """Return the medians of rounds; the first one warms up, and is not counted."""
        own = rounds[1:]

        def middle(*names: str) -> float:
            return median(sum(one[name] for name in names) for one in own)

        return cls(
            len(own),
            middle("stored"),
            middle("compute"),
            middle("read"),
            middle("first_layer"),
            middle("busy_compute", "busy_read"),
            middle("busy_first_layer"),
            cores,
        )

    @property
    def possible(self) -> float:
        """What arithmetic allows: the first layer waits, and both share the cores from then on."""
        shared = (self.busy - self.busy_first_layer) / self.cores
        return self.first_layer + max(self.compute, self.read - self.first_layer, shared)

    def share(self, seconds: float) -> float:
        """Return the share of the smaller of reading and computing that a first token hides."""
        return (self.compute + self.read - seconds) / min(self.compute, self.read)

    def told(self) -> dict[str, Any]:
        """Return it as JSON can say it."""
        return asdict(self) | {
            "possible": self.possible,
            "hidden_share": self.share(self.stored),
            "hidden_possible": self.share(self.possible),
        }
