# SPDX-License-Identifier: Apache-2.0
"""`make beta`: measures decode latency over β, models it, and compares `auto` with the best β.

A cache per β, and one per model of latency with the β it chooses, hold the same random rows; all of
them decode the same queries in turns, another one first each time, because neighbours change a
machine's pace. Time is that of storing and attending: no model computes.
By default the device is `core`, a second core of this processor that stands for one near a drive,
there is room for every row in DRAM, and few rows are selected, so that scoring is what is left to
share.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.directories import prepared_cold_dir
from hillinfer.drive.engine_table import open_engine
from hillinfer.engine.budget_plan import BudgetPlan, kernel_spec
from hillinfer.engine.runtime import Runtime
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.rates.kept_rates import KeptRates, Rates, RatesKey, seconds_of
from hillinfer.rates.latency import LATENCY_MODELS, ScoresThenRows, SelectedShares
from hillinfer.settings import ModelName, Settings
from hillinfer_bench.report.kinds import MachineKind
from hillinfer_bench.report.rows import LARGEST_SPREAD, Timing

GOAL = 0.05
# KV heads, query heads, head_dim.
SHAPES = {"llama-3.2-1b": (8, 32, 64), "smollm2-135m": (3, 9, 64), "llama-3.1-8b": (8, 32, 128)}
AUTO = "auto"
DEFAULT_MODEL = Settings().beta_model
# Nearer to infinity than segments can tell.
_ALL_ON_HOST = 1e9
FLAG = f", spread above {LARGEST_SPREAD:.0%}"


@dataclass(frozen=True)
class Sweep:
    """What is decoded.

    Parameters
    ----------
    shape
        The model's, with as many layers as are stored.
    settings
        Without β.
    segments
        Full segments of context.
    budget_bytes
        M0.
    cold_dir
        Directory on the drive.
    """

    shape: ModelShape
    settings: Settings
    segments: int
    budget_bytes: int
    cold_dir: Path

    @property
    def segment_tokens(self) -> int:
        """Tokens of a segment."""
        return kernel_spec(self.shape, self.settings).segment_tokens

    def fixed(self, beta: float) -> Decoder:
        """Return a filled cache for a β."""
        return Decoder(self, self.settings.changed(beta=beta))

    def chosen(self, model: ModelName) -> Decoder:
        """Return a filled cache for what a model of latency takes."""
        return Decoder(self, self.settings.changed(beta=None, beta_model=model))


@dataclass(frozen=True)
class Turns:
    """What a cache did.

    Parameters
    ----------
    host_segments
        Full segments of each layer that the host scored.
    seconds
        Of each step.
    selected_share, hot_share
        Selected over scored tokens; how many of the selected rows the hot pool had.
    """

    host_segments: int
    seconds: list[float]
    selected_share: float
    hot_share: float

    @property
    def timing(self) -> Timing:
        """Of the steps."""
        return Timing.of(self.seconds)


class Decoder:
    """A cache that the same rows were stored in as in every other.

    Parameters
    ----------
    sweep
        What is stored.
    settings
        With β or the model that it follows from.
    """

    def __init__(self, sweep: Sweep, settings: Settings) -> None:
        self._shape = sweep.shape
        self._runtime = Runtime(sweep.shape, settings, sweep.budget_bytes, sweep.cold_dir)
        self._sequence = self._runtime.open_sequence()
        self._generator = torch.Generator().manual_seed(0)
        self.steps = 0
        self._runtime.expect(sweep.segments * sweep.segment_tokens)
        for _ in range(sweep.segments):
            self._runtime.begin_step()
            for layer in range(self._shape.layers):
                keys = self._rows(sweep.segment_tokens)
                self._runtime.append(layer, self._sequence, keys, self._rows(keys.shape[1]))
                self._runtime.code_full_segments(layer, self._sequence, keys)
            self._sequence.token_ids.extend([0] * sweep.segment_tokens)

    def step(self) -> float:
        """Decode one token in all layers; return the seconds of storing and attending."""
        shape = self._shape
        given = [
            (self._rows(1), self._rows(1), self._random(shape.query_heads).float())
            for _ in range(shape.layers)
        ]
        started = time.perf_counter()
        self._runtime.begin_step()
        for layer, (keys, values, query) in enumerate(given):
            self._runtime.append(layer, self._sequence, keys, values)
            self._runtime.attend_selected(layer, self._sequence, query, keys, shape.head_dim**-0.5)
        self._sequence.token_ids.append(0)
        self.steps += 1
        return time.perf_counter() - started

    def turns(self, seconds: list[float]) -> Turns:
        """Return what was done in so many seconds per step."""
        found = self._runtime.statistics()
        if found.device_lost:
            sys.exit("the device was lost: there is nothing to compare")
        tokens = found.device_scored_tokens / (self._shape.layers * self.steps)
        spec = kernel_spec(self._shape, self._runtime.settings)
        on_device = int(tokens // spec.segment_tokens)
        return Turns(
            len(self._sequence.segments) - 1 - on_device,
            seconds,
            found.selected_share,
            found.hot_hit_rate,
        )

    def close(self) -> None:
        """Give everything back."""
        self._runtime.close()

    def _rows(self, tokens: int) -> torch.Tensor:
        return self._random(self._shape.kv_heads, tokens)

    def _random(self, heads: int, tokens: int = 1) -> torch.Tensor:
        size = (heads, tokens, self._shape.head_dim)
        return torch.randn(size, generator=self._generator).half()


def grid(segments: int, points: int) -> list[int]:
    """Return host segments from none to all, at most so many of them."""
    count = min(points, segments + 1)
    return sorted({round(i * segments / (count - 1)) for i in range(count)})


def beta_of(host: int, segments: int) -> float:
    """Return the β that leaves so many segments to the host."""
    return _ALL_ON_HOST if host == segments else host / (segments - host)


def auto_name(model: ModelName) -> str:
    """Return the name of the contender that a model chose for."""
    return AUTO if model is DEFAULT_MODEL else f"{AUTO} {model.value}"


def measure(sweep: Sweep, hosts: list[int], rounds: int) -> dict[str, Turns]:
    """Return the turns of every contender: the grid, then what each model chose."""
    contenders: dict[str, Callable[[], Decoder]] = {
        str(host): partial(sweep.fixed, beta_of(host, sweep.segments)) for host in hosts
    }
    contenders |= {auto_name(model): partial(sweep.chosen, model) for model in LATENCY_MODELS}
    with ExitStack() as opened:
        decoders = {}
        for name, make in contenders.items():
            decoders[name] = make()
            opened.callback(decoders[name].close)
            decoders[name].step()
        seconds: dict[str, list[float]] = {name: [] for name in decoders}
        for turn in range(rounds):
            for name in in_turn(list(decoders), turn):
                seconds[name].append(decoders[name].step())
        return {name: decoder.turns(seconds[name]) for name, decoder in decoders.items()}


def in_turn(names: list[str], turn: int) -> list[str]:
    """Return the order of a turn: another one begins each time, so that neighbours change."""
    first = turn % len(names)
    return names[first:] + names[:first]


def rates_of(sweep: Sweep) -> Rates:
    """Return the rates that the sweep's caches went by."""
    settings = sweep.settings
    engine = open_engine(settings.io, settings.io_threads, DriveCalls())
    key = RatesKey.of(
        kernel_spec(sweep.shape, settings), settings.scope, sweep.shape.row_bytes,
        sweep.cold_dir, engine.name, torch.get_num_threads(), settings.device, settings.xclbin,
    )  # fmt: skip
    engine.close()
    return dict(KeptRates.of_user().all())[key]


