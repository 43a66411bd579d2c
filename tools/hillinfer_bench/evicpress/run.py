# SPDX-License-Identifier: Apache-2.0
"""The study as a whole: documents are stored and measured, rivals played, and figures compared."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hillinfer.catalogue.measuring import ProbeWishes
from hillinfer.errors import BrokenRunError, SettingsError
from hillinfer.models.loader import ModelOutline
from hillinfer.models.sources import ModelSource
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.store.store import Store
from hillinfer.system.files import prepare_report, write_whole
from hillinfer.system.machine import NumberType
from hillinfer_bench.evicpress.harness import Harness, Played
from hillinfer_bench.evicpress.rivals import CODES, DROPPED, Rival, rivals
from hillinfer_bench.evicpress.workload import WorkloadSize, mooncake_workload

_INSTRUCTION = "\n\nRepeat the part of the text above that begins with:\n\n"
_STORE_BYTES = 4 << 30
_LEAST_AGREEMENT = 0.97
GOALS = {
    "ttft_vs_lru_p50": 4.0,
    "ttft_vs_lru_p95": 4.0,
    "ttft_vs_int8_lru": 1.5,
    "ttft_vs_paper_policy": 1.3,
    "share_of_optimum": 0.98,
    "worst_tenth_agreement": 0.9,
}


@dataclass(frozen=True)
class EvicPressRequest:
    """What is measured.

    Parameters
    ----------
    model
        Registry name, folder or file.
    directory
        On the drive, where the store is made.
    out
        Where figures go as JSON.
    size
        Of the workload.
    budget_part
        Share of all rows' bytes that forms may take in memory.
    alphas
        Of the policies that have one, each played.
    probes, questions
        Of each document: those that forms are chosen by, and those that are asked.
    kills
        Processes that are killed while forms move; 0 for none.
    """

    model: str
    directory: Path
    out: Path
    size: WorkloadSize
    budget_part: float = 0.125
    alphas: tuple[float, ...] = (0.3, 1.0, 3.0)
    probes: int = 4
    questions: int = 3
    kills: int = 200

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        if not 0 < self.budget_part <= 1:
            raise SettingsError(f"budget={self.budget_part} is no share above 0 and up to 1")
        if not self.alphas or min(self.alphas) < 0:
            raise SettingsError(f"alpha={self.alphas} must be one number of seconds or more")
        if self.probes < 1 or self.questions < 1 or self.kills < 0:
            raise SettingsError(
                f"probes={self.probes}, questions={self.questions}, kills={self.kills}: give 1 or "
                "more of the first two, and 0 or more kills"
            )


def run(request: EvicPressRequest, say: Callable[[str], None]) -> str:
    """Measure, write the report and return the table."""
    prepare_report(request.out, "--out")
    source = ModelSource.locate(request.model, say)
    outline = ModelOutline.read(source, NumberType.FLOAT32)
    loaded = outline.load()
    workload = mooncake_workload(loaded.tokenizer, request.size)
    instruction = loaded.tokenizer.encode(_INSTRUCTION, add_special_tokens=False)
    began = time.perf_counter()
    request.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=request.directory) as folder:
        Store.create(Path(folder) / "store", _STORE_BYTES)
        with Store(Path(folder) / "store") as store:
            harness = Harness(
                loaded.model, StoredPrompts(store, loaded.model), workload, request.budget_part
            )
            profiling = 0.0
            prefill = 0.0
            for number in range(len(workload.documents)):
                wishes = ProbeWishes(
                    request.probes, request.questions, tuple(instruction), seed=number
                )
                stored = harness.store(number, ("held", *CODES, *DROPPED), wishes)
                profiling += stored.measured.seconds
                prefill += stored.measured.resting.text
                say(f"{stored.document.name}: {len(stored.document.ids)} tokens stored, measured")
            played = {}
            for rival in rivals(request.alphas):
                played[rival] = harness.play(rival)
                say(_line(rival.name, played[rival].figures()))
    arrivals = [one.time for one in workload.requests]
    rows = [
        {"rival": rival.name, **own.figures(), "rate_curve": own.rate_curve(arrivals)}
        for rival, own in played.items()
    ]
    figures = {**compared(played), **_killed(request.kills)}
    record = {
        "figures": figures,
        "goals": {name: {"goal": GOALS[name], "reached": figures[name]} for name in GOALS},
        "rows": rows,
        "settings": asdict(request),
        "all_bytes": harness.all_bytes,
        "budget_bytes": harness.budget,
        "profile_seconds": profiling,
        "prefill_seconds": prefill,
        "seconds": time.perf_counter() - began,
    }
    write_whole(request.out, json.dumps(record, default=str, indent=1).encode())
    lines = [_line(row["rival"], row) for row in rows]
    lines += [f"{name}: {value}, goal {GOALS.get(name, '-')}" for name, value in figures.items()]
    return "\n".join(lines)


def compared(played: dict[Rival, Played]) -> dict[str, Any]:
    """Return the figures of the goals, None where nothing says.

    Of a policy that has an α, that one counts whose answers agree by 0.97 or more and come soonest;
    where none does, the one that agrees most.
    """
    by_name = {rival.name: own.figures() for rival, own in played.items()}
    ours, paper = _best(by_name, "ours, α"), _best(by_name, "paper, α")
    lru = by_name["held + LRU"]
    mine = by_name[ours]
    optimal = played[_named(played, ours.replace("ours", "optimum"))]
    rival = _named(played, ours)
    own = played[rival]
    resting = played[_named(played, "recompute")]
    possible = optimal.utility(rival.alpha) - resting.utility(rival.alpha)
    gained = own.utility(rival.alpha) - resting.utility(rival.alpha)
    return {
        "ours": ours,
        "paper": paper,
        "agreement": mine["agreement"],
        "ttft_vs_lru_p50": lru["first_token_p50"] / mine["first_token_p50"],
        "ttft_vs_lru_p95": lru["first_token_p95"] / mine["first_token_p95"],
        "ttft_vs_int8_lru": (by_name["int8 + LRU"]["first_token_p50"] / mine["first_token_p50"]),
        "ttft_vs_int4_lru": (by_name["int4 + LRU"]["first_token_p50"] / mine["first_token_p50"]),
        "ttft_vs_paper_policy": by_name[paper]["first_token_p50"] / mine["first_token_p50"],
        "token_vs_lru": mine["token_p50"] / lru["token_p50"],
        "share_of_optimum": gained / possible if possible > 0 else 1.0,
        "worst_tenth_agreement": mine["worst_tenth_agreement"],
    }


def _killed(kills: int) -> dict[str, Any]:
    """Return the figures of kills, in a process of its own; None where none are wanted."""
    if not kills:
        return {"kills": None, "wrong_tokens": None}
    command = [sys.executable, "-m", "hillinfer_bench.evicpress.kills", "--kills", str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        raise BrokenRunError(f"the kills broke off: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _best(figures: dict[str, dict[str, Any]], begins: str) -> str:
    names = [name for name in figures if name.startswith(begins)]
    good = [name for name in names if figures[name]["agreement"] >= _LEAST_AGREEMENT]
    if good:
        return min(good, key=lambda name: figures[name]["first_token_p50"])
    return max(names, key=lambda name: figures[name]["agreement"])


def _named(played: dict[Rival, Played], name: str) -> Rival:
    return next(rival for rival in played if rival.name == name)


def _line(name: str, figures: dict[str, Any]) -> str:
    return (
        f"{name:26} first token p50 {figures['first_token_p50']:.3f} s, p95 "
        f"{figures['first_token_p95']:.3f} s, token {figures['token_p50']:.3f} s, agreement "
        f"{figures['agreement']:.3f}, worst tenth {figures['worst_tenth_agreement']:.3f}, "
        f"{figures['dram_peak_bytes'] / 1e6:.1f} MB, {figures['moves']} moves"
    )
