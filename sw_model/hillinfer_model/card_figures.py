# SPDX-License-Identifier: Apache-2.0
"""What a card does for a decode step as the host sees it, beside one host thread (modelled)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from types import MappingProxyType

from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.cycle_count import CLOCK_HERTZ
from hillinfer_model.cycle_model import score_cycles
from hillinfer_model.kernel_figures import DDR_ROOF, P2P_ROOF, launch_segments
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec
from hillinfer_model.launch_shape import TUPLES_PER_BEAT, key_beats, query_beats
from hillinfer_model.memory_model import TURNING

# Bytes of a shadow per second that one thread scores, measured: docs/results/scorer.md, Zen 5 with
# AVX-512 VNNI. Nobody scores FP16 keys on the host.
HOST_RATES = MappingProxyType({KeyMode.INT8: 24.6e9, KeyMode.INT4: 23.2e9, KeyMode.INT2: 12.2e9})
# Of a launch whose keys come from the drive, half of a device's slots for such.
STREAMED_SEGMENTS = 8
_TUPLE_BYTES = BEAT_BYTES // TUPLES_PER_BEAT


@dataclass(frozen=True)
class LaunchCosts:
    """What a launch costs beside the kernel: assumed, to be set to what a machine shows.

    Parameters
    ----------
    start
        Seconds from the host's call to the kernel's start.
    copy
        Seconds that every copy between host and card takes before its first byte.
    copy_rate
        Bytes per second of a copy; a SmartSSD's link is PCIe 3.0 x4.
    poll
        Seconds between two looks at the status beats. The end is seen half of it late.

    Raises
    ------
    ValueError
        Where a time is negative, or the rate is not positive, or one of them is no finite number.
    """

    start: float = 30e-6
    copy: float = 10e-6
    copy_rate: float = 3.2e9
    poll: float = 20e-6

    def __post_init__(self) -> None:
        """Refuse what no machine has."""
        times = (self.start, self.copy, self.poll)
        if not (all(0 <= one < inf for one in times) and 0 < self.copy_rate < inf):
            raise ValueError(f"{self}: times must be 0 or more, the rate above 0, and all finite")


@dataclass(frozen=True)
class CardFigures:
    """One layer's scoring by a card and by one host thread; modelled.

    Parameters
    ----------
    kernel_seconds
        Of the kernel, with refresh and turnaround.
    launch_seconds
        With start, copies of queries and scores, and polling.
    bus_limit
        Key beats per cycle that refresh and the bytes of the other ports leave.
    beats_per_cycle
        Of the kernel, at that memory.
    host_seconds
        Of one thread over the same shadow in DRAM; 0 where the host does not score such keys.
    score_bytes
        That come back to the host.
    key_bytes
        That are scored: what does not cross the host's link where the card reads them itself.
    p2p_seconds
        For the same keys from the drive, at the P2P roof, with the costs of the launch.
    beside_cycles, in_turn_cycles
        Of loads from the drive at the P2P roof and of the kernel, in launches of 8 segments: where
        what comes next is loaded while a launch scores, and where it is not.
    """

    kernel_seconds: float
    launch_seconds: float
    bus_limit: float
    beats_per_cycle: float
    host_seconds: float
    score_bytes: int
    key_bytes: int
    p2p_seconds: float
    beside_cycles: int
    in_turn_cycles: int

    @property
    def speedup(self) -> float:
        """How many times one host thread's rate the card has; 0 where there is none."""
        return self.host_seconds / self.launch_seconds


def card_figures(
    spec: KernelSpec, scope: Scope, tokens: int, costs: LaunchCosts, host_rate: float | None = None
) -> CardFigures:
    """Return what a launch over some tokens of one layer costs, all of it in one launch.

    Parameters
    ----------
    spec, scope
        The kernel; what shares one selected set.
    tokens
        Of the launch, in full segments but for the last.
    costs
        Beside the kernel.
    host_rate
        Bytes of a shadow per second of one thread; None for what was measured.
    """
    segments = launch_segments(tokens, spec)
    count = score_cycles(spec, scope, segments, TURNING)
    sets = spec.kv_heads if scope is Scope.KV_HEAD else 1
    score_bytes = tokens * sets * _TUPLE_BYTES
    query_bytes = len(segments) * (query_beats(spec) + 1) * BEAT_BYTES
    copies = 2 * costs.copy + (score_bytes + query_bytes) / costs.copy_rate
    beside = costs.start + copies + costs.poll / 2
    key_bytes = sum(key_beats(one.tokens, spec) for one in segments) * BEAT_BYTES
    rate = HOST_RATES.get(spec.key_mode) if host_rate is None else host_rate
    others = count.load_beats + count.write_beats
    loads, scores = key_bytes / P2P_ROOF * CLOCK_HERTZ, count.seconds * CLOCK_HERTZ
    # Nothing goes beside the first load, or beside scoring what came last.
    alone = min(loads, scores) / -(-len(segments) // STREAMED_SEGMENTS)
    return CardFigures(
        kernel_seconds=count.seconds,
        launch_seconds=count.seconds + beside,
        bus_limit=TURNING.bus_share * count.beats / (count.beats + others),
        beats_per_cycle=count.beats_per_cycle,
        host_seconds=key_bytes / rate if rate and spec.key_mode in HOST_RATES else 0.0,
        score_bytes=score_bytes,
        key_bytes=key_bytes,
        p2p_seconds=max(key_bytes / min(P2P_ROOF, DDR_ROOF), count.seconds) + beside,
        beside_cycles=round(max(loads, scores) + alone),
        in_turn_cycles=round(loads + scores),
    )