def report(sweep: Sweep, found: dict[str, Turns], rates: Rates) -> dict[str, Any]:
    """Return the measured and modelled latencies, and the regret of what each model chose."""
    tokens, own = sweep.segment_tokens, found[AUTO]
    shares = SelectedShares(own.selected_share, own.selected_share)
    models = {name.value: make(rates) for name, make in LATENCY_MODELS.items()}
    selected = own.selected_share * sweep.segments * tokens
    models[ModelName.SCORES_THEN_ROWS.value] = ScoresThenRows(
        rates,
        seconds_of(selected * own.hot_share, rates.b_c)
        + seconds_of(selected * (1 - own.hot_share), rates.b_s),
    )
    rows = {
        name: {
            "name": name,
            "host_segments": (host := turns.host_segments),
            "beta": None if host == sweep.segments else host / (sweep.segments - host),
            "seconds": min(turns.seconds),
            "median_seconds": turns.timing.median / 1e3,
            "spread": turns.timing.spread,
            "flagged": turns.timing.flagged,
            "modelled_seconds": {
                kind: sweep.shape.layers
                * model.latency(host * tokens, (sweep.segments - host) * tokens, shares)
                for kind, model in models.items()
            },
        }
        for name, turns in found.items()
    }
    best = min(rows.values(), key=lambda row: row["seconds"])
    by_model = [
        {
            "model": model.value,
            "row": auto_name(model),
            "chosen_host_segments": (row := rows[auto_name(model)])["host_segments"],
            "seconds": row["seconds"],
            "beta_regret": row["seconds"] / best["seconds"] - 1,
            "flagged": row["flagged"] or best["flagged"],
        }
        for model in LATENCY_MODELS
    ]
    default = next(one for one in by_model if one["row"] == AUTO)
    others = {one["row"] for one in by_model} - {AUTO}
    return {
        "rates": asdict(rates),
        "selected_share": own.selected_share,
        "hot_share": own.hot_share,
        # What the default chose comes last, and what the others chose is in a table of its own.
        "rows": [
            *(row for name, row in rows.items() if name not in others | {AUTO}),
            rows[AUTO],
        ],
        "rows_of_models": [rows[name] for name in rows if name in others],
        "models": by_model,
        "chosen_host_segments": default["chosen_host_segments"],
        "best_host_segments": best["host_segments"],
        "best_row": best["name"],
        "beta_regret": default["beta_regret"],
        "goal": GOAL,
        "goals": [goal_record(default)],
        "host_segments_by_model": {
            kind: model.host_segments(sweep.segments, tokens, shares, sweep.segments)
            for kind, model in models.items()
        },
    }


