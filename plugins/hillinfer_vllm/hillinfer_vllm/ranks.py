# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks: each stores its own heads, and a prompt is there when all ranks have it.

Every rank has a namespace of its own in one store. A step's rows wait until the scheduler has
counted that all ranks computed them from rows that came: a rank whose load failed makes those of
all others wrong, and only it knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hillinfer.store.keys import Namespace
from hillinfer.store.prefix import StoredPrefix
from hillinfer.store.store import Store
from hillinfer.store_namespaces import is_of
from hillinfer_vllm.adapters import adapted
from hillinfer_vllm.step_plan import Prompt


@dataclass
class RankReports:
    """How many ranks have computed and written each prompt of a step up to where.

    Parameters
    ----------
    counts
        Ranks by request and position behind its last token.
    """

    counts: Counter[tuple[str, int]] = field(default_factory=Counter)

    @classmethod
    def of(cls, written: Mapping[str, int]) -> RankReports:
        """Return the report of one rank."""
        return cls(Counter(written.items()))

    def joined(self, other: RankReports) -> RankReports:
        """Return the reports of both."""
        return RankReports(self.counts + other.counts)


class FoundByAll:
    """The longest prefix of a prompt that every rank has stored; leased while it is open.

    Parameters
    ----------
    store
        Of all ranks.
    namespaces
        Of each rank.
    prompt
        Which is looked up.
    others
        Of rows that another engine made of the whole model, which one rank alone may take.

    Attributes
    ----------
    tokens
        That all of them have.
    taken
        Namespace of the rows where another engine made them; None where this one did.
    """

    def __init__(
        self,
        store: Store,
        namespaces: Sequence[Namespace],
        prompt: Prompt,
        others: Sequence[Namespace] = (),
    ) -> None:
        self._found: list[StoredPrefix] = []
        tokens: list[int] = []
        self.taken: Namespace | None = None
        # Nobody says of another engine's rows which adapter made them.
        others = others if len(namespaces) == 1 and not prompt.adapter else ()
        for base in namespaces:
            space = adapted(base, prompt.adapter)
            found = store.find(space, prompt.ids, prompt.salt, others)
            tokens.append(0 if found is None else found.tokens)
            if found is None:
                break
            self._found.append(found)
            self.taken = next((one for one in others if is_of(found, one)), None)
        self.tokens = min(tokens)
        if not self.tokens:
            self.close()

    def close(self) -> None:
        """Let it be evicted; harmless when done twice."""
        for found in self._found:
            found.close()
        self._found = []
