# SPDX-License-Identifier: Apache-2.0
"""What `hillinfer doctor --profile` measures, models and says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from hillinfer.devices.opening import make_scorer
from hillinfer.doctor.coded_need import CodedNeed
from hillinfer.doctor.finding import Finding, Verdict
from hillinfer.doctor.timetables import stored_prefix_finding
from hillinfer.doctor.windows import WindowProfile
from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.directories import prepared_cold_dir
from hillinfer.drive.engine_table import open_engine
from hillinfer.drive.read_engines import ReadEngine
from hillinfer.drive.read_turns import QUANTUM_BYTES, Apart
from hillinfer.engine.budget_growth import ShadowChoice
from hillinfer.engine.budget_plan import BudgetPlan, kernel_spec
from hillinfer.errors import SettingsError
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.rates.kept_rates import KeptRates, Rates, RatesKey, seconds_of
from hillinfer.rates.latency import SelectedShares, SharedScorer
from hillinfer.rates.profiling import PlainProfiling
from hillinfer.schedule.drive_rates import DriveRates
from hillinfer.schedule.kept_windows import KeptWindows
from hillinfer.scoring.scorer import Scorer
from hillinfer.settings import AUTO, Settings
from hillinfer.values import format_bytes

# --- Model shapes ---


@dataclass(frozen=True)
class ModelFigures:
    """What of a model's shape a decode step depends on.

    Parameters
    ----------
    family
        `llama` or `opt`, as transformers calls it.
    all_layers
        Layers of the whole model.
    hidden, inner
        Channels between layers and inside the feed-forward part.
    query_heads, kv_heads
        Heads.
    head_dim
        Channels of a head.
    """

    family: str
    all_layers: int
    hidden: int
    inner: int
    query_heads: int
    kv_heads: int
    head_dim: int

    @property
    def layer_weights(self) -> int:
        """Weights of one layer that each decode step reads."""
        attention = self.hidden * self.head_dim * 2 * (self.query_heads + self.kv_heads)
        feed_forward = self.hidden * self.inner * (3 if self.family == "llama" else 2)
        return attention + feed_forward

    def whole_kv_shape(self, positions: int) -> ModelShape:
        """Return the shape of the KV cache of all layers, with rows of float16."""
        heads = (self.kv_heads, self.query_heads, self.head_dim)
        return ModelShape(self.all_layers, *heads, StoredType.FLOAT16, positions)


SHAPES: Mapping[str, ModelFigures] = MappingProxyType(
    {
        "tiny": ModelFigures("llama", 2, 64, 128, 4, 2, 16),
        "tiny-opt": ModelFigures("opt", 24, 64, 128, 4, 4, 16),
        "smollm2-135m": ModelFigures("llama", 30, 576, 1536, 9, 3, 64),
        "llama-3.2-1b": ModelFigures("llama", 16, 2048, 8192, 32, 8, 64),
        "llama-3.2-3b": ModelFigures("llama", 28, 3072, 8192, 24, 8, 128),
        "opt-6.7b": ModelFigures("opt", 32, 4096, 16384, 32, 32, 128),
        "llama-13b": ModelFigures("llama", 40, 5120, 13824, 40, 40, 128),
    }
)

# --- Rates of a plain drive ---

DEVICE = "nvme"
# Tokens behind a stored prefix, a point of the grid of windows.
_QUESTION_TOKENS = 64


def plain_rates(
    scorer: Scorer, row_bytes: int, cold_dir: Path, engine: ReadEngine, kept: KeptRates
) -> tuple[Rates, float]:
    """Return kept rates, or measure and keep them, and weights per second of a matrix product.

    `scorer` is that of device `nvme`; the product is not kept, but measured each time.
    """
    key = RatesKey.of(
        scorer.spec,
        scorer.scope,
        row_bytes,
        cold_dir,
        engine.name,
        torch.get_num_threads(),
        DEVICE,
        None,
    )
    profiling = PlainProfiling(scorer, row_bytes, cold_dir, engine)
    return kept.get(key, profiling.rates), profiling.multiplying()


# --- Modelled decode steps ---


@dataclass(frozen=True)
class PlainStep:
    """One decode step of all layers, modelled.

    As if hot tokens were selected no more often than cold ones: that is the most a step reads. The
    settings name the shadow; `rates` and `layer_weights` are of one layer, `weights_per_second` of
    a matrix product on this machine.
    """

    shape: ModelShape
    settings: Settings
    tokens: int
    rates: Rates
    layer_weights: int
    weights_per_second: float

    @property
    def plan(self) -> BudgetPlan:
        """What M0 holds."""
        return BudgetPlan.for_context(self.shape, self.settings, self.tokens)

    @property
    def codes(self) -> CodedNeed:
        """What exact and coded tokens need; all are exact where nothing is coded."""
        return CodedNeed(self.shape, self.settings, self.tokens)

    @property
    def hosted(self) -> int:
        """Tokens of each layer whose rows have room in DRAM."""
        plan = self.plan
        hot_bytes = plan.hot_bytes - self.codes.kept_code_bytes
        share = hot_bytes / plan.all_rows_bytes if plan.all_rows_bytes else 1.0
        return int(self.tokens * min(max(share, 0.0), 1.0))

    @property
    def selected_share(self) -> float:
        """Selected over all tokens."""
        most = self.settings.max_selected
        return min(self.settings.importance_rate, most / self.tokens if most else 1.0)

    @property
    def row_share(self) -> float:
        """Tokens that attention reads as rows, over all tokens."""
        return min(self.selected_share, self.codes.exact_share)

    @property
    def cold_rows(self) -> float:
        """Rows of one layer that come from the drive: of exact tokens, and of those to be coded."""
        coded = (self.selected_share - self.row_share) * (1 - self.codes.kept_share)
        return (self.row_share + coded) * (self.tokens - self.hosted)

    @property
    def layer_seconds(self) -> float:
        """Seconds of one layer's scoring and rows, by the shared scorer's model."""
        model = SharedScorer(self.rates)
        cold = self.tokens - self.hosted
        shares = SelectedShares(self.row_share, self.cold_rows / cold if cold else self.row_share)
        return model.latency(self.hosted, cold, shares)

    @property
    def streaming_seconds(self) -> float:
        """Seconds of one layer's streamed shadows at most: at the pace of scattered rows."""
        bytes_of_layer = self.plan.streamed_shadow_bytes / self.shape.layers
        return seconds_of(bytes_of_layer / self.shape.row_bytes, self.rates.b_s)

    @property
    def reading_seconds(self) -> float:
        """Seconds of one layer's cold rows."""
        return seconds_of(self.cold_rows, self.rates.b_s)

    @property
    def computing_seconds(self) -> float:
        """Seconds of one layer's projections in float32."""
        return seconds_of(self.layer_weights, self.weights_per_second)

    def findings(self, name: str) -> Iterator[Finding]:
        """Yield what a step takes, and advice on `--query`, which changes nothing by itself.

        `name` is that of the model's shape. Raises BudgetError where the budget does not hold the
        least there must be.
        """
        plan = self.plan
        plan.check()
        layers = self.shape.layers
        total = layers * (self.layer_seconds + self.streaming_seconds)
        yield Finding(
            f"decode step of {name}",
            Verdict.OK,
            f"at most {_ms(total)} of scoring and rows at {self.tokens} tokens and "
            f"{format_bytes(plan.budget_bytes)} of DRAM (modelled: costs add, the budget decides): "
            f"shadow {format_bytes(plan.shadow_bytes)} in DRAM and "
            f"{format_bytes(plan.streamed_shadow_bytes)} streamed "
            f"(at most {_ms(layers * self.streaming_seconds)}), "
            f"rows of {self.tokens - self.hosted} tokens cold "
            f"({_ms(layers * self.reading_seconds)} at alpha {self.settings.importance_rate:g}"
            f"{self.codes.settings_text})",
        )
        yield from self.codes.findings()
        yield Finding(
            "query",
            Verdict.OK,
            f"predicted hides up to {_ms(min(self.reading_seconds, self.computing_seconds))} of "
            f"{_ms(self.reading_seconds)} of reads per layer behind "
            f"{_ms(self.computing_seconds)} of compute (modelled, projections in float32); it "
            "changes which tokens are selected, so --query predicted or true is yours to choose",
        )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


