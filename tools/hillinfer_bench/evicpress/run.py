# SPDX-License-Identifier: Apache-2.0
"""Runs the study: stores and measures documents, plays rivals, and computes figures."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hillinfer.catalogue.measuring import ProbeWishes
from hillinfer.errors import BrokenRunError, BudgetError, SettingsError
from hillinfer.models.loader import LoadedModel, ModelOutline
from hillinfer.models.sources import ModelSource
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.store.store import Store
from hillinfer.system.files import prepare_report, write_whole
from hillinfer.system.machine import NumberType
from hillinfer_bench.evicpress.comparing import (
    GOALS,
    best,
    compared,
    first_tokens,
    limits,
    paired,
    random_shares,
)
from hillinfer_bench.evicpress.harness import Harness
from hillinfer_bench.evicpress.impress import ImportantPlay
from hillinfer_bench.evicpress.notes import Notes, packed_played, unpacked_played
from hillinfer_bench.evicpress.played import Played
from hillinfer_bench.evicpress.plays import AllFitsPlay, PlacedPlay, Play, play_together
from hillinfer_bench.evicpress.rivals import SERVED, lru, rivals
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
LLAMA_NAME = "Llama 8B"
ALPHAS = (0.3, 1.0)
SIZED_ALPHAS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
# What changes nothing of what was found before.
_APART = ("out", "kills", "topic_questions", "instances")
_NOBODY, _MANAGED, _BESIDE = "nobody", "managed", "beside"


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
    alphas, sized_alphas
        Of the policies that have one, each played: to the model, and to files of a larger one.
    probes, questions
        Of each document: those that forms are chosen by, and those that are asked.
    kills
        Processes that are killed while forms move; 0 for none.
    sized_factor
        Tokens of a document in files of a larger model's size, for each here; 0 for no such files.
    topic_questions
        That users ask about another topic of one document; 0 for none.
    instances
        Random ones, placed by our policy and exactly; 0 for none.
    """

    model: str
    directory: Path
    out: Path
    size: WorkloadSize
    budget_part: float = 0.125
    alphas: tuple[float, ...] = ALPHAS
    probes: int = 4
    questions: int = 3
    kills: int = 200
    sized_factor: int = 2
    sized_alphas: tuple[float, ...] = SIZED_ALPHAS
    topic_questions: int = 20
    instances: int = 1000

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        if not 0 < self.budget_part <= 1:
            raise SettingsError(f"budget={self.budget_part} is no share above 0 and up to 1")
        for alphas in (self.alphas, self.sized_alphas):
            if not alphas or min(alphas) < 0:
                raise SettingsError(f"alpha={alphas} must be one number of seconds or more")
        others = (self.kills, self.sized_factor, self.topic_questions, self.instances)
        if self.probes < 1 or self.questions < 1 or min(others) < 0:
            raise SettingsError(
                f"probes={self.probes}, questions={self.questions}, kills={self.kills}, "
                f"sized={self.sized_factor}, topic-questions={self.topic_questions}, "
                f"instances={self.instances}: give 1 or more of the first two, and 0 or more of "
                "the others"
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
    asked_for = {name: value for name, value in asdict(request).items() if name not in _APART}
    notes = Notes(request.directory, asked_for)
    place = notes.folder / "store"
    if not place.exists():
        Store.create(place, _STORE_BYTES)
    with Store(place) as store:
        prompts = StoredPrompts(store, loaded.model)
        harness = Harness(loaded.model, prompts, workload, request.budget_part, notes)
        _store_all(request, harness, loaded, say)
        found = notes.part(
            "rivals", partial(_played, request, harness), _packed_plays, _unpacked_plays
        )
        left_out: dict[str, str] = {}
        served: dict[str, Played] = {}
        server = ServedDocuments(loaded, store, harness, notes.folder)
        try:
            served = notes.part(
                SERVED.name, partial(_served, server), _packed_plays, _unpacked_plays
            )
        except BudgetError as error:
            # Buffers of an engine alone may be more than the budget of a small study.
            left_out[SERVED.name] = str(error)
        sized = None
        if request.sized_factor:
            sized = notes.part(
                "sized",
                partial(_sized, request, harness, served, notes.folder),
                _as_it_is,
                _as_it_is,
            )
    killed = notes.part(
        f"kills {request.kills}", partial(_killed, request.kills), _as_it_is, _as_it_is
    )
    turned = notes.part(
        f"topics {request.topic_questions}", partial(_turned, request), _as_it_is, _as_it_is
    )
    placed = notes.part(
        f"instances {request.instances}",
        partial(random_shares, request.instances),
        _as_it_is,
        _as_it_is,
    )
    nobody, managed = found.pop(_NOBODY), found.pop(_MANAGED)
    played = {rival: found[rival.name] for rival in rivals(request.alphas)}
    figures = {
        **compared(played, nobody),
        "ttft_vs_no_manager": paired(managed.first_tokens, nobody.first_tokens),
        **_served_figures(served),
        **killed,
        **turned,
        **placed,
    }
    rows = {**found, "all held, nobody": nobody, **served}
    record = _record(request, workload, harness, rows, figures)
    record["sized"] = sized
    record["left_out"] = left_out
    # Rivals of several sittings were timed beside different other work.
    record["sittings"] = notes.sittings
    record["seconds_of_last_sitting"] = time.perf_counter() - began
    write_whole(request.out, json.dumps(record, default=str, indent=1).encode())
    notes.remove()
    lines = [_line(row["rival"], row) for row in record["rows"]]
    if sized is not None:
        lines += [_line(f"as {LLAMA_NAME}: {row['rival']}", row) for row in sized["rows"]]
        lines += [f"as {LLAMA_NAME}: {name}: {value}" for name, value in sized["figures"].items()]
    lines += [f"{name}: left out, because {why}" for name, why in left_out.items()]
    if notes.sittings > 1:
        lines.append(f"timed in {notes.sittings} sittings")
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


def _played(request: EvicPressRequest, harness: Harness) -> dict[str, Played]:
    """Play rivals in turn, and beside them who has room for all."""
    plays: dict[str, Play] = {
        rival.name: (
            ImportantPlay(harness, rival.important)
            if rival.important
            else PlacedPlay(harness, rival)
        )
        for rival in rivals(request.alphas)
    }
    fits = AllFitsPlay(harness)
    play_together([*plays.values(), fits], harness.workload.requests)
    found = {name: play.played for name, play in plays.items()}
    return {**found, _NOBODY: fits.played, _MANAGED: fits.managed}


def _served(server: ServedDocuments) -> dict[str, Played]:
    """Play a server's documents, and LRU beside them."""
    own, beside = server.play(SERVED, lru("held"))
    return {SERVED.name: own, f"held + LRU, {_BESIDE} {SERVED.name}": beside}


def _served_figures(served: Mapping[str, Played]) -> dict[str, float]:
    """Return how much sooner first tokens of a server come than LRU's beside it."""
    if not served:
        return {}
    own, beside = (one.figures() for one in served.values())
    return {
        "served_agreement": own["agreement"],
        "served_ttft_vs_lru_p50": beside["first_token_p50"] / own["first_token_p50"],
        "served_token_vs_lru": own["token_p50"] / beside["token_p50"],
    }


def _sized(
    request: EvicPressRequest, harness: Harness, served: Mapping[str, Played], folder: Path
) -> dict[str, Any]:
    """Play the same to files of a larger model's size."""
    quality = shadowed_quality(served)
    study = SizedStudy(harness, request.sized_factor, request.budget_part, quality, folder)
    try:
        record = sized_figures(study, study.play(sized_rivals(request.sized_alphas)))
    finally:
        study.files.close()
    by_name = {row["rival"]: row for row in record["rows"]}
    found = first_tokens(by_name)
    # Nothing is computed there: the limit is what knows all uses, and agrees enough.
    placed = best(by_name, "optimum, α")
    figures = {**found, **limits(found, by_name, by_name[placed]), "placed_by": placed}
    return {**record, "figures": figures}


def _as_it_is(found: dict[str, Any]) -> dict[str, Any]:
    return found


def _packed_plays(found: Mapping[str, Played]) -> dict[str, Any]:
    return {name: packed_played(one) for name, one in found.items()}


def _unpacked_plays(packed: Mapping[str, Any]) -> dict[str, Played]:
    return {name: unpacked_played(one) for name, one in packed.items()}


def _record(
    request: EvicPressRequest,
    workload: Workload,
    harness: Harness,
    played: Mapping[str, Played],
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
        "goals": {
            name: {
                "goal": GOALS[name],
                "reached": figures[name],
                "possible": figures.get(f"{name}_possible"),
            }
            for name in GOALS
        },
        "rows": [
            {"rival": name, **own.figures(), "rate_curve": own.rate_curve(arrivals)}
            for name, own in played.items()
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


def _killed(kills: int) -> dict[str, Any]:
    """Return the figures of kills, in a process of its own; None where none are wanted."""
    if not kills:
        return {"kills": None, "wrong_tokens": None}
    return _apart("kills", "--kills", str(kills))


def _turned(request: EvicPressRequest) -> dict[str, Any]:
    """Return what a switch of topic costs, from a process of its own; None where none is wanted."""
    questions = request.topic_questions
    if not questions:
        return {"topic_switch_points": None}
    return _apart("topics", "--model", request.model, "--questions", str(questions))


def _apart(module: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", f"hillinfer_bench.evicpress.{module}", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        raise BrokenRunError(f"the part of {module} broke off: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _line(name: str, figures: dict[str, Any]) -> str:
    token = figures["token_p50"]
    decoded = "" if token is None else f"token {token:.3f} s, "
    return (
        f"{name:26} first token p50 {figures['first_token_p50']:.3f} s, p95 "
        f"{figures['first_token_p95']:.3f} s, {decoded}agreement {figures['agreement']:.3f}, "
        f"worst tenth {figures['worst_tenth_agreement']:.3f}, "
        f"{figures['dram_peak_bytes'] / 1e6:.1f} MB, {figures['moves']} moves"
    )
