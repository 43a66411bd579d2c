# SPDX-License-Identifier: Apache-2.0
"""Plays the requests with files of a larger model's size: real reads and copies, no model.

What a form keeps of an answer is what was measured of the small model. What is timed is bringing a
form's bytes: a copy from memory, reads in order past the page cache, or reads of single rows.
Nothing is computed: no question is read, and codes are not widened, which a GPU does on its way.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from hillinfer.drive.calls import DriveCalls, Reads
from hillinfer.drive.engine_table import open_engine
from hillinfer.drive.files import PAGE_BYTES, ColdFile, aligned_buffer, probe_io_mode, round_up
from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.forms.table import make_form
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.placement.options import ON_DRIVE, Option, Tier
from hillinfer.placement.stock import Change
from hillinfer.settings import IOChoice, Settings
from hillinfer.shadow.store import shadow_bytes
from hillinfer_bench.evicpress.harness import Harness
from hillinfer_bench.evicpress.played import ENGINE, Played
from hillinfer_bench.evicpress.plays import Play, begun, play_together
from hillinfer_bench.evicpress.rivals import USUAL, Rival, rivals
from hillinfer_bench.evicpress.workload import Asked
from hillinfer_bench.placement.placing import Placing

LLAMA_8B = ModelShape(
    layers=32,
    kv_heads=8,
    query_heads=32,
    head_dim=128,
    stored_type=StoredType.BFLOAT16,
    max_positions=131072,
)
"""Rows of a page each: 8 heads of 128 numbers, keys and values, in 16 bits."""
SHADOWED = "shadow-int4"
SHADOWS = ", shadows"
"""How names of rivals end that may take the engine's form beside others."""
_PIECE = 1 << 20
_THREADS = 4
_MOST_FILE = 4 << 30
_LEAST_FILE = 16 << 20


@dataclass(frozen=True)
class Rates:
    """Bytes a second of this machine: copies, reads in order, and reads of single rows."""

    copied: float
    in_order: float
    single: float


