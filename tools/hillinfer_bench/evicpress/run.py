# SPDX-License-Identifier: Apache-2.0
"""The study as a whole: documents are stored and measured, rivals played, and figures compared."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from hillinfer.catalogue.measuring import ProbeWishes
from hillinfer.errors import BrokenRunError, BudgetError, SettingsError
from hillinfer.models.loader import LoadedModel, ModelOutline
from hillinfer.models.sources import ModelSource
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.store.store import Store
from hillinfer.system.files import prepare_report, write_whole
from hillinfer.system.machine import NumberType
from hillinfer_bench.evicpress.harness import Harness
from hillinfer_bench.evicpress.impress import play_important
from hillinfer_bench.evicpress.notes import Notes, packed_played, unpacked_played
from hillinfer_bench.evicpress.played import Played
from hillinfer_bench.evicpress.rivals import Rival, rivals
from hillinfer_bench.evicpress.served import ServedDocuments
from hillinfer_bench.evicpress.sized import (
    SizedStudy,
    shadowed_quality,
    sized_figures,
    sized_rivals,
)
from hillinfer_bench.evicpress.workload import Workload, WorkloadSize, mooncake_workload

_INSTRUCTION = "\n\nRepeat the part of the text above that begins with:\n\n"
_STORE_BYTES = 4 << 30
_LEAST_AGREEMENT = 0.97
LLAMA_NAME = "Llama 8B"
GOALS = {
    "ttft_vs_lru_p50": 4.0,
    "ttft_vs_lru_p95": 4.0,
    "ttft_vs_int8_lru": 1.5,
    "ttft_vs_paper_policy": 1.3,
    "share_of_optimum": 0.98,
    "worst_tenth_agreement": 0.9,
    "token_vs_lru": 1.1,
    "ttft_vs_no_manager": 1.02,
    "profile_vs_prefill": 0.5,
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
    sized_factor
        Tokens of a document in files of a larger model's size, for each here; 0 for no such files.
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
    sized_factor: int = 2

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        if not 0 < self.budget_part <= 1:
            raise SettingsError(f"budget={self.budget_part} is no share above 0 and up to 1")
        if not self.alphas or min(self.alphas) < 0:
            raise SettingsError(f"alpha={self.alphas} must be one number of seconds or more")
        if self.probes < 1 or self.questions < 1 or min(self.kills, self.sized_factor) < 0:
            raise SettingsError(
                f"probes={self.probes}, questions={self.questions}, kills={self.kills}, "
                f"sized={self.sized_factor}: give 1 or more of the first two, and 0 or more of the "
                "others"
            )


def run(request: EvicPressRequest, say: Callable[[str], None]) -> str:
    """Measure, write the report and return the table.

    What broke off goes on where it was, as long as nothing else is asked for.
    """
    prepare_report(request.out, "--out")
    source = ModelSource.locate(request.model, say)
    outline = ModelOutline.read(source, NumberType.FLOAT32)
    loaded = outline.load()
    workload = mooncake_workload(loaded.tokenizer, request.size)
    began = time.perf_counter()
    asked_for = {
        name: value for name, value in asdict(request).items() if name not in ("out", "kills")
    }
    notes = Notes(request.directory, asked_for)
    place = notes.folder / "store"
    if not place.exists():
        Store.create(place, _STORE_BYTES)
    with Store(place) as store:
        prompts = StoredPrompts(store, loaded.model)
        harness = Harness(loaded.model, prompts, workload, request.budget_part, notes)
        _store_all(request, harness, loaded, say)
        played = {}
        others = _Others(loaded, harness, ServedDocuments(loaded, store, harness, notes.folder))
        for rival in rivals(request.alphas):
            try:
                played[rival] = notes.part(
                    rival.name, partial(others.play, rival), packed_played, unpacked_played
                )
            except BudgetError as error:
                # Buffers of an engine alone may be more than the budget of a small study.
                say(f"{rival.name}: left out, because {error}")
                continue
            say(_line(rival.name, played[rival].figures()))
        fits = notes.part("all fits", harness.play_all_held, _packed_pair, _unpacked_pair)
        sized = None
        if request.sized_factor:
            sized = notes.part(
                "sized",
                partial(_sized, request, harness, played, notes.folder),
                _as_it_is,
                _as_it_is,
            )
    killed = notes.part(
        f"kills {request.kills}", partial(_killed, request.kills), _as_it_is, _as_it_is
    )
    record = _record(
        request, workload, harness, played, {**compared(played), **_fits(*fits), **killed}
    )
    record["sized"] = sized
    record["seconds"] = time.perf_counter() - began
    write_whole(request.out, json.dumps(record, default=str, indent=1).encode())
    notes.remove()
    lines = [_line(row["rival"], row) for row in record["rows"]]
    if sized is not None:
        lines += [_line(f"as {LLAMA_NAME}: {row['rival']}", row) for row in sized["rows"]]
    figures = record["figures"]
    lines += [f"{name}: {value}, goal {GOALS.get(name, '-')}" for name, value in figures.items()]
    return "\n".join(lines)


def _store_all(
    request: EvicPressRequest, harness: Harness, loaded: LoadedModel, say: Callable[[str], None]
) -> None:
    instruction = tuple(loaded.tokenizer.encode(_INSTRUCTION, add_special_tokens=False))
    for number in range(len(harness.workload.documents)):
        wishes = ProbeWishes(request.probes, request.questions, instruction, seed=number)
        stored = harness.store(wishes)
        say(
            f"{stored.document.name}: {len(stored.document.ids)} tokens read in "
            f"{stored.whole.resting.text:.1f} s; measured in {stored.whole.seconds:.1f} s, as is "
            f"usual in {stored.usual.seconds:.1f} s"
        )


@dataclass(frozen=True)
class _Others:
    """Plays rivals, each in its own way."""

    loaded: LoadedModel
    harness: Harness
    served: ServedDocuments

    def play(self, rival: Rival) -> Played:
        if rival.is_served:
            return self.served.play(rival.alpha)
        if rival.important:
            return play_important(self.loaded.model, self.harness, rival.important)
        return self.harness.play(rival)


def _sized(
    request: EvicPressRequest, harness: Harness, played: dict[Rival, Played], folder: Path
) -> dict[str, Any]:
    """Play the same to files of a larger model's size."""
    quality = shadowed_quality({rival.name: own for rival, own in played.items()})
    study = SizedStudy(harness, request.sized_factor, request.budget_part, quality, folder)
    try:
        found = {rival: study.play(rival) for rival in sized_rivals(list(played))}
        return sized_figures(study, found)
    finally:
        study.files.close()


