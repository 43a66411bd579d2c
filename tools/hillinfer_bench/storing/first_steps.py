# SPDX-License-Identifier: Apache-2.0
"""What the first decode steps read behind a prompt: just read, from a store, from a session."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import hillinfer
from hillinfer.errors import HillInferError, SettingsError
from hillinfer.hf.cache import HillInferCache
from hillinfer.hf.stored_cache import StoredCache
from hillinfer.models.loader import ModelOutline
from hillinfer.models.sources import ModelSource
from hillinfer.settings import Settings
from hillinfer.statistics import CacheStatistics
from hillinfer.store.keys import CHUNK_TOKENS
from hillinfer.store.store import Store
from hillinfer.system.files import prepare_report
from hillinfer.system.machine import NumberType
from hillinfer_bench.quality.texts import standard_library_samples
from hillinfer_bench.report.kinds import MachineKind

# Steps are told by tens.
TEN = 10
# Of the rows of a prompt, with shadows beside them.
_STORE_ROOM = 2


class Source(StrEnum):
    """Where the tokens before a step come from."""

    READ = "just read"
    STORE = "from a store"
    SESSION = "from a session"


@dataclass(frozen=True)
class FirstStepsRequest:
    """Options of one run.

    Parameters
    ----------
    model
        A real one.
    directory
        On the drive; cold pools, stores and sessions lie there.
    out
        Where the JSON goes.
    tokens
        Before the first step, a multiple of 1,024: of others a store leaves more to be read.
    steps
        How many follow, by tens.
    budgets
        Each as `dram_budget` takes it.

    Raises
    ------
    SettingsError
        Where tokens or steps are not such a number.
    """

    model: str
    directory: Path
    out: Path
    tokens: int
    steps: int
    budgets: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse values that mean nothing, before a model is loaded."""
        if self.tokens < CHUNK_TOKENS or self.tokens % CHUNK_TOKENS:
            raise SettingsError(f"tokens={self.tokens} must be a multiple of {CHUNK_TOKENS}")
        if self.steps < TEN or self.steps % TEN:
            raise SettingsError(f"steps={self.steps} must be a multiple of {TEN}")


@dataclass(frozen=True)
class Ten:
    """Means of ten steps.

    Parameters
    ----------
    read_bytes
        From the drive, per token.
    without_codes
        Coded tokens of all layers whose codes DRAM did not have, per token.
    as_rows
        Of these, those whose rows came.
    """

    read_bytes: float
    without_codes: float
    as_rows: float

    @classmethod
    def of(cls, counted: CacheStatistics) -> Ten:
        """Return the means of what ten steps counted."""
        rows = counted.coded_arrivals - counted.coded_reads
        means = (count / TEN for count in (counted.cold_read_bytes, counted.coded_arrivals, rows))
        return cls(*means)


@dataclass(frozen=True)
class FirstSteps:
    """Steps behind one prompt that came from one source.

    Parameters
    ----------
    source, budget
        Whence, and of what DRAM budget.
    opened_seconds, opened_processor_seconds
        What having the prompt's tokens took, and that of all threads' processors.
    tens
        Of the steps.
    logits
        SHA-256 of the logits of all steps.
    """

    source: Source
    budget: str
    opened_seconds: float
    opened_processor_seconds: float
    tens: list[Ten]
    logits: str

    def text(self) -> str:
        """Return the first, second and last ten steps for reading."""
        shown = {0: "1 to 10", 1: "11 to 20", len(self.tens) - 1: "last ten"}
        told = (
            f"{shown[at]}: {ten.read_bytes / 1e6:.1f} MB, {ten.as_rows:,.0f} of "
            f"{ten.without_codes:,.0f} cold codes as rows"
            for at, ten in enumerate(self.tens)
            if at in shown
        )
        return f"{self.budget}, {self.source}: {'; '.join(told)}"


def text_of(rows: Sequence[FirstSteps]) -> str:
    """Return a line for each row, and whether those of one budget have the same logits."""
    lines = [row.text() for row in rows]
    for budget in dict.fromkeys(row.budget for row in rows):
        bits = {row.logits for row in rows if row.budget == budget}
        lines.append(f"{budget}: logits {'are the same bits' if len(bits) == 1 else 'DIFFER'}")
    return "\n".join(lines)


