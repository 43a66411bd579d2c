# SPDX-License-Identifier: Apache-2.0
"""Whether every layer of a stretched selection is as local as its recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hillinfer_bench.replay.locality import TOLERANCE, Locality
from hillinfer_bench.replay.selection_trace import SelectionTrace


@dataclass(frozen=True)
class LocalityCheck:
    """Each recorded layer that is replayed, compared by itself with what was made of it.

    Layers that replay the same recorded one have the same sets, in any sequence, so each recorded
    layer is compared once.

    Parameters
    ----------
    record
        For the report: what was checked, the figures of each layer and their means.
    fault
        The first layer that differs, and how; None where none does.
    """

    record: dict[str, Any]
    fault: str | None

    @classmethod
    def of(
        cls, recorded: SelectionTrace, stretched: SelectionTrace, sources: Sequence[int]
    ) -> LocalityCheck:
        """Compare all of them.

        Parameters
        ----------
        recorded, stretched
            Before and after.
        sources
            For each layer of all sequences, the recorded layer that it replays.
        """
        own = sorted(set(sources))
        before = [Locality.of(_layer(recorded, source)) for source in own]
        after = [Locality.of(_layer(stretched, sources.index(source))) for source in own]
        differences = [
            f"recorded layer {source}: {difference}"
            for source, one, other in zip(own, after, before, strict=True)
            if (difference := one.difference(other)) is not None
        ]
        record = {
            "text": recorded.text,
            "recorded_tokens": recorded.prefix,
            "context": stretched.prefix,
            "alpha": stretched.settings.alpha,
            "checked": f"each of the {len(own)} recorded layers that {len(sources)} layers of all "
            f"sequences replay, by itself, in all {recorded.steps} steps",
            "recorded": _mean(before).as_record(),
            "stretched": _mean(after).as_record(),
            "layers": [
                {"layer": source, "recorded": one.as_record(), "stretched": other.as_record()}
                for source, one, other in zip(own, before, after, strict=True)
            ],
            "tolerance": TOLERANCE,
        }
        return cls(record, differences[0] if differences else None)


def _layer(trace: SelectionTrace, layer: int) -> SelectionTrace:
    return replace(trace, layers=(trace.layers[layer],), observed=((),))


def _mean(layers: Sequence[Locality]) -> Locality:
    return Locality(
        *(
            sum(getattr(one, field.name) for one in layers) / len(layers)
            for field in fields(Locality)
        )
    )
