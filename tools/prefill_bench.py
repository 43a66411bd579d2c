# SPDX-License-Identifier: Apache-2.0
"""`make prefill`: measures the time to the first token beside ordinary prefill in equal chunks.

python tools/prefill_bench.py --out build/reports/prefill.json

The rival is transformers' DynamicCache with SDPA: the same model, prompt, chunk and threads. Every
round reads each prompt once with each contender, so that what else the machine does falls on all
of them. Reported are wall time and the process's CPU time, all threads together, to the logits
that the first token is chosen from: the fastest and the median round.

The goal is judged where the budget holds the prompt's rows whole; smaller budgets stand beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from transformers import DynamicCache

from hillinfer.drive.directories import prepared_cold_dir
from hillinfer.errors import BudgetError
from hillinfer.generate.answering import Generation
from hillinfer.hf.attach import Attachment
from hillinfer.hf.cache import HillInferCache
from hillinfer.models.loader import LoadedModel, load_model
from hillinfer.settings import Settings
from hillinfer.system.machine import NumberType
from hillinfer_bench.report.kinds import MachineKind
from hillinfer_bench.report.rows import LARGEST_SPREAD, Timing

GOAL = 1.10
RIVAL, OURS = "ordinary", "hillinfer"
_MET: dict[object, str] = {True: "met", False: "not met", None: "not judged"}


@dataclass(frozen=True)
class Reading:
    """How long one prompt took.

    Parameters
    ----------
    seconds
        Wall time to the logits of the first new token.
    cpu_seconds
        CPU time of the process, all threads together.
    budget_share
        DRAM budget over the bytes of the prompt's rows; None without a budget.
    """

    seconds: float
    cpu_seconds: float
    budget_share: float | None = None


@dataclass(frozen=True)
class Refusal:
    """A contender that could not take part at one context.

    Parameters
    ----------
    contender, tokens
        As in a row.
    why
        In words.
    """

    contender: str
    tokens: int
    why: str


@dataclass(frozen=True)
class Row:
    """One contender at one context.

    Parameters
    ----------
    contender
        `ordinary`, or HillInfer with its budget.
    tokens
        Of the prompt.
    fastest, median
        Of the rounds, seconds and CPU seconds apart.
    seconds_ratio, cpu_ratio
        Median over the rounds of this contender's time over the rival's in the same round.
    spread
        Of the rounds' wall times, as `Timing` has it; None with a single round, which tells none.
    budget_share
        DRAM budget over the bytes of the prompt's rows; None for the rival.
    """

    contender: str
    tokens: int
    fastest: Reading
    median: Reading
    seconds_ratio: float
    cpu_ratio: float
    spread: float | None
    budget_share: float | None

    @property
    def flagged(self) -> bool:
        """Whether the rounds lie too far apart to mean much, or nobody knows how far."""
        return self.spread is None or self.spread > LARGEST_SPREAD

    @property
    def name(self) -> str:
        """As goals call it."""
        return f"{self.contender} at {self.tokens} tokens"

    def as_dict(self) -> dict[str, Any]:
        """As the report has it."""
        return {**asdict(self), "flagged": self.flagged}


def prompt_ids(loaded: LoadedModel, tokens: int) -> list[int]:
    """Return the first tokens of a long English text: Python's own help."""
    text = "\n\n".join(topics.topics[name].strip() for name in sorted(topics.topics))
    ids: list[int] = loaded.tokenizer(text)["input_ids"]
    if len(ids) < tokens:
        raise SystemExit(f"the text has {len(ids)} tokens: choose --contexts below that")
    return ids[:tokens]


def reading(loaded: LoadedModel, cache: Any, ids: list[int], chunk: int) -> Reading:
    """Read a prompt into a cache, close it and return how long reading took."""
    generation = Generation(loaded.model, cache, chunk)
    cpu, wall = time.process_time(), time.perf_counter()
    try:
        generation.read(ids)
        taken = Reading(time.perf_counter() - wall, time.process_time() - cpu)
        if not isinstance(cache, HillInferCache):
            return taken
        statistics = cache.statistics()
        return replace(taken, budget_share=statistics.dram_budget_bytes / statistics.kv_bytes)
    finally:
        generation.close()


def summary(tokens: int, readings: dict[str, list[Reading]]) -> list[Row]:
    """Return a row per contender; `readings` holds one of each round, in order."""
    rows = []
    for contender, own in readings.items():
        rounds = list(zip(own, readings[RIVAL], strict=True))
        rows.append(
            Row(
                contender=contender,
                tokens=tokens,
                fastest=_each(own, min),
                median=_each(own, statistics.median),
                seconds_ratio=statistics.median(a.seconds / b.seconds for a, b in rounds),
                cpu_ratio=statistics.median(a.cpu_seconds / b.cpu_seconds for a, b in rounds),
                spread=Timing.of([one.seconds for one in own]).spread if len(own) > 1 else None,
                budget_share=own[0].budget_share,
            )
        )
    return rows


def _each(readings: list[Reading], choose: Callable[[list[float]], float]) -> Reading:
    return Reading(
        choose([one.seconds for one in readings]), choose([one.cpu_seconds for one in readings])
    )


