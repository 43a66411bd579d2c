# SPDX-License-Identifier: Apache-2.0
"""What it gains to score several queries in one pass over the keys (contract, section 17)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hillinfer_model.choices import Scope
from hillinfer_model.cycle_count import CycleCount
from hillinfer_model.cycle_model import score_cycles
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.launch_shape import SegmentShape
from hillinfer_model.memory_model import MemoryModel


@dataclass(frozen=True)
class PassFigures:
    """A pass of several queries beside one of a single query over the same keys; modelled.

    Parameters
    ----------
    queries
        Of the pass.
    cycles, cycles_of_one
        Of a launch with all of them, and with one.
    gain
        Token scores per cycle over those of one query.
    limit
        Of the gain, by the beats that both launches move over one bus, or by the keys alone where
        every port has a bus of its own.
    """

    queries: int
    cycles: int
    cycles_of_one: int
    gain: float
    limit: float


def pass_figures(
    spec: KernelSpec,
    scope: Scope,
    segments: Sequence[SegmentShape],
    memory: MemoryModel,
    queries: int,
) -> PassFigures:
    """Return what a pass gains.

    Parameters
    ----------
    spec, scope
        The kernel's shape; what shares one selected set.
    segments
        In the order of the launch.
    memory
        How the memory behaves.
    queries
        That share the pass, at least 1.
    """
    one = score_cycles(spec, scope, segments, memory)
    several = score_cycles(spec, scope, segments, memory, queries)
    return PassFigures(
        queries=queries,
        cycles=several.cycles,
        cycles_of_one=one.cycles,
        gain=queries * one.cycles / several.cycles,
        limit=queries * _beats(one, memory) / _beats(several, memory),
    )


def _beats(count: CycleCount, memory: MemoryModel) -> int:
    others = count.load_beats + count.write_beats if memory.shared_bus else 0
    return count.beats + others