class SizedFiles:
    """A file as large as documents' rows are together, and memory as large as the longest.

    Parameters
    ----------
    directory
        On the drive.
    longest_bytes, all_bytes
        Rows of the longest document, and of all.

    Attributes
    ----------
    rates
        As measured when it is opened.
    """

    def __init__(self, directory: Path, longest_bytes: int, all_bytes: int) -> None:
        calls = DriveCalls()
        self._file = ColdFile(directory, probe_io_mode(directory, calls), "sized rows", calls)
        self._engine = open_engine(IOChoice.AUTO, _THREADS, calls)
        size = round_up(max(longest_bytes, _LEAST_FILE), _PIECE)
        self._bytes = max(size, round_up(min(all_bytes, _MOST_FILE), _PIECE))
        self._from, self._into = aligned_buffer(size), aligned_buffer(size)
        self._from[:] = np.resize(np.arange(251, dtype=np.uint8), size)
        self._into[:] = 0
        for offset in range(0, self._bytes, _PIECE):
            self._file.write(self._from.data[:_PIECE], offset)
        self._draw = np.random.default_rng(0)
        rows = size // PAGE_BYTES // 8
        self.rates = Rates(
            size / self.copy(size),
            size / self.read(0, size),
            rows * PAGE_BYTES / self.read_rows(rows),
        )

    def copy(self, byte_count: int) -> float:
        """Copy bytes from memory to memory; return the seconds that took."""
        began = time.perf_counter()
        np.copyto(self._into[:byte_count], self._from[:byte_count])
        return time.perf_counter() - began

    def read(self, number: int, byte_count: int) -> float:
        """Read bytes in order, from a place of the document's own; return the seconds that took."""
        size = round_up(byte_count, PAGE_BYTES)
        offset = number * 9973 * PAGE_BYTES % max(PAGE_BYTES, self._bytes - size)
        reads = Reads.in_pieces(offset, size, _PIECE)
        began = time.perf_counter()
        self._engine.read(self._file, self._into, reads)
        return time.perf_counter() - began

    def read_rows(self, rows: int) -> float:
        """Read single rows of a page each from all over the file; return the seconds that took."""
        places = self._draw.integers(0, self._bytes // PAGE_BYTES, rows) * PAGE_BYTES
        goes_to = np.arange(rows) * PAGE_BYTES
        reads = Reads(np.sort(places), goes_to, np.full(rows, PAGE_BYTES))
        began = time.perf_counter()
        self._engine.read(self._file, self._into, reads)
        return time.perf_counter() - began

    def close(self) -> None:
        """Give all of it back; harmless when done twice."""
        self._engine.close()
        self._file.close()


class SizedStudy:
    """Documents with as many tokens as there, times a factor, in rows of a larger model.

    Parameters
    ----------
    harness
        That has measured what forms keep.
    factor
        Tokens here of a token there.
    budget_part
        Share of all rows' bytes that forms may take in memory.
    shadowed_quality
        What answers keep that select rows behind key shadows; None where nobody measured it.
    directory
        On the drive.

    Attributes
    ----------
    files
        To be closed at the end.
    tokens, all_bytes, budget
        Of each document; bytes of all their rows, and those that forms may take in memory.
    """

    def __init__(
        self,
        harness: Harness,
        factor: int,
        budget_part: float,
        shadowed_quality: float | None,
        directory: Path,
    ) -> None:
        self.harness, self._shadowed = harness, shadowed_quality
        self._settings = Settings().changed(shadow="int4")
        self.tokens = [len(one.document.ids) * factor for one in harness.stored]
        sizes = [LLAMA_8B.token_bytes * tokens for tokens in self.tokens]
        self.all_bytes, self.budget = sum(sizes), int(budget_part * sum(sizes))
        self.files = SizedFiles(directory, max(sizes), sum(sizes))

    def play(self, own: Sequence[Rival]) -> dict[Rival, Played]:
        """Play the whole workload to rivals in turn, from empty memory on."""
        plays = {rival: _SizedPlay(self, rival) for rival in own}
        play_together([*plays.values()], self.harness.workload.requests)
        return {rival: play.played for rival, play in plays.items()}

    def forms_of(self, rival: Rival) -> list[str]:
        """Return the names of a rival's forms that were measured."""
        return [one for one in rival.forms if one != SHADOWED or self._shadowed is not None]

    def options(self, number: int, rival: Rival) -> list[Option]:
        """Return what a document may lie as, as a rival knows it, by this machine's rates."""
        tokens, rates = self.tokens[number], self.files.rates
        measured = self.harness.profile(number, rival)
        lower = {one.form: one.lower for one in measured.forms}
        if self._shadowed is not None:
            lower[SHADOWED] = self._shadowed
        rows = LLAMA_8B.token_bytes * tokens
        options = [Option("rows", "rest", 0, 1.0, rows / rates.in_order)]
        for form in self.forms_of(rival):
            if form not in lower:
                continue
            size = self._byte_count(form, tokens)
            if form == SHADOWED:
                first = self._selected_rows(tokens) * PAGE_BYTES / rates.single
                options.append(Option(form, "dram", size, lower[form], first))
                continue
            options.append(Option(form, "dram", size, lower[form], size / rates.copied))
            if rival.uses_drive:
                options.append(Option(form, "drive", size, lower[form], size / rates.in_order))
        return options

    def brought(self, number: int, option: Option | None) -> float:
        """Bring what an answer needs; return the seconds that took."""
        tokens = self.tokens[number]
        if option is None:
            return self.files.read(number, LLAMA_8B.token_bytes * tokens)
        if option.form == SHADOWED:
            return self.files.read_rows(self._selected_rows(tokens))
        if option.tier == "drive":
            return self.files.read(number, option.byte_count)
        return self.files.copy(option.byte_count)

    def agreement(self, number: int, form: str, turn: int) -> float:
        """Return what a question's answer keeps of the small model behind a form."""
        if form == SHADOWED:
            return self._shadowed or 0.0
        return self.harness.agreement(number, form, turn)

    # --- inside ----------------------------------------------------------------------------

    def _byte_count(self, form: str, tokens: int) -> int:
        if form == SHADOWED:
            spec = kernel_spec(LLAMA_8B, self._settings)
            segments = -(-tokens // spec.segment_tokens)
            return LLAMA_8B.layers * segments * shadow_bytes(spec)
        return make_form(form).byte_count(LLAMA_8B, tokens)

    def _selected_rows(self, tokens: int) -> int:
        return LLAMA_8B.layers * int(self._settings.importance_rate * tokens)


class _SizedPlay(Play):
    def __init__(self, study: SizedStudy, rival: Rival) -> None:
        super().__init__(study.harness)
        self._study, self._rival = study, rival
        packed = (Tier("drive", study.all_bytes),) if rival.uses_drive else ()
        self._tiers = (Tier("dram", study.budget), *packed, Tier("rest"))
        self._placing: Placing | None = None
        self._lies: dict[int, Option] = {}

    def begin(self, now: float) -> None:
        self._placing = begun(
            self._rival,
            self._tiers,
            [self._study.options(number, self._rival) for number in self._harness.numbers],
            Counter(one.document for one in self._harness.workload.requests),
            now,
            self._follow,
        )

    def ask(self, asked: Asked) -> None:
        number = asked.document
        option = self._lies.get(number)
        self.played.first_tokens.append(self._study.brought(number, option))
        self.played.documents.append(number)
        form = "rows" if option is None else option.form
        on_drive = option is not None and option.tier == "drive"
        self.played.forms.append(f"{ON_DRIVE * on_drive}{form}")
        if option is None or on_drive:
            rows = LLAMA_8B.token_bytes * self._study.tokens[number]
            self.played.read_bytes += rows if option is None else option.byte_count

    def settle(self, asked: Asked) -> None:
        if self._placing is not None:
            self._follow(self._placing.used(str(asked.document), asked.time))

    def finish(self) -> None:
        asked = self._harness.asked(self.played)
        self.played.agreements = [self._study.agreement(*one) for one in asked]

    def _follow(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self._lies.pop(int(change.context), None)
            if change.after is not None and change.after.tier != "rest":
                self._lies[int(change.context)] = change.after
                self.played.moves += 1
        held = sum(one.byte_count for one in self._lies.values() if one.tier == "dram")
        self.played.dram_peak = max(self.played.dram_peak, held)


def shadowed_quality(played: Mapping[str, Played]) -> float | None:
    """Return what answers kept that a server gave behind key shadows, or at rest, which is alike.

    Parameters
    ----------
    played
        What rivals did, by their names.
    """
    found = [
        agreement
        for name, own in played.items()
        if name.startswith("ours served")
        for form, agreement in zip(own.forms, own.agreements, strict=True)
        if form in (ENGINE, SHADOWED, "lead-0.1")
    ]
    return fmean(found) if found else None


def sized_rivals(alphas: tuple[float, ...]) -> list[Rival]:
    """Return those that can be played so, and ours with the engine's form beside."""
    simple = [
        one
        for one in rivals(alphas)
        if (one.policy is not None or one.knows_uses) and not one.is_served
    ]
    own = [
        replace(one, name=f"{one.name}{SHADOWS}", forms=(*USUAL, SHADOWED))
        for one in simple
        if one.name.startswith("ours, α")
    ]
    return [*simple, *own]


def sized_figures(study: SizedStudy, played: Mapping[Rival, Played]) -> dict[str, Any]:
    """Return what the report says of it.

    Parameters
    ----------
    study, played
        The study, and what its rivals did.
    """
    return {
        "model": "rows of Llama 3.1 8B; qualities are the small model's; nothing is computed",
        "longest_tokens": max(study.tokens),
        "all_bytes": study.all_bytes,
        "budget_bytes": study.budget,
        "bytes_a_second": asdict(study.files.rates),
        "rows": [{"rival": rival.name, **own.figures()} for rival, own in played.items()],
    }