def goal_records(
    budgets: Sequence[str], rows: Sequence[Row], refused: Sequence[Refusal]
) -> list[dict[str, object]]:
    """Return the goal at each budget beside what its worst context reached, for the report.

    It is met by a budget that holds every prompt's rows, in rows that are not `flagged`, at every
    context; it is judged by no other budget.
    """
    records = []
    for contender in (f"{OURS} {budget}" for budget in budgets):
        own = [row for row in rows if row.contender == contender]
        lacking = [one for one in refused if one.contender == contender]
        record: dict[str, object] = {
            "goal": f"time to the first token at most x{GOAL:.2f} ordinary chunked prefill, "
            f"{contender}",
            **dict.fromkeys(("reached", "row", "met", "flagged")),
            "reason": "; ".join(f"{one.tokens} tokens refused: {one.why}" for one in lacking),
        }
        records.append(record)
        if not own:
            continue
        worst = max(own, key=lambda row: row.seconds_ratio)
        rivals = {row.tokens: row for row in rows if row.contender == RIVAL}
        flagged = any(row.flagged or rivals[row.tokens].flagged for row in own)
        record |= {"reached": round(worst.seconds_ratio, 3), "row": worst.name, "flagged": flagged}
        least = min(row.budget_share or 0.0 for row in own)
        if least < 1:
            record["reason"] = f"not judged: the budget is {least:.0%} of the rows' bytes"
        elif worst.seconds_ratio > GOAL:
            record["met"] = False
        elif not lacking:
            record["met"] = not flagged
    return records


def measure(loaded: LoadedModel, chosen: argparse.Namespace) -> tuple[list[Row], list[Refusal]]:
    """Read prompts of every length with every contender, in turns, and print a line of each."""
    rows, refused = [], []
    for tokens in chosen.contexts:
        ids = prompt_ids(loaded, tokens)
        contenders = [RIVAL, *(f"{OURS} {budget}" for budget in chosen.budgets)]
        readings: dict[str, list[Reading]] = {}
        # The first round warms up and is not counted.
        for number in range(chosen.rounds + 1):
            for contender in list(contenders):
                try:
                    one = turn(loaded, contender, ids, chosen)
                except BudgetError as error:
                    print(f"{tokens:>7} {contender:<16} refused: {error}", flush=True)
                    contenders.remove(contender)
                    readings.pop(contender, None)
                    refused.append(Refusal(contender, tokens, str(error)))
                    continue
                if number:
                    readings.setdefault(contender, []).append(one)
        for row in summary(tokens, readings):
            print(
                f"{row.tokens:>7} {row.contender:<16} {row.fastest.seconds:8.3f} s "
                f"({row.median.seconds:.3f})  CPU {row.fastest.cpu_seconds:8.3f} s "
                f"({row.median.cpu_seconds:.3f})  x{row.seconds_ratio:.3f}  "
                f"CPU x{row.cpu_ratio:.3f}" + ("  flagged" if row.flagged else ""),
                flush=True,
            )
            rows.append(row)
    return rows, refused


def turn(
    loaded: LoadedModel, contender: str, ids: list[int], chosen: argparse.Namespace
) -> Reading:
    """Let one contender read a prompt with a new cache."""
    if contender == RIVAL:
        return reading(loaded, DynamicCache(), ids, chosen.chunk)
    budget = contender.removeprefix(OURS).strip()
    settings = Settings().changed(dram_budget=budget, cold_dir=chosen.cold_dir)
    with Attachment(loaded.model, settings) as hill:
        # Some room beyond the prompt, as far as the model has positions.
        expected = min(len(ids) + 64, loaded.shape.max_positions)
        return reading(loaded, hill.new_cache(expected_tokens=expected), ids, chosen.chunk)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write a report with the goal beside what was reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/reports/prefill.json"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=[one.value for one in NumberType])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 4096, 7800])
    parser.add_argument("--budgets", nargs="+", default=["25%", "120%"])
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of one forward pass")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cold-dir", type=Path)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    chosen.cold_dir = prepared_cold_dir(chosen.cold_dir)

    loaded = load_model(chosen.model, NumberType(chosen.dtype))
    loaded.model.set_attn_implementation("sdpa")
    print(f"{loaded.name}, {chosen.dtype}, {chosen.threads} threads, chunks of {chosen.chunk}")
    print("tokens, contender: fastest round (median), CPU time, ratios to ordinary", flush=True)
    rows, refused = measure(loaded, chosen)
    goals = goal_records(chosen.budgets, rows, refused)
    report = {
        "label": "measured",
        **MachineKind.here(loaded.model.dtype).as_record(),
        "threads": chosen.threads,
        "model": loaded.name,
        "dtype": chosen.dtype,
        "chunk": chosen.chunk,
        "rival": "transformers' DynamicCache, sdpa, the same chunk",
        "rounds": chosen.rounds,
        "rows": [row.as_dict() for row in rows],
        "refused": [asdict(one) for one in refused],
        "goals": goals,
    }
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(report, indent=2) + "\n")
    for one in goals:
        doubts = "; flagged" if one["flagged"] else ""
        reason = f"; {one['reason']}" if one["reason"] else ""
        print(f"{one['goal']}: {one['reached']}: {_MET[one['met']]}{doubts}{reason}")
    print(f"report: {chosen.out}")


if __name__ == "__main__":
    main()