def measure_first_steps(
    place: Path,
    model: Any,
    ids: Sequence[int],
    steps: int,
    settings: Settings,
    say: Callable[[str], None],
) -> list[FirstSteps]:
    """Let the same steps follow the same prompt from each source.

    Parameters
    ----------
    place
        An empty directory on the drive.
    model, ids
        Of transformers, and a prompt of whole chunks with the tokens of the steps behind it.
    steps
        By tens.
    settings
        All but the cold pool's place.
    say
        Takes a line of progress.
    """
    held, budget = len(ids) - steps, str(settings.dram_budget)
    prompt, follow = torch.tensor([list(ids[: held + 1])]), ids[held:]
    changed, session = settings.changed(cold_dir=place), place / "session"
    rows: list[FirstSteps] = []

    def note(source: Source, cache: HillInferCache, spent: tuple[float, float]) -> None:
        rows.append(FirstSteps(source, budget, *spent, *_steps(model, cache, follow)))
        say(rows[-1].text())

    with hillinfer.attach(model, changed) as hill:
        with closing(hill.new_cache(len(ids))) as cache:
            clock = _Clock()
            _read(model, cache, prompt[:, :held])
            spent = clock.spent()
            row_bytes = cache.statistics().kv_bytes
            cache.save_session(session)
            note(Source.READ, cache, spent)
        clock = _Clock()
        with closing(hill.load_session(session, len(ids))) as cache:
            note(Source.SESSION, cache, clock.spent())
    Store.create(place / "store", _STORE_ROOM * row_bytes + (64 << 20))
    with (
        Store(place / "store") as store,
        hillinfer.attach(model, changed, store=store) as hill,
    ):
        with closing(_stored(hill.new_cache(len(ids)))) as first:
            first.look_up(prompt, chunk_tokens=CHUNK_TOKENS)
            _read(model, first, prompt)
            first.await_stored()
        with closing(_stored(hill.new_cache(len(ids)))) as found:
            clock = _Clock()
            tokens = found.look_up(prompt, chunk_tokens=CHUNK_TOKENS)
            if tokens != held:
                raise HillInferError(f"{tokens} of {held} tokens came from the store")
            note(Source.STORE, found, clock.spent())
    return rows


class _Clock:
    """Seconds since it was made, and those of all threads' processors."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def spent(self) -> tuple[float, float]:
        wall, processor = self._began
        return time.perf_counter() - wall, time.process_time() - processor


def _stored(cache: HillInferCache) -> StoredCache:
    assert isinstance(cache, StoredCache), "it is attached with a store"
    return cache


def _read(model: Any, cache: HillInferCache, ids: torch.Tensor) -> None:
    """Read those tokens of a prompt that a cache does not have."""
    for start in range(0, ids.shape[1], CHUNK_TOKENS):
        piece = ids[:, start : start + CHUNK_TOKENS]
        model(piece, past_key_values=cache, logits_to_keep=1)


def _steps(model: Any, cache: HillInferCache, ids: Sequence[int]) -> tuple[list[Ten], str]:
    """Take a step for each token; return what each ten of them read, and the digest of logits."""
    tens: list[Ten] = []
    digest, before = hashlib.sha256(), cache.statistics()
    for at, one in enumerate(ids, 1):
        output = model(torch.tensor([[one]]), past_key_values=cache)
        digest.update(output.logits.float().numpy().tobytes())
        if at % TEN == 0:
            now = cache.statistics()
            tens.append(Ten.of(now.minus(before)))
            before = now
    return tens, digest.hexdigest()


def run(request: FirstStepsRequest, say: Callable[[str], None]) -> str:
    """Measure, write the report and return the table; parameters as of `storing.run.run`."""
    prepare_report(request.out, "--out")
    request.directory.mkdir(parents=True, exist_ok=True)
    outline = ModelOutline.read(ModelSource.locate(request.model, say), NumberType.AUTO)
    count = request.tokens + request.steps
    (sample,) = standard_library_samples(outline.tokenizer, count, 1)
    model, rows = outline.load().model, list[FirstSteps]()
    for budget in request.budgets:
        settings = Settings().changed(dram_budget=budget)
        with torch.no_grad(), TemporaryDirectory(dir=request.directory) as place:
            ids = sample.token_ids[:count]
            rows += measure_first_steps(Path(place), model, ids, request.steps, settings, say)
    record: dict[str, Any] = {"tokens": request.tokens, "steps": request.steps}
    record |= {"rows": [asdict(row) for row in rows]} | MachineKind.here(model.dtype).as_record()
    request.out.write_text(json.dumps(record, indent=1))
    return text_of(rows)