# --- Findings ---


def profile_findings(
    name: str,
    tokens: int,
    dram_budget: str,
    cold_dir: Path | None,
    alpha: str = AUTO,
    exact: str = AUTO,
) -> tuple[Finding, ...]:
    """Measure and keep rates of a plain drive and compute windows; say what a decode step takes.

    `name` is that of a model's shape, `tokens` the context's; the others are as in the settings.

    Raises
    ------
    SettingsError
        Where a value is none.
    BudgetError
        Where the budget is too small for the context.
    """
    if name not in SHAPES:
        raise SettingsError(f"no shape is named '{name}'; there are {', '.join(SHAPES)}")
    if tokens < 1:
        raise SettingsError(f"--context {tokens} is no number of tokens: it must be 1 or more")
    model = SHAPES[name]
    settings = Settings().changed(
        dram_budget=dram_budget, cold_dir=cold_dir, alpha=alpha, exact=exact
    )
    shape = model.whole_kv_shape(2 * tokens)
    settings = ShadowChoice.of(shape, settings, tokens).settings
    scorer = make_scorer(DEVICE, kernel_spec(shape, settings), settings.scope)
    engine = open_engine(settings.io, settings.io_threads, DriveCalls())
    try:
        place = prepared_cold_dir(cold_dir)
        rates, weights = plain_rates(scorer, shape.row_bytes, place, engine, KeptRates.of_user())
        kept = KeptWindows.of_user()
        drive = kept.measure_drive(place)
    finally:
        engine.close()
    step = PlainStep(shape, settings, tokens, rates, model.layer_weights, weights)
    findings = tuple(step.findings(name))
    windows = WindowProfile(kept, model, place, tokens)
    findings = *findings, drive_finding(drive), windows.finding(name)
    longest = windows.longest_in_memory(_QUESTION_TOKENS)
    if longest is None:
        return findings
    parts = shape.layers, shape.row_bytes, longest[1], drive
    return *findings, stored_prefix_finding(_QUESTION_TOKENS, longest[0], *parts)


def drive_finding(rates: DriveRates) -> Finding:
    """Return what a drive gives, and what follows for writes."""
    apart = isinstance(rates.mixing(), Apart)
    return Finding(
        "drive rates",
        Verdict.OK,
        f"reads of 1 MiB {format_bytes(round(rates.read(QUANTUM_BYTES)))}/s, writes "
        f"{format_bytes(round(rates.write))}/s, {rates.mixing_loss:.0%} lost where both come at "
        f"once (measured): from now on writes go {'between' if apart else 'beside'} reads",
    )
