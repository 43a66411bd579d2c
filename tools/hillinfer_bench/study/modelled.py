# SPDX-License-Identifier: Apache-2.0
"""How long systems take on a machine of stated rates, by the product's models of latency.

Nothing here is measured. A layer's tokens are those of all sequences. Rows are read and scored at
whole rates, as if reads were always long ones, for every system alike.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from itertools import pairwise

from hillinfer.doctor.profile import ModelFigures
from hillinfer.rates.kept_rates import Rates
from hillinfer.rates.latency import (
    LatencyModel,
    ParallelScorers,
    ScoresThenRows,
    SelectedShares,
    SharedScorer,
)
from hillinfer_bench.frontier.rival_rules import CANDIDATES
from hillinfer_bench.rivals.infinigen import RATIO
from hillinfer_bench.rivals.paged import CHUNK_TOKENS
from hillinfer_bench.study.machines import EdgeMachine

_ITEM = 2
_PAGE_TOKENS = 16
# Splits of a layer's tokens that are tried, host to card.
_SPLITS = 64


@dataclass(frozen=True)
class Workload:
    """What is decoded.

    Parameters
    ----------
    model
        Whose layers.
    prompt, output
        Tokens of each sequence.
    batch
        Sequences.
    alpha
        Importance rate.
    """

    model: ModelFigures
    prompt: int
    output: int
    batch: int
    alpha: float

    @property
    def tokens(self) -> int:
        """Tokens of all sequences, in the middle of the answer."""
        return self.batch * (self.prompt + self.output // 2)

    @property
    def key_bytes(self) -> int:
        """Bytes of one token's keys in one layer."""
        return self.model.kv_heads * self.model.head_dim * _ITEM

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row in one layer."""
        return 2 * self.key_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of all rows of all layers."""
        return self.model.all_layers * self.tokens * self.row_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of all layers' weights in 16 bits."""
        return self.model.all_layers * self.model.layer_weights * _ITEM


@dataclass(frozen=True)
class Placed:
    """A workload on a machine: weights on the GPU first, KV in DRAM first.

    Parameters
    ----------
    machine, load
        Which.
    """

    machine: EdgeMachine
    load: Workload

    @property
    def streamed_weights(self) -> float:
        """Bytes of weights that the GPU has no room for and reads from the host in every step."""
        room = self.machine.gpu_bytes - self.machine.gpu_work
        return max(0.0, self.load.weight_bytes - room)

    def hosted_most(self, of_all: float = 0.0, of_hosted: float = 0.0) -> int:
        """Return the tokens of each layer whose rows have room in DRAM (equation 3).

        Parameters
        ----------
        of_all, of_hosted
            What else DRAM holds to rank by, over a row: of every token, and of every one there.
        """
        load, layer_row = self.load, self.load.model.all_layers * self.load.row_bytes
        room = self.machine.host_bytes - self.streamed_weights - of_all * load.kv_bytes
        return min(load.tokens, int(max(0.0, room) / (layer_row * (1 + of_hosted))))

    @property
    def streaming(self) -> float:
        """Seconds of one layer in which the link to the GPU brings weights."""
        return self.streamed_weights / self.load.model.all_layers / self.machine.link

    def computing(self, attended: float) -> float:
        """Return the seconds of one layer on the GPU, which reads weights and attended rows.

        Parameters
        ----------
        attended
            Share of the tokens.
        """
        machine, load = self.machine, self.load
        read = load.model.layer_weights * _ITEM + attended * load.tokens * load.row_bytes
        return read / machine.gpu_memory

    def overlapped(self, attended: float, attending: float) -> float:
        """Return the seconds of a layer whose rows and weights come while another one computes.

        Parameters
        ----------
        attended
            Share of the tokens that the GPU attends to.
        attending
            Seconds of scoring and of rows.
        """
        return max(self.computing(attended), attending + self.streaming)

    def prefill(self, cold: int) -> float:
        """Return the seconds until a prompt is read and its KV lies where it belongs.

        Parameters
        ----------
        cold
            Tokens of each layer that go to a drive.
        """
        machine, load = self.machine, self.load
        weights = load.model.all_layers * load.model.layer_weights
        products = 2 * load.model.all_layers * load.model.query_heads * load.model.head_dim
        flops = 2 * load.batch * load.prompt * (weights + products * load.prompt / 2)
        written = load.model.all_layers * cold * load.row_bytes / machine.drive_write
        return max(flops / machine.gpu_flops, load.kv_bytes / machine.link, written)


