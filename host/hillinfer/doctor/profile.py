# SPDX-License-Identifier: Apache-2.0
"""What `hillinfer doctor --profile` measures, models and says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from hillinfer.devices.opening import make_scorer
from hillinfer.doctor.finding import Finding, Verdict
from hillinfer.doctor.windows import WindowProfile
from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.directories import prepared_cold_dir
from hillinfer.drive.engine_table import open_engine
from hillinfer.drive.files import round_up
from hillinfer.drive.read_engines import ReadEngine
from hillinfer.drive.read_turns import QUANTUM_BYTES, Apart
from hillinfer.engine.budget_growth import ShadowChoice
from hillinfer.engine.budget_plan import BudgetPlan, kernel_spec
from hillinfer.errors import SettingsError
from hillinfer.memory_budget import TABLE_GROWTH_ROWS
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.rates.kept_rates import KeptRates, Rates, RatesKey, seconds_of
from hillinfer.rates.latency import SelectedShares, SharedScorer
from hillinfer.rates.profiling import PlainProfiling
from hillinfer.schedule.drive_rates import DriveRates
from hillinfer.schedule.kept_windows import KeptWindows
from hillinfer.scoring.scorer import Scorer
from hillinfer.settings import AUTO, Settings
from hillinfer.shadow.values import CODE_SHARE, slot_bytes
from hillinfer.values import format_bytes
from hillinfer_model.step_need import StepNeed, step_need

# --- Exact and coded tokens ---


@dataclass(frozen=True)
class CodedNeed:
    """What a step with coded tokens needs, and how much of all codes a budget keeps; computed.

    The settings name the shadow; `tokens` is N, of one sequence.
    """

    shape: ModelShape
    settings: Settings
    tokens: int

    @property
    def need(self) -> StepNeed:
        """Bytes of one step of all layers."""
        settings = self.settings
        spec = kernel_spec(self.shape, settings)
        share = settings.step_share
        return step_need(spec, settings.scope, self.shape.layers, self.tokens, share)

    @property
    def exact_share(self) -> float:
        """Exact tokens of a set over all tokens; 1 where nothing is coded."""
        return self.need.exact_tokens / self.tokens if self.settings.has_coded_tokens else 1.0

    @property
    def all_code_bytes(self) -> int:
        """What M0 holds where the codes of all tokens are kept, with their slots' tables."""
        if not self.settings.has_coded_tokens:
            return 0
        # As many as tables have row numbers.
        slots = round_up(self.tokens, TABLE_GROWTH_ROWS)
        return slots * self.shape.layers * slot_bytes(kernel_spec(self.shape, self.settings))

    @property
    def kept_code_bytes(self) -> int:
        """What codes take of what they share with hot rows: all that there are, or a share."""
        plan = BudgetPlan.for_context(self.shape, self.settings, self.tokens)
        room = max(0, plan.hot_bytes - plan.kept_bytes)
        every = self.all_code_bytes
        return every if every <= room else int(room * CODE_SHARE)

    @property
    def kept_share(self) -> float:
        """Codes that DRAM keeps over all there are."""
        every = self.all_code_bytes
        return self.kept_code_bytes / every if every else 1.0

    @property
    def least_budget_bytes(self) -> int:
        """The smallest budget that holds all codes, the whole shadow and the kept rows."""
        plan = BudgetPlan.with_whole_shadow(self.shape, self.settings, self.tokens)
        return plan.required_bytes + self.all_code_bytes

    @property
    def settings_text(self) -> str:
        """What is said of the settings behind alpha."""
        return f", exact {self.settings.exact_share:g}" if self.settings.has_coded_tokens else ""

    def findings(self) -> Iterator[Finding]:
        """Yield what a step needs and whether all codes fit; nothing where all are exact."""
        if not self.settings.has_coded_tokens:
            return
        need, least = self.need, self.least_budget_bytes
        budget = BudgetPlan.for_context(self.shape, self.settings, self.tokens).budget_bytes
        fits = self.all_code_bytes == self.kept_code_bytes
        found = (
            f"a step needs {format_bytes(need.exact_row_bytes)} of rows of "
            f"{need.exact_tokens} exact tokens, {format_bytes(need.value_code_bytes)} of codes of "
            f"{need.coded_tokens} coded ones and {format_bytes(need.key_shadow_bytes)} of key "
            f"shadow (computed); all codes take {format_bytes(self.all_code_bytes)} of DRAM and "
            + (
                "fit"
                if fits
                else f"do not fit: {self.kept_share:.0%} are kept, the others come as rows"
            )
        )
        fix = (
            None
            if fits
            else f"--dram-budget {_mebibytes(least)}MiB, "
            f"{least / need.kv_bytes:.0%} of the KV cache, keeps all codes; it is "
            f"{format_bytes(budget)} now"
        )
        verdict = Verdict.OK if fits else Verdict.WARNING
        yield Finding("coded tokens", verdict, found, fix)


def _mebibytes(count: int) -> int:
    return -(-count // 2**20)


# --- Model shapes ---


@dataclass(frozen=True)
class ModelFigures:
    """What of a model's shape a decode step depends on.

    `family` is `llama` or `opt`, as transformers calls it; `all_layers` are those of the whole
    model. `hidden` and `inner` are channels between layers and inside the feed-forward part,
    `head_dim` those of a head.
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
# Reads of several of a store's objects, joined.
_READ_BYTES = 4 << 20


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
    Raises SettingsError where a value is none, and BudgetError where the budget is too small for
    the context.
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


def stored_prefix_finding(
    new_tokens: int,
    prefix_tokens: int,
    layers: int,
    row_bytes: int,
    window_seconds: float,
    drive: DriveRates,
) -> Finding:
    """Return when a pass over rows that stream by is through, and what is left for writes.

    Rows come layer by layer to their places in a cache in memory, as `load_into` brings them, so as
    many layers may be there before they are wanted as the model has. A layer attends once its rows
    are there and the layer before is through; the drive has slack while one computes longer than
    its rows take. Where reading limits the pass nothing is written, which is Tutti's second rule.

    `row_bytes` are those of a token's row in one layer; `window_seconds` is how long one layer
    computes over rows in memory.
    """
    read = drive.read_seconds(prefix_tokens * row_bytes, _READ_BYTES)
    there = through = waited = 0.0
    for _ in range(layers):
        there += read
        waited += max(there - through, 0.0)
        through = max(there, through) + window_seconds
    slack = max(0.0, window_seconds - read)
    own = int(drive.write * slack * (1 - drive.mixing_loss) / QUANTUM_BYTES) * QUANTUM_BYTES
    left = (
        f"leaves room to write {format_bytes(layers * own)}" if own else "leaves no time to write"
    )
    return Finding(
        "stored prefix",
        Verdict.OK,
        f"{new_tokens} tokens behind {prefix_tokens} stored ones take {through:.3f} s, "
        f"{1e3 * waited:.2f} ms of it waiting for rows, which {left} in slack "
        f"(modelled from {1e3 * window_seconds:.2f} ms of computing and {1e3 * read:.2f} ms of "
        "reading a layer)",
    )
