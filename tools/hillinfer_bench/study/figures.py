# SPDX-License-Identifier: Apache-2.0
"""Figures 12 to 16 of the paper as modelled rows, each beside what the paper's text claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hillinfer.rates.latency import ParallelScorers, SelectedShares, TwoLinkScorers
from hillinfer_bench.study.machines import (
    ALPHA,
    BATCH,
    CLAIMS,
    MODELS,
    PAPER_MACHINE,
    POSITIONS,
    SOURCES,
    EdgeMachine,
)
from hillinfer_bench.study.modelled import (
    BASELINES,
    OWN,
    SYSTEM_MODELS,
    HillInfer,
    Placed,
    PoolsOnly,
    Prefetching,
    Workload,
)

# Of figures 14 and 15 (section 5.3). Answers of figures 12 and 13 are not told: as long here.
PROMPT, OUTPUT = 1920, 128
PAPERS = HillInfer().name
LONG_PROMPTS = (1920, 8192, 16384, 36864)
# OPT has no more positions; the paper scales its batch to 12 instead.
CASES = (
    *(("opt-6.7b", PROMPT, batch) for batch in (BATCH, 12)),
    *((name, prompt, BATCH) for name in list(MODELS)[1:] for prompt in LONG_PROMPTS),
)
BATCHES, LARGE_BATCHES = (1, 2, 4, 6, 8, 10), tuple(range(20, 26))


@dataclass(frozen=True)
class ModelledRow:
    """One workload with every system.

    Parameters
    ----------
    figure, model, prompt, batch
        Which.
    kv_gb, drive_gb
        All KV, and what of it DRAM has no room for, in 10^9 bytes.
    run_seconds, step_seconds
        By system: the whole answer, and one step.
    beyond_positions
        Whether the model was trained for fewer tokens.
    """

    figure: str
    model: str
    prompt: int
    batch: int
    kv_gb: float
    drive_gb: float
    run_seconds: Mapping[str, float]
    step_seconds: Mapping[str, float]
    beyond_positions: bool

    def speedups(self, system: str) -> dict[str, float]:
        """Return how many times as fast a system is as each baseline, by whole runs."""
        own = self.run_seconds[system]
        return {name: self.run_seconds[name] / own for name in BASELINES}

    def as_record(self) -> dict[str, Any]:
        """Return what the report says."""
        return {
            **vars(self),
            "speedups": {name: self.speedups(name) for name in OWN},
        }


def modelled_row(
    figure: str, name: str, prompt: int, batch: int, machine: EdgeMachine
) -> ModelledRow:
    """Return one workload with every system.

    Parameters
    ----------
    figure
        Of the paper.
    name
        Of one of `MODELS`.
    prompt, batch
        Tokens of each sequence, and sequences.
    machine
        Where.
    """
    placed = Placed(machine, Workload(MODELS[name], prompt, OUTPUT, batch, ALPHA))
    load = placed.load
    cold = (load.tokens - placed.hosted_most()) * load.row_bytes * load.model.all_layers
    return ModelledRow(
        figure,
        name,
        prompt,
        batch,
        load.kv_bytes / 1e9,
        cold / 1e9,
        {one.name: one.run(placed) for one in SYSTEM_MODELS},
        {one.name: one.step(placed) for one in SYSTEM_MODELS},
        prompt + OUTPUT > POSITIONS[name],
    )


def modelled_rows(machine: EdgeMachine) -> list[ModelledRow]:
    """Return the rows of figures 12 and 13, 14, and 15."""
    rows = [modelled_row("12, 13", *case, machine) for case in CASES]
    for figure, batches in (("14", BATCHES), ("15", LARGE_BATCHES)):
        rows += [modelled_row(figure, "opt-6.7b", PROMPT, one, machine) for one in batches]
    return rows


# --- Figure 16 ---


def ablation(machine: EdgeMachine, prompt: int) -> dict[str, float]:
    """Return seconds of one step of Qwen-7B by parts of the paper's system (figure 16a)."""
    placed = Placed(machine, Workload(MODELS["qwen-7b"], prompt, OUTPUT, BATCH, ALPHA))
    parts = (Prefetching(), PoolsOnly("+HKM"), HillInfer("+HKM & APP"))
    return {one.name: one.step(placed) for one in parts}


@dataclass(frozen=True)
class BetaRow:
    """One split of the tokens (figure 16b).

    Parameters
    ----------
    beta
        Mc over Ms.
    step_seconds
        By model of latency, of all layers: scoring and rows.
    """

    beta: float
    step_seconds: Mapping[str, float]


