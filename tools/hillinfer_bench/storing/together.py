# SPDX-License-Identifier: Apache-2.0
"""Processes that read one stored prefix at once, beside as many that read the drive plainly."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from hillinfer.store.keys import CHUNK_TOKENS, Namespace
from hillinfer.store.store import Store
from hillinfer_bench.storing.made_prompts import prompt
from hillinfer_bench.storing.speed import make_stored, read_all, read_plainly

_PLAIN, _STREAM, _END = "plain", "stream", "end"
# Rounds that are not counted, and times that the short ones of this row are as many as others.
_WARMING, _TURNS = 3, 2


@dataclass(frozen=True)
class TogetherRow:
    """Several processes at once.

    Parameters
    ----------
    processes, byte_count
        How many, and rows that each of them reads.
    stream_seconds
        Of each round: from the start of the first to the end of the last, rows compared with their
        checksums.
    drive_seconds
        Of each round, in turn with those: as many bytes each, in plain reads of 1 MiB.
    processor_seconds
        Of each round: processor time of all streams, which compare checksums and nothing else.
    cores
        How many the processes may use.
    """

    processes: int
    byte_count: int
    stream_seconds: list[float]
    drive_seconds: list[float]
    processor_seconds: list[float]
    cores: int

    @property
    def share_of_drive(self) -> float:
        """Rate of the streams together over that of the plain reads, medians."""
        return median(self.drive_seconds) / median(self.stream_seconds)

    @property
    def possible_share(self) -> float:
        """What arithmetic allows: all processor time of the streams on these cores."""
        drive = median(self.drive_seconds)
        return drive / max(drive, median(self.processor_seconds) / self.cores)


def measure_together(
    place: Path, name: str, layers: int, processes: int, rounds: int, say: Callable[[str], None]
) -> TogetherRow:
    """Store a prompt for each process, and let all of them read theirs back at once.

    Parameters
    ----------
    place
        Where the store is made.
    name, layers
        A shape's, and how many of its layers.
    processes, rounds
        How many read, and half as often as they do.
    say
        Takes a line of progress.
    """
    tokens = 2 * CHUNK_TOKENS
    prompts = [prompt(seed, tokens) for seed in range(1, processes + 1)]
    space = make_stored(place, name, layers, prompts)
    say(f"{processes} prompts of {tokens} tokens stored, each read by a process of its own")
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    with ExitStack() as running:
        for ids in prompts:
            own, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(place, space, ids, theirs), daemon=True)
            worker.start()
            theirs.close()
            running.callback(worker.join)
            running.callback(own.send, _END)
            pipes.append(own)
        sizes = [int(pipe.recv()) for pipe in pipes]
        streamed, plain, spent = [], [], []
        # A drive that was left alone gives more at first than it goes on giving.
        for _ in range(_WARMING):
            _all(pipes, _PLAIN)
        for _ in range(_TURNS * rounds):
            plain.append(_all(pipes, _PLAIN)[0])
            seconds, processor = _all(pipes, _STREAM)
            streamed.append(seconds)
            spent.append(processor)
    cores = len(os.sched_getaffinity(0))
    return TogetherRow(processes, sizes[0], streamed, plain, spent, cores)


def _all(pipes: list[Connection], what: str) -> tuple[float, float]:
    """Return the seconds that all of them took, and their processor time together."""
    started = time.perf_counter()
    for pipe in pipes:
        pipe.send(what)
    spent = sum(float(pipe.recv()) for pipe in pipes)
    return time.perf_counter() - started, spent


def _serve(place: Path, space: Namespace, ids: list[int], pipe: Connection) -> None:
    """Read when told to, until told to end."""
    with Store(place) as store:
        found = store.find(space, ids)
        assert found is not None, store.counts.last_failure
        with found:
            pipe.send(found.byte_count)
            while (what := pipe.recv()) != _END:
                began = time.process_time()
                if what == _PLAIN:
                    read_plainly(store, found)
                else:
                    read_all(found)
                pipe.send(time.process_time() - began)
