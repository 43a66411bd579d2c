# SPDX-License-Identifier: Apache-2.0
"""Cycles of a launch, from the spec, the segments and the memory (a model, not a measurement).

The model follows every burst of the key port through four moments: its address goes out, its first
beat is ready, its last beat has arrived, its last beat is computed. An address waits for the
command, for room in the key FIFO and for one of the open bursts; computing waits for the segment's
blocks and takes a beat per cycle. Blocks of a segment are loaded while the one before is computed.
Other beats on a shared bus delay the next key burst by as many cycles.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence

from hillinfer_model import kernel_timing as timing
from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.coded_cycles import product_beats
from hillinfer_model.cycle_count import CycleCount
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec
from hillinfer_model.key_stream import KeyStream
from hillinfer_model.latencies import Latencies
from hillinfer_model.launch_shape import (
    SegmentShape,
    WriteBurst,
    code_beats,
    key_beats,
    query_beats,
    row_bursts,
    score_writes,
    shadow_bursts,
    shadow_writes,
    statistics_beats,
)
from hillinfer_model.memory_model import MemoryModel
from hillinfer_model.write_stream import WriteStream


def score_cycles(
    spec: KernelSpec,
    scope: Scope,
    segments: Sequence[SegmentShape],
    memory: MemoryModel,
    queries: int = 1,
) -> CycleCount:
    """Return the modelled cycles and beats of one `score_tokens`.

    Parameters
    ----------
    spec, scope
        The kernel's shape; what shares one selected set.
    segments
        In the order of the launch.
    memory
        How the memory behaves.
    queries
        That one pass over the keys scores (contract, section 17). Keys come once; query blocks are
        taken apart one after the other, and of each 16 tokens the beats of all queries follow.
    """
    rows = spec.key_mode is KeyMode.FP16

    def bursts(shape: SegmentShape) -> Iterable[int]:
        return row_bursts(shape, spec) if rows else shadow_bursts(shape, spec)

    return _Launch(
        memory,
        bursts,
        lambda shape: score_writes(shape, spec, scope, queries),
        load_cycles=queries * timing.query_load(spec)
        + (timing.statistics_load(spec) if rows else 0),
        load_beats=queries * query_beats(spec) + (statistics_beats(spec) if rows else 0),
        depth=timing.score_depth(spec) + queries - 1,
    ).run(segments, lambda tokens: code_beats(tokens, spec))


def kept_score_cycles(
    spec: KernelSpec, scope: Scope, segments: Sequence[SegmentShape], memory: MemoryModel
) -> CycleCount:
    """Return `score_cycles` of a kernel that also writes L' of every query head to its memory.

    No such kernel exists; one that attends to coded tokens afterwards needs it. It takes a shadow.
    """

    def writes(shape: SegmentShape) -> Iterator[WriteBurst]:
        kept = (
            WriteBurst(
                key_beats(min(first + GROUP_TOKENS, shape.tokens), spec),
                product_beats(min(GROUP_TOKENS, shape.tokens - first), spec),
            )
            for first in range(0, shape.tokens, GROUP_TOKENS)
        )
        scores = score_writes(shape, spec, scope)
        return heapq.merge(kept, scores, key=lambda burst: burst.after_beat)

    return _Launch(
        memory,
        lambda shape: shadow_bursts(shape, spec),
        writes,
        load_cycles=timing.query_load(spec),
        load_beats=query_beats(spec),
        depth=timing.score_depth(spec),
    ).run(segments, lambda tokens: code_beats(tokens, spec))


def shadow_cycles(
    spec: KernelSpec, segments: Sequence[SegmentShape], memory: MemoryModel
) -> CycleCount:
    """Return the modelled cycles and beats of one `make_shadow`.

    Raises
    ------
    ValueError
        Where the key mode has no shadow.
    """
    if spec.key_mode is KeyMode.FP16:
        raise ValueError("key mode fp16 has no shadow to make")
    return _Launch(
        memory,
        lambda shape: row_bursts(shape, spec),
        lambda shape: shadow_writes(shape, spec),
        load_cycles=timing.statistics_load(spec),
        load_beats=statistics_beats(spec),
        depth=timing.SHADOW_DEPTH,
    ).run(segments, None)


class _Launch:
    """The processes of one launch, in the order in which they meet."""

    def __init__(
        self,
        memory: MemoryModel,
        bursts: Callable[[SegmentShape], Iterable[int]],
        writes: Callable[[SegmentShape], Iterable[WriteBurst]],
        *,
        load_cycles: int,
        load_beats: int,
        depth: int,
    ) -> None:
        self._memory = memory
        self._bursts = bursts
        self._writes = writes
        self._load_cycles = load_cycles
        self._load_beats = load_beats
        self._depth = depth

    def run(
        self, segments: Sequence[SegmentShape], codes: Callable[[int], int] | None
    ) -> CycleCount:
        memory = self._memory
        latencies = Latencies(memory)
        start = float(timing.REFRESH_PHASE) if memory.refresh[0] else 0.0
        keys = KeyStream(memory, latencies)
        output = WriteStream(memory, latencies, keys)
        released = [start, start]
        command = start + timing.START
        descriptor = self._read(latencies, command, 1)
        loads = 0
        for shape in segments:
            ask = descriptor + timing.BLOCK_COMMAND
            loads += 1
            if shape.tokens == 0:
                output.empty_segment(descriptor + timing.KEY_COMMAND)
                descriptor = self._read(latencies, descriptor + timing.EMPTY_NEXT_COMMAND, 1)
                continue
            loads += self._load_beats
            keys.steal(self._load_beats + 1)
            arrival = self._read(latencies, ask, 1)
            loaded = max(
                max(arrival, released[0]) + self._load_cycles,
                memory.beats_end(arrival, self._load_beats),
            )
            keys.open_segment(
                descriptor + timing.KEY_COMMAND + timing.READ_COMMAND,
                loaded + timing.BLOCK_READY,
            )
            writes = iter(self._writes(shape))
            pending = next(writes, None)
            computed = 0
            for beats in self._bursts(shape):
                end = keys.burst(beats, output.room(self._depth))
                computed += beats
                while pending is not None and pending.after_beat <= computed:
                    late = computed - pending.after_beat
                    output.burst(end - late + self._depth, pending.beats)
                    pending = next(writes, None)
            output.end_segment()
            released = [released[1], keys.computed + self._depth]
            # Behind the blocks, on the same port.
            following = self._read(latencies, descriptor + timing.NEXT_COMMAND, 1, bursts=2)
            descriptor = max(following, loaded - timing.LOAD_LEAD)
        end = output.finish(command) + timing.END
        total = keys.beats
        code = sum(codes(shape.tokens) for shape in segments) if codes else total
        return CycleCount(round(end - start), total, code, loads, output.beats)

    def _read(self, latencies: Latencies, command: float, beats: int, bursts: int = 1) -> float:
        """Return when the last of some beats that a command asks for is at hand."""
        ready = command + timing.READ_COMMAND + latencies.usual_read(bursts)
        return self._memory.beats_end(ready, beats) + timing.READ_DATA
