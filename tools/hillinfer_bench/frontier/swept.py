# SPDX-License-Identifier: Apache-2.0
"""The systems that are compared: each one's knob, what it attends to and what that costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import gcd
from types import MappingProxyType

from hillinfer.devices.opening import make_scorer
from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.model_shape import ModelShape
from hillinfer.settings import Settings
from hillinfer.shadow.coming_codes import record_bytes
from hillinfer_bench.frontier import four_bit
from hillinfer_bench.frontier.curve import Curve, Point, StepCurve
from hillinfer_bench.frontier.rival_rules import (
    H2ODropRule,
    InfiniGenRule,
    LeoAMRule,
    QuestRule,
    partial_channels,
    spilled_tokens,
    wanted_pages,
)
from hillinfer_bench.precision.table import CHOSEN_FORM, Mix
from hillinfer_bench.precision.value_forms import Split
from hillinfer_bench.quality.policies import (
    Attending,
    ContractSelection,
    FloatWeights,
    SelectionPolicy,
)
from hillinfer_bench.rivals.paged import CHUNK_TOKENS, PAGE_TOKENS
from hillinfer_bench.systems.kv_source import LastQueries
from hillinfer_model.choices import KeyMode
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.selection import selected_count

_ROW_BYTES = 4  # Of one channel, keys and values together.


def exact_split() -> Split:
    """Return which selected tokens are exact by the product's default."""
    settings = Settings()
    return Split(settings.exact_share, settings.exact_floor)


def default_alpha() -> float:
    """Return the importance rate that goes with `exact_split`."""
    return Settings().importance_rate


def alpha_settings(alpha: float) -> Settings:
    """Return settings with an importance rate and INT4, which ranks in every case."""
    return Settings().changed(alpha=alpha, shadow=KeyMode.INT4)


class Swept(ABC):
    """A system and the settings of its knob that are measured.

    Parameters
    ----------
    name
        As reports and pictures have it.
    knob
        What is turned.
    values
        Of it, ascending: the last is the nearest to the full cache.
    """

    def __init__(self, name: str, knob: str, values: Sequence[float]) -> None:
        self.name = name
        self.knob = knob
        self.values = tuple(values)

    @abstractmethod
    def policy(
        self, value: float, shape: ModelShape, prompt: LastQueries | None
    ) -> SelectionPolicy | Attending:
        """Return what attends in one pass over the last tokens of a text.

        Parameters
        ----------
        value
            Of the knob.
        shape
            The model's.
        prompt
            Queries of the text before these tokens, where they are known.
        """

    @abstractmethod
    def row_share(self, value: float, length: int, shape: ModelShape) -> float:
        """Return the bytes of rows and codes of a step, over the rows of all tokens.

        What ranks lies in memory and is not in it; see `ranked_share`.
        """

    def ranked_share(self, shape: ModelShape) -> float:
        """Return the bytes in memory that rank, over the rows of all tokens; none, as a rule."""
        return 0.0

    def drive_share(self, rows: float, budget: float, shape: ModelShape) -> float:
        """Return the modelled bytes from the drive of a step, over the rows of all tokens.

        What memory has left beside what ranks holds rows, and no pool is better than chance: so
        misses are the share that is not held.

        Parameters
        ----------
        rows
            `row_share` of the setting.
        budget
            M0 over the rows of all tokens.
        shape
            The model's.
        """
        return rows * (1 - min(1.0, max(0.0, budget - self.ranked_share(shape))))

    def read_share(self, rows: float, budget: float, shape: ModelShape, unit_bytes: int) -> float:
        """Return the bytes that such a step reads; those of `drive_share`, as a rule.

        Parameters
        ----------
        rows, budget, shape
            As in `drive_share`.
        unit_bytes
            What reads of the drive are multiples of.
        """
        return self.drive_share(rows, budget, shape)

    def label(self, value: float) -> str:
        """Return a setting in words."""
        return f"{self.knob} {value:g}"

    def curve(self, points: Sequence[Point]) -> Curve:
        """Return the curve of measured settings."""
        return Curve(points)


class _Selecting(Swept):
    """A system whose knob is α, and whose rows are as many as α says."""

    def __init__(self, name: str, values: Sequence[float]) -> None:
        super().__init__(name, "α", values)

    def row_share(self, value: float, length: int, shape: ModelShape) -> float:
        """Return k over the length; see `Swept`."""
        return selected(value, length) / length