def beta_sweep(machine: EdgeMachine, prompt: int) -> tuple[list[BetaRow], dict[str, float]]:
    """Return steps of Qwen-7B over β, and the β that each printed formula gives.

    Every row is as likely to be selected on either side, as both formulas have it, and M0 bounds
    nothing.
    """
    load = Workload(MODELS["qwen-7b"], prompt, OUTPUT, BATCH, ALPHA)
    placed = Placed(machine, load)
    rates = HillInfer().rates(placed)
    models = {"equation 4": ParallelScorers(rates), "section 5.4": TwoLinkScorers(rates)}
    shares = SelectedShares(ALPHA, ALPHA)
    rows = []
    for sixteenth in range(8 * 16 + 1):
        beta = 2 ** (sixteenth / 16 - 1)
        hosted = round(load.tokens * beta / (1 + beta))
        rows.append(
            BetaRow(
                beta,
                {
                    name: load.model.all_layers
                    * model.latency(hosted, load.tokens - hosted, shares)
                    for name, model in models.items()
                },
            )
        )
    return rows, {name: model.beta(shares) for name, model in models.items()}


# --- The report ---

SENSITIVE = ("host_scoring", "link", "drive", "card_stream")


def sensitivity(machine: EdgeMachine) -> dict[str, dict[str, float]]:
    """Return the paper's system over the prefetch-based one where a rate is half or twice.

    Of LongChat-7B at the paper's longest context.
    """
    found = {}
    for name in SENSITIVE:
        of_rate = {}
        for factor in (0.5, 1.0, 2.0):
            changed = replace(machine, **{name: factor * getattr(machine, name)})
            row = modelled_row("13", "longchat-7b", LONG_PROMPTS[-1], BATCH, changed)
            of_rate[f"{factor:g}"] = row.speedups(PAPERS)["prefetch-based"]
        found[name] = of_rate
    return found


def modelled_record(machine: EdgeMachine = PAPER_MACHINE) -> dict[str, Any]:
    """Return the part of the report about the paper's machine."""
    betas, optima = beta_sweep(machine, LONG_PROMPTS[-1])
    return {
        "label": "modelled",
        "rates": {
            name: {"value": value, "source": SOURCES[name]} for name, value in vars(machine).items()
        },
        "claims": dict(CLAIMS),
        "rows": [one.as_record() for one in modelled_rows(machine)],
        "ablation": {str(prompt): ablation(machine, prompt) for prompt in LONG_PROMPTS},
        "beta": [vars(one) for one in betas],
        "beta_optima": optima,
        "sensitivity": sensitivity(machine),
    }


def modelled_table(record: Mapping[str, Any]) -> str:
    """Return the tables of a record as Markdown, seconds of a whole answer."""
    names = [one.name for one in SYSTEM_MODELS]
    heads = ["figure", "model", "prompt", "batch", "KV, GB", "on a drive", *names]
    lines = [_line(heads), "|---|---|" + "---:|" * (len(heads) - 2)]
    for row in record["rows"]:
        mark = "*" if row["beyond_positions"] else ""
        lines.append(
            _line(
                [
                    *(row["figure"], f"{row['model']}{mark}", str(row["prompt"])),
                    *(str(row["batch"]), f"{row['kv_gb']:.1f}", f"{row['drive_gb']:.1f}"),
                    *(f"{row['run_seconds'][name]:.1f}" for name in names),
                ]
            )
        )
    over = [f"{one} over {name}" for one in OWN for name in BASELINES]
    heads = ["model", "prompt", "batch", *over]
    lines += ["", _line(heads), "|---|" + "---:|" * (len(heads) - 1)]
    for row in record["rows"]:
        told = [row["speedups"][one][name] for one in OWN for name in BASELINES]
        named = [row["model"], str(row["prompt"]), str(row["batch"])]
        lines.append(_line([*named, *(f"{one:.2f}" for one in told)]))
    lines += ["", *_small_tables(record)]
    return "\n".join(lines)


def _small_tables(record: Mapping[str, Any]) -> list[str]:
    parts: Sequence[str] = list(next(iter(record["ablation"].values())))
    lines = [_line(["prompt (figure 16a)", *parts]), "|---:|" + "---:|" * len(parts)]
    for prompt, steps in record["ablation"].items():
        lines.append(_line([prompt, *(f"{1e3 * steps[one]:.0f} ms" for one in parts)]))
    lines += ["", _line(["formula (figure 16b)", "β", "least step of the sweep at β"])]
    lines.append("|---|---:|---:|")
    for name, beta in record["beta_optima"].items():
        _, least = min((one["step_seconds"][name], one["beta"]) for one in record["beta"])
        lines.append(_line([name, f"{beta:.2f}", f"{least:.2f}"]))
    lines += ["", _line(["rate", "half", "as stated", "twice"]), "|---|---:|---:|---:|"]
    for name, told in record["sensitivity"].items():
        lines.append(_line([name, *(f"{told[one]:.2f}" for one in ("0.5", "1", "2"))]))
    return lines


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