def goal_record(one: dict[str, Any]) -> dict[str, Any]:
    """Return the goal beside what the default model reached; what is flagged has not met it."""
    reached = one["beta_regret"]
    return {
        "goal": f"beta_regret of {GOAL:g} or less, --beta-model {one['model']}",
        "reached": reached,
        "row": one["row"],
        "met": reached <= GOAL and not one["flagged"],
        "flagged": one["flagged"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the report, and say what was chosen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/reports/beta.json"))
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--layers", type=int, default=4, help="as many as fit; each costs the same")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument(
        "--max-selected", type=int, default=512, help="few rows leave scoring to be seen; 0: all"
    )
    parser.add_argument("--budget", default="100%", help="100%% keeps every row in DRAM")
    parser.add_argument("--device", default="core", help="one with a scorer of its own")
    parser.add_argument("--xclbin", type=Path, help="image of a card's kernels")
    parser.add_argument("--cold-dir", type=Path)
    parser.add_argument("--points", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=20)
    chosen = parser.parse_args(arguments)
    kv_heads, query_heads, head_dim = SHAPES[chosen.shape]
    segments = chosen.tokens // 1024
    if segments < 1 or chosen.points < 2 or chosen.rounds < 1:
        sys.exit("--tokens must be at least 1024, --points 2 and --rounds 1")
    shape = ModelShape(
        chosen.layers, kv_heads, query_heads, head_dim, StoredType.FLOAT16, 2 * chosen.tokens
    )
    settings = Settings().changed(
        alpha=chosen.alpha,
        device=chosen.device,
        xclbin=chosen.xclbin,
        dram_budget=chosen.budget,
        max_selected=chosen.max_selected or None,
    )
    tokens = (segments + 1) * 1024
    plan = BudgetPlan.with_whole_shadow(shape, settings, tokens)
    # The rest of M0 comes on top: this is about sharing, not about what fits.
    budget = plan.required_bytes + plan.budget_bytes
    sweep = Sweep(shape, settings, segments, budget, prepared_cold_dir(chosen.cold_dir))
    found = measure(sweep, grid(segments, chosen.points), chosen.rounds)
    made = {
        "label": f"measured: device {chosen.device}"
        + (", a core of this processor that stands for a card" if chosen.device == "core" else ""),
        **MachineKind.here(shape.stored_type.value).as_record(),
        "threads": torch.get_num_threads(),
        "shape": chosen.shape,
        "layers": chosen.layers,
        "tokens": segments * 1024,
        "alpha": chosen.alpha,
        "max_selected": settings.max_selected,
        "dram_budget": chosen.budget,
        "shadow": settings.key_mode.value,
        **report(sweep, found, rates_of(sweep)),
    }
    for row in made["rows"] + made["rows_of_models"]:
        modelled = "  ".join(
            f"{kind} {1e3 * value:.2f}" for kind, value in row["modelled_seconds"].items()
        )
        print(
            f"{row['name']:>14}  host {row['host_segments']:3d} of {segments}  "
            f"{1e3 * row['seconds']:8.2f} ms ({1e3 * row['median_seconds']:.2f}"
            f"{FLAG if row['flagged'] else ''})  modelled: {modelled}"
        )
    for one in made["models"]:
        print(
            f"--beta-model {one['model']}: {one['chosen_host_segments']} of {segments}, "
            f"regret {one['beta_regret']:.3f}{FLAG if one['flagged'] else ''}"
        )
    print(
        f"auto takes {made['chosen_host_segments']}, the best is {made['best_host_segments']}: "
        f"beta_regret {made['beta_regret']:.3f} (goal {GOAL})"
    )
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    main()