def selected(alpha: float, length: int) -> int:
    """Return how many of `length` tokens an importance rate selects."""
    settings = alpha_settings(alpha)
    return selected_count(length, alpha, settings.kept_tokens, settings.max_selected)


def _shadow_share(shape: ModelShape) -> float:
    """Return the bytes of INT4 keys, an exponent for each, over those of rows."""
    return (shape.head_dim / 2 + 1) / (_ROW_BYTES * shape.head_dim)


def _touched(wanted: float, size: int, unit_bytes: int) -> float:
    """Return the share of a file's units that hold some of the items wanted at random.

    Parameters
    ----------
    wanted
        Share of all items.
    size
        Bytes of an item; they lie one behind the other.
    unit_bytes
        Of a unit.
    """
    # Of how many items a unit holds a part.
    of_unit = (unit_bytes + size - gcd(size, unit_bytes)) / size
    return float(1.0 - (1.0 - min(1.0, wanted)) ** of_unit)


class HillInfer(_Selecting):
    """The product with all selected tokens exact."""

    def policy(
        self, value: float, shape: ModelShape, prompt: LastQueries | None
    ) -> SelectionPolicy | Attending:
        """Select by the scoring contract; see `Swept`."""
        settings = alpha_settings(value)
        scorer = make_scorer(settings.device, kernel_spec(shape, settings), settings.scope)
        return ContractSelection(scorer, settings)

    def ranked_share(self, shape: ModelShape) -> float:
        """Return that of the key shadow; see `Swept`."""
        return _shadow_share(shape)

    def read_share(self, rows: float, budget: float, shape: ModelShape, unit_bytes: int) -> float:
        """Return that of whole units, whichever rows are cold; see `Swept`."""
        return _touched(self.drive_share(rows, budget, shape), shape.row_bytes, unit_bytes)


class HillInferCoded(HillInfer):
    """The product with the best of the selected tokens exact and the others coded."""

    def mix(self, value: float) -> Mix:
        """Return the row of the study of precision that this setting is."""
        return Mix(value, exact_split(), CHOSEN_FORM)

    def policy(
        self, value: float, shape: ModelShape, prompt: LastQueries | None
    ) -> SelectionPolicy | Attending:
        """Attend as the study of precision does; see `Swept`."""
        return self.mix(value).configuration().policy(shape)

    def row_share(self, value: float, length: int, shape: ModelShape) -> float:
        """Return that of exact rows and value codes; see `Swept`."""
        return self.mix(value).byte_share(length, shape.head_dim)

    def drive_share(self, rows: float, budget: float, shape: ModelShape) -> float:
        """Return the misses where codes come before rows in memory; see `Swept`.

        All exact rows and the codes that memory has no room for come from the drive, no code in
        place of its row.
        """
        exact, coded = self._cold(rows, budget, shape)
        return exact + coded * _shadow_share(shape)

    def read_share(self, rows: float, budget: float, shape: ModelShape, unit_bytes: int) -> float:
        """Return that of whole units of both files; see `Swept`."""
        exact, coded = self._cold(rows, budget, shape)
        size = record_bytes(KernelSpec(shape.head_dim, shape.kv_heads, shape.group_size))
        records = _touched(coded, size, unit_bytes) * size / shape.row_bytes
        return _touched(exact, shape.row_bytes, unit_bytes) + records

    def _cold(self, rows: float, budget: float, shape: ModelShape) -> tuple[float, float]:
        """Return the shares of all tokens that are exact and cold, and coded without hot codes."""
        codes = _shadow_share(shape)
        left = max(0.0, budget - self.ranked_share(shape))
        held = min(1.0, left / codes)
        exact = min(rows, exact_split().share)
        rest = 1 - min(1.0, max(0.0, left - codes))
        return exact * rest, (rows - exact) * (1 - held) / codes

    def label(self, value: float) -> str:
        """Return α and what is exact; see `Swept`."""
        return f"α {value:g}, exact {self.mix(value).exact_text}"


class H2OAllKeys(_Selecting):
    """Reads all keys and ranks by their true weights."""

    def policy(
        self, value: float, shape: ModelShape, prompt: LastQueries | None
    ) -> SelectionPolicy | Attending:
        """Select by softmax weights in floating point; see `Swept`."""
        return FloatWeights(alpha_settings(value))

    def row_share(self, value: float, length: int, shape: ModelShape) -> float:
        """Return that of all keys and the selected values; see `Swept`."""
        return (1 + super().row_share(value, length, shape)) / 2

    def drive_share(self, rows: float, budget: float, shape: ModelShape) -> float:
        """Return the misses where keys come before values in memory; see `Swept`."""
        keys, values = 0.5, rows - 0.5
        left = max(0.0, budget - keys)
        return max(0.0, keys - budget) + values * (1 - min(1.0, 2 * left))