class SystemModel(ABC):
    """How one system decodes; `layer` is what a subclass overrides."""

    name: str
    ranking_held: float = 0.0
    """Bytes in DRAM of every token to rank by, over a row."""

    @abstractmethod
    def layer(self, placed: Placed) -> float:
        """Return the seconds of one layer of one step, computation included."""

    def cold(self, placed: Placed) -> int:
        """Return the tokens of each layer whose rows lie on a drive."""
        return placed.load.tokens - placed.hosted_most(self.ranking_held)

    def step(self, placed: Placed) -> float:
        """Return the seconds of one decode step of all sequences."""
        return placed.load.model.all_layers * self.layer(placed)

    def run(self, placed: Placed) -> float:
        """Return the seconds from the prompt to the end of the answer."""
        return placed.prefill(self.cold(placed)) + placed.load.output * self.step(placed)


# --- Baselines: the host scores, rows come from DRAM and the plain drive ---


class _OnTheHost(SystemModel):
    """Costs add on the side of the host, as `SharedScorer` has it."""

    def attending(self, placed: Placed, read: float, scored_bytes: float) -> float:
        """Return the seconds of one layer's scoring and rows.

        Parameters
        ----------
        placed
            Where tokens lie.
        read
            Share of the rows' bytes that is read, from DRAM and drive alike.
        scored_bytes
            That the host looks at, of each token.
        """
        machine, row = placed.machine, placed.load.row_bytes
        rates = Rates(
            machine.host_scoring / scored_bytes if scored_bytes else math.inf,
            0.0,
            machine.link / row,
            machine.drive / row,
        )
        hosted = placed.hosted_most(self.ranking_held)
        shares = SelectedShares(read, read)
        return SharedScorer(rates).latency(hosted, placed.load.tokens - hosted, shares)


class FullCache(_OnTheHost):
    """Every row is read, a layer ahead (FlexGen)."""

    name = "full"

    def layer(self, placed: Placed) -> float:
        """Read all; see `SystemModel`."""
        return placed.overlapped(1.0, self.attending(placed, 1.0, 0.0))


class AllKeys(_OnTheHost):
    """All keys are read with the layer's own query, then selected values: nothing overlaps."""

    name = "h2o-like"

    def layer(self, placed: Placed) -> float:
        """Read keys and some values; see `SystemModel`."""
        alpha = placed.load.alpha
        attending = self.attending(placed, (1 + alpha) / 2, 0.0)
        return placed.computing(alpha) + placed.streaming + attending


class Prefetching(_OnTheHost):
    """Partial keys rank a layer ahead, selected rows are read (InfiniGen)."""

    name = "prefetch-based"
    ranking_held = RATIO / 2

    def layer(self, placed: Placed) -> float:
        """Rank by partial keys and read rows; see `SystemModel`."""
        alpha = placed.load.alpha
        attending = self.attending(placed, alpha, RATIO * placed.load.key_bytes)
        return placed.overlapped(alpha, attending)


class Abstracts(_OnTheHost):
    """Abstracts of chunks and pages rank a layer ahead, pages are read (LeoAM)."""

    name = "leoam-like"
    ranking_held = 1 / CHUNK_TOKENS + 1 / _PAGE_TOKENS

    def layer(self, placed: Placed) -> float:
        """Rank by abstracts and read pages; see `SystemModel`."""
        alpha = placed.load.alpha
        share = 1 / CHUNK_TOKENS + min(1.0, CANDIDATES * alpha) / _PAGE_TOKENS
        attending = self.attending(placed, alpha, share * placed.load.row_bytes)
        return placed.overlapped(alpha, attending)


# --- HillInfer ---

HIT_RATES = ((0.0, 0.0), (1.0, 0.607), (2.0, 0.926))
"""Pool over α·N, and the share of selected rows that it has: measured, the paper's policy."""


def hit_rate(share: float, alpha: float) -> float:
    """Return which share of the selected rows a pool has, by lines between what was measured.

    Parameters
    ----------
    share
        Of all tokens that the pool holds.
    alpha
        Importance rate.
    """
    points = [(pool * alpha, hits) for pool, hits in HIT_RATES]
    if points[-1][0] < 1:
        points.append((1.0, 1.0))
    for (low, below), (high, above) in pairwise(points):
        if share <= high:
            return below + (above - below) * (share - low) / (high - low)
    return 1.0