def _as_it_is(found: dict[str, Any]) -> dict[str, Any]:
    return found


def _packed_pair(pair: tuple[Played, Played]) -> list[dict[str, Any]]:
    return [packed_played(one) for one in pair]


def _unpacked_pair(packed: list[dict[str, Any]]) -> tuple[Played, Played]:
    ours, nobody = (unpacked_played(one) for one in packed)
    return ours, nobody


def _fits(ours: Played, nobody: Played) -> dict[str, float]:
    """Return how much longer first tokens take with a manager than without, where all fits."""
    of_each = [
        own / other for own, other in zip(ours.first_tokens, nobody.first_tokens, strict=True)
    ]
    return {"ttft_vs_no_manager": median(of_each)}


def _record(
    request: EvicPressRequest,
    workload: Workload,
    harness: Harness,
    played: dict[Rival, Played],
    figures: dict[str, Any],
) -> dict[str, Any]:
    """Return the report, without how long the study took."""
    arrivals = [one.time for one in workload.requests]
    prefill = sum(one.whole.resting.text for one in harness.stored)
    whole = sum(one.whole.seconds for one in harness.stored)
    usual = [one.usual.seconds / one.usual.resting.text for one in harness.stored]
    figures = {
        **figures,
        "profile_vs_prefill": sum(one.usual.seconds for one in harness.stored) / prefill,
        "profile_vs_prefill_worst": max(usual),
        "whole_profile_vs_prefill": whole / prefill,
    }
    return {
        "figures": figures,
        "goals": {name: {"goal": GOALS[name], "reached": figures[name]} for name in GOALS},
        "rows": [
            {"rival": rival.name, **own.figures(), "rate_curve": own.rate_curve(arrivals)}
            for rival, own in played.items()
        ],
        "documents": [
            {
                "tokens": len(one.document.ids),
                "prefill_seconds": one.whole.resting.text,
                "whole_profile": asdict(one.whole),
                "usual_profile": asdict(one.usual),
            }
            for one in harness.stored
        ],
        "settings": asdict(request),
        "all_bytes": harness.all_bytes,
        "budget_bytes": harness.budget,
    }


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