class H2ODrop(_Selecting):
    """Keeps heavy hitters in memory and drops the others."""

    def policy(
        self, value: float, shape: ModelShape, prompt: LastQueries | None
    ) -> SelectionPolicy | Attending:
        """Select what was never dropped; see `Swept`."""
        return H2ODropRule(alpha_settings(value), prompt)

    def drive_share(self, rows: float, budget: float, shape: ModelShape) -> float:
        """Return none: what is not in memory is gone; see `Swept`."""
        return 0.0


class InfiniGen(_Selecting):
    """Ranks by partial keys."""

    def policy(
        self, value: float, shape: ModelShape, prompt: LastQueries | None
    ) -> SelectionPolicy | Attending:
        """Select by partial keys; see `Swept`."""
        return InfiniGenRule(alpha_settings(value))

    def ranked_share(self, shape: ModelShape) -> float:
        """Return that of partial keys in 16 bits; see `Swept`."""
        return partial_channels(shape.head_dim) / (2 * shape.head_dim)


class Paged(_Selecting):
    """Takes whole pages by bounds on their keys.

    Parameters
    ----------
    name, values
        As in `Swept`.
    rule
        Ranks pages.
    sizes
        Tokens of pages that have bounds in memory.
    """

    def __init__(
        self, name: str, values: Sequence[float], rule: type[QuestRule], sizes: Sequence[int]
    ) -> None:
        super().__init__(name, values)
        self._rule = rule
        self._sizes = sizes

    def policy(
        self, value: float, shape: ModelShape, prompt: LastQueries | None
    ) -> SelectionPolicy | Attending:
        """Select pages; see `Swept`."""
        return self._rule(alpha_settings(value))

    def row_share(self, value: float, length: int, shape: ModelShape) -> float:
        """Return that of whole pages and the tail; see `Swept`."""
        settings = alpha_settings(value)
        pages = wanted_pages(settings, length, selected(value, length))
        tail = length - spilled_tokens(length, settings.kept_recent)
        return (pages * PAGE_TOKENS + tail) / length

    def ranked_share(self, shape: ModelShape) -> float:
        """Return that of two vectors a page; see `Swept`."""
        return sum(1 / size for size in self._sizes)


class FourBit(Swept):
    """All tokens as codes of few bits, but for the newest."""

    def policy(
        self, value: float, shape: ModelShape, prompt: LastQueries | None
    ) -> SelectionPolicy | Attending:
        """Attend to codes; see `Swept`."""
        return four_bit.CodedCache(int(value))

    def row_share(self, value: float, length: int, shape: ModelShape) -> float:
        """Return that of codes and the newest rows; see `Swept`."""
        return four_bit.row_share(int(value), length)

    def drive_share(self, rows: float, budget: float, shape: ModelShape) -> float:
        """Return what memory has no room for: all of it is read at every step; see `Swept`."""
        return max(0.0, rows - budget)

    def curve(self, points: Sequence[Point]) -> Curve:
        """Return a curve with nothing between two numbers of bits; see `Swept`."""
        return StepCurve(points)


HILLINFER, CODED, FOUR_BIT = "hillinfer", "hillinfer-coded", "four-bit"
_FEW = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
_MANY = (0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9)
SWEPT: Mapping[str, Swept] = MappingProxyType(
    {
        one.name: one
        for one in (
            HillInferCoded(CODED, sorted({0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, default_alpha()})),
            HillInfer(HILLINFER, _FEW),
            H2OAllKeys("h2o-all-keys", _FEW),
            InfiniGen("infinigen", (0.05, 0.1, 0.2, 0.3, 0.45, 0.6)),
            Paged("leoam", _MANY, LeoAMRule, (CHUNK_TOKENS, PAGE_TOKENS)),
            Paged("quest", _MANY, QuestRule, (PAGE_TOKENS,)),
            FourBit(FOUR_BIT, "bits", (2, 3, 4, 5, 6, 8)),
            H2ODrop("h2o-drop", _MANY),
        )
    }
)