class HillInfer(SystemModel):
    """The paper's system: host and card score what each of them holds (equation 2).

    The card streams 16-bit keys from NAND, as section 4.4 says.

    Parameters
    ----------
    name
        As tables call it.
    """

    shadow_held: float = 0.0
    """Bytes in DRAM of every token that the host scores, to rank by, over a row."""

    def __init__(self, name: str = "paper's hillinfer") -> None:
        self.name = name

    def rates(self, placed: Placed) -> Rates:
        """Return the four rates of equation 2, tokens of one layer a second."""
        machine, load = placed.machine, placed.load
        return Rates(
            machine.host_scoring / load.key_bytes,
            machine.card_stream / load.key_bytes,
            machine.link / load.row_bytes,
            machine.card_link / load.row_bytes,
        )

    def model(self, placed: Placed) -> LatencyModel:
        """Return the model of latency."""
        return ParallelScorers(self.rates(placed))

    def shares(self, placed: Placed, hosted: int) -> SelectedShares:
        """Return the selected shares of both sides: the host's pool has what tends to be wanted."""
        tokens, alpha = placed.load.tokens, placed.load.alpha
        hits = hit_rate(hosted / tokens, alpha)
        selected, on_card = alpha * tokens, tokens - hosted
        return SelectedShares(
            min(1.0, hits * selected / hosted) if hosted else 0.0,
            min(1.0, (1 - hits) * selected / on_card) if on_card else 0.0,
        )

    def attending(self, placed: Placed, hosted: int) -> float:
        """Return the seconds of one layer's scoring and rows with Mc tokens on the host."""
        on_card = placed.load.tokens - hosted
        shares = self.shares(placed, hosted)
        return self.model(placed).latency(hosted, on_card, shares)

    def splits(self, placed: Placed) -> list[int]:
        """Return the numbers of tokens on the host that M0 allows, ascending."""
        tokens, most = placed.load.tokens, placed.hosted_most(of_hosted=self.shadow_held)
        tried = {tokens * number // _SPLITS for number in range(_SPLITS + 1)} | {most}
        return sorted(one for one in tried if one <= most)

    def hosted(self, placed: Placed) -> int:
        """Return Mc of the β that makes the latency least (APP)."""
        return min(self.splits(placed), key=lambda one: self.attending(placed, one))

    def cold(self, placed: Placed) -> int:
        """Return what lies on the card; see `SystemModel`."""
        return placed.load.tokens - self.hosted(placed)

    def layer(self, placed: Placed) -> float:
        """Score on both sides while the layer before computes; see `SystemModel`."""
        attending = self.attending(placed, self.hosted(placed))
        return placed.overlapped(placed.load.alpha, attending)


class PoolsOnly(HillInfer):
    """The paper's +HKM: the host's pool has all rows that fit, whatever that takes to score."""

    def hosted(self, placed: Placed) -> int:
        """Return the pool; see `HillInfer`."""
        return placed.hosted_most(of_hosted=self.shadow_held)


# Share of the tokens that is exact, and bytes of a coded value over those of a row.
_EXACT, _VALUE = 0.02, 0.25 / 2


class FreeScores(HillInfer):
    """The paper's system if its card scored in no time: what is left is rows."""

    def rates(self, placed: Placed) -> Rates:
        """Return the four rates with an endless fs; see `HillInfer`."""
        return replace(super().rates(placed), f_s=math.inf)


class CodedHillInfer(HillInfer):
    """What this project has: INT4 key shadows, scores before rows, most selected tokens as codes.

    The card scores shadows in its own DRAM; those beyond it stream from NAND. Of α a fiftieth of
    all tokens comes as rows, the others as value codes.
    """

    shadow_held = 1 / 8

    def rates(self, placed: Placed) -> Rates:
        """Return rates of tokens by their shadows, and of rows."""
        machine, load = placed.machine, placed.load
        shadow = load.key_bytes / 4
        resident = machine.card_bytes / (load.model.all_layers * shadow)
        on_card = max(1, load.tokens - placed.hosted_most(of_hosted=self.shadow_held))
        held = min(1.0, resident / on_card)
        seconds = held * shadow / machine.card_memory + (1 - held) * shadow / machine.card_stream
        return replace(super().rates(placed), f_c=machine.host_scoring / shadow, f_s=1 / seconds)

    def model(self, placed: Placed) -> LatencyModel:
        """Return the model that the product has by default, without its rows."""
        return ScoresThenRows(self.rates(placed))

    def attending(self, placed: Placed, hosted: int) -> float:
        """Return scoring, and rows and codes behind it; see `HillInfer`."""
        rates, alpha = self.rates(placed), placed.load.alpha
        exact = min(alpha, _EXACT)
        read = (exact + (alpha - exact) * _VALUE) / alpha
        shares = self.shares(placed, hosted)
        tokens = placed.load.tokens
        # Either link brings its own part, both at once.
        rows = max(
            read * shares.alpha_c * hosted / rates.b_c,
            read * shares.alpha_s * (tokens - hosted) / rates.b_s,
        )
        return super().attending(placed, hosted) + rows


SYSTEM_MODELS: tuple[SystemModel, ...] = (
    FullCache(),
    AllKeys(),
    Prefetching(),
    Abstracts(),
    HillInfer(),
    FreeScores("paper's, scores free"),
    CodedHillInfer("this project's"),
)
BASELINES = tuple(one.name for one in SYSTEM_MODELS[:4])
OWN = tuple(one.name for one in SYSTEM_MODELS[4:])
