# SPDX-License-Identifier: Apache-2.0
"""What a sealed cold pool costs a real model: reading a prompt and decoding, in pairs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import hillinfer
from hillinfer.generate.answering import Generation
from hillinfer.generate.tokens import Sampling
from hillinfer.models.loader import ModelOutline
from hillinfer.models.sources import ModelSource
from hillinfer.secrecy.pages import CipherRate
from hillinfer.settings import Settings
from hillinfer.system.files import prepare_report
from hillinfer.system.machine import NumberType
from hillinfer_bench.quality.texts import standard_library_samples
from hillinfer_bench.report.kinds import MachineKind

_CHUNK_TOKENS = 1024
_PLAIN, _SEALED = "no", "yes"


@dataclass(frozen=True)
class SealedPoolRequest:
    """Options of one run.

    Parameters
    ----------
    model
        A real one.
    directory
        On the drive; cold pools lie there.
    out
        Where the JSON goes.
    tokens, answer_tokens
        Of the prompt, and of its answer.
    rounds
        Pairs; one more warms up.
    """

    model: str
    directory: Path
    out: Path
    tokens: int
    answer_tokens: int
    rounds: int


@dataclass(frozen=True)
class Spent:
    """Of each round, seconds that passed and seconds of all threads' processors."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class SealedPoolRow:
    """One prompt, its answer, and what they took with either pool.

    Parameters
    ----------
    prefill, decode
        By `encrypt_cold_pool`.
    agrees
        Whether all answers have the same tokens.
    cipher
        Of the cipher alone, in one thread.
    """

    prefill: dict[str, Spent]
    decode: dict[str, Spent]
    agrees: bool
    cipher: CipherRate

    def ratios(self, part: str, clock: str) -> list[float]:
        """Return sealed over plain of each pair.

        Parameters
        ----------
        part, clock
            `prefill` or `decode`, `wall` or `processor`.
        """
        own = getattr(self, part)
        sealed, plain = (getattr(own[name], clock) for name in (_SEALED, _PLAIN))
        return [one / other for one, other in zip(sealed, plain, strict=True)]

    def text(self) -> str:
        """Return it for reading."""
        lines = [
            f"cipher alone: {self.cipher.seal / 1e9:.2f} GB/s sealing, "
            f"{self.cipher.open / 1e9:.2f} opening; answers "
            f"{'agree' if self.agrees else 'DIFFER'}"
        ]
        for part in ("prefill", "decode"):
            for clock in ("processor", "wall"):
                ratios = self.ratios(part, clock)
                low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
                plain = median(getattr(getattr(self, part)[_PLAIN], clock))
                lines.append(
                    f"{part}, {clock} seconds: plain {plain:.3f}, sealed over plain "
                    f"{median(ratios):.3f} (quarters {low:.3f} to {high:.3f})"
                )
        return "\n".join(lines)


def measure_sealed_pool(
    place: Path,
    model: Any,
    ids: Sequence[int],
    answer_tokens: int,
    rounds: int,
    say: Callable[[str], None],
    settings: Settings,
) -> SealedPoolRow:
    """Read a prompt and answer it over a sealed and over a plain cold pool, in turn.

    Parameters
    ----------
    place
        An existing directory for cold pools.
    model, ids
        Of transformers, and the prompt.
    answer_tokens, rounds
        As in `SealedPoolRequest`.
    say
        Takes a line of progress.
    settings
        All but the cold pool's.
    """
    names = _PLAIN, _SEALED
    prefill, decode = ({name: Spent() for name in names} for _ in range(2))
    answers = set()
    for number in range(rounds + 1):
        # Each is first as often as second.
        for name in names if number % 2 else reversed(names):
            changed = settings.changed(cold_dir=place, encrypt_cold_pool=name)
            with hillinfer.attach(model, changed) as hill:
                cache = hill.new_cache(len(ids) + answer_tokens)
                with closing(cache):
                    generation = Generation(model, cache, _CHUNK_TOKENS)
                    spent = [_timed(partial(generation.read, ids))]
                    answer: list[int] = []
                    decoded = generation.decode(Sampling(), answer_tokens, frozenset())
                    spent.append(_timed(partial(answer.extend, decoded)))
                answers.add(tuple(answer))
            if number:
                for part, (wall, processor) in zip((prefill, decode), spent, strict=True):
                    part[name].wall.append(wall)
                    part[name].processor.append(processor)
        say(f"pair {number} of {rounds}")
    return SealedPoolRow(prefill, decode, len(answers) == 1, CipherRate.measured())


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that something took, and those of all threads' processors."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def run(request: SealedPoolRequest, say: Callable[[str], None]) -> str:
    """Measure, write the report and return the table; parameters as of `storing.run.run`."""
    import torch

    prepare_report(request.out, "--out")
    request.directory.mkdir(parents=True, exist_ok=True)
    outline = ModelOutline.read(ModelSource.locate(request.model, say), NumberType.AUTO)
    (sample,) = standard_library_samples(outline.tokenizer, request.tokens, 1)
    model = outline.load().model
    with torch.no_grad(), TemporaryDirectory(dir=request.directory) as place:
        row = measure_sealed_pool(
            Path(place),
            model,
            list(sample.token_ids),
            request.answer_tokens,
            request.rounds,
            say,
            Settings(),
        )
    record = {"tokens": len(sample.token_ids), "answer_tokens": request.answer_tokens}
    record |= asdict(row) | MachineKind.here(model.dtype).as_record()
    request.out.write_text(json.dumps(record, indent=1))
    return row.text()
