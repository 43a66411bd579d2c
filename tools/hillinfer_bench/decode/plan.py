# SPDX-License-Identifier: Apache-2.0
"""Named lists of cases, and how a user narrows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from hillinfer.errors import SettingsError
from hillinfer.settings import Settings
from hillinfer_bench.decode.request import CASE_FIELDS, Chosen
from hillinfer_bench.rivals.table import RIVALS
from hillinfer_bench.systems.case import Case
from hillinfer_bench.systems.shapes import PAPER_SHAPES
from hillinfer_bench.systems.table import (
    ABLATION,
    CODED,
    CODED_IN_MEMORY,
    HILLINFER,
    IN_MEMORY,
    IN_MEMORY_TRUE,
    JOINED,
    STOCK,
    make_system,
)

# What the paper compares itself with: FlexGen-like, H2O-like, prefetch-based, LeoAM-like.
PAPER_BASELINES = ("full-drive", "h2o-all-keys", "infinigen", "leoam")
# What of the product a user gets who chooses nothing, and full caches in 16 and in 4 bits.
_DEFAULT = (
    CODED,
    CODED_IN_MEMORY,
    "full-drive",
    "full-memory",
    "four-bit-drive",
    "four-bit-memory",
)
DEFAULT_PART = "default"
# Of a model with room for both of the latter.
_OWN = (HILLINFER, IN_MEMORY, IN_MEMORY_TRUE)


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Parameters
    ----------
    cases
        In this order, those of a model one after the other.
    recorded
        Tokens of the real text after which selections are recorded.
    joined
        Caches that decode together and one after another: as many as the case's batch.
    """

    cases: tuple[Case, ...]
    recorded: int = 4096
    joined: tuple[Case, ...] = ()

    @property
    def every(self) -> tuple[Case, ...]:
        """All cases, joined ones last."""
        return self.cases + self.joined

    def only(self, chosen: Chosen) -> Plan:
        """Return what is left of the plan.

        Raises
        ------
        SettingsError
            Where nothing is left, also for one value alone; the message names what there is.
        """
        there = self._values()
        # One value that is misspelt must not pass unseen beside others.
        for name, known in there.items():
            for value in getattr(chosen, name):
                if value not in known:
                    raise SettingsError(
                        f"nothing is left of the plan for --{name} {value}; it has "
                        + _listed(there, name)
                    )
        cases, joined = (
            tuple(left for case in some if (left := chosen.of(case)) is not None)
            for some in (self.cases, self.joined)
        )
        if not cases and not joined:
            raise SettingsError(
                "nothing is left of the plan: no case has all of these at once; it has "
                + _listed(there, *there)
            )
        return replace(self, cases=cases, joined=joined)

    def _values(self) -> dict[str, list[Any]]:
        values = {
            name: {getattr(case, field) for case in self.every}
            for field, name in CASE_FIELDS.items()
            if field != "systems"
        }
        values["systems"] = {name for case in self.every for name in case.systems}
        return {name: sorted(values[name]) for name in CASE_FIELDS.values()}


def _listed(there: Mapping[str, list[Any]], *names: str) -> str:
    return "; ".join(f"{name}: {', '.join(map(str, there[name]))}" for name in names)


def make_plan(name: str, real_model: str) -> Plan:
    """Return a plan of the table; see `docs/bench.md` for what each has.

    Parameters
    ----------
    name
        Of the plan.
    real_model
        The model with real weights.

    Raises
    ------
    SettingsError
        Where there is none of that name.
    """
    if name not in PLANS:
        raise SettingsError(f"plan={name!r}: choose one of {', '.join(PLANS)}")
    return PLANS[name](real_model)


def _rivals() -> tuple[str, ...]:
    # Swapping drags the whole machine along, so that rival has cases of its own. Caches of few bits
    # stand beside the default: at another quality than α they say nothing of selection.
    return tuple(name for name in RIVALS if "swap" not in name and "-bit-" not in name)


def _default_case(model: str, context: int, share: float, steps: int) -> Case:
    """Return a case with the product's default α, in which tokens are exact and coded."""
    alpha = Settings().importance_rate
    given = Case(model, context, _DEFAULT, alpha=alpha, budget_share=share, part=DEFAULT_PART)
    return replace(given, steps=steps, warm_up=4)


# The part of a plan whose caches take steps together.
JOINED_PART = "joined"


def _joined_case(model: str, context: int, caches: int, share: float) -> Case:
    settings = (model, context, (JOINED,))
    return Case(*settings, batch=caches, budget_share=share, steps=24, part=JOINED_PART)


def _quick(real_model: str) -> Plan:
    systems = (HILLINFER, IN_MEMORY, *_rivals(), *STOCK)
    return Plan(
        (
            # Buffers alone are more than a fifth of so little KV.
            Case(real_model, 2048, systems, budget_share=1.0, steps=8, warm_up=4),
            # Of twice the recorded tokens one layer of the real model is less local.
            Case("tiny", 8192, systems, budget_share=6.0, steps=8, warm_up=4),
            Case("tiny-opt", 8192, systems, budget_share=6.0, batch=2, steps=8, warm_up=4),
            _default_case("tiny-opt", 8192, 6.0, 8),
        ),
        recorded=2048,
        joined=(
            replace(_joined_case("tiny", 2048, 4, 12.0), steps=4, warm_up=2, turn=2),
            replace(_joined_case("tiny", 2048, 4, 2.0), steps=4, warm_up=2, turn=2),
        ),
    )


def _goals(real_model: str) -> Plan:
    # Stock caches in the model's own type have no room beside all others of the paper's shapes;
    # nor has a second HillInfer with all rows in DRAM, which gets a case of its own.
    systems = (HILLINFER, IN_MEMORY, *_rivals())
    return Plan(
        (
            *(
                case
                for model in PAPER_SHAPES
                for case in (
                    Case(model, 32_768, systems, steps=16, warm_up=4),
                    Case(model, 32_768, _OWN[1:], steps=16, warm_up=4, part="query"),
                    _default_case(model, 32_768, 0.2, 16),
                )
            ),
            Case(real_model, 7936, (*_OWN, *_rivals(), *STOCK), steps=64),
            _default_case(real_model, 7936, 0.25, 64),
        ),
        # Room for all rows, shadows and buffers; and a quarter of the KV.
        joined=tuple(_joined_case(real_model, 4096, 8, share) for share in (2.0, 0.25)),
    )


def _full(real_model: str) -> Plan:
    systems = (HILLINFER, IN_MEMORY, *_rivals(), *STOCK)
    contexts = (4096, 8192, 16_384, 32_768, 65_536)
    cases = [
        Case(real_model, context, (*_OWN, *_rivals(), *STOCK), alpha=alpha, steps=64)
        for context in (2048, 4096, 7936)
        for alpha in (0.05, 0.1, 0.2)
    ]
    cases += [
        Case(model, context, systems, steps=24, warm_up=8)
        for model in ("llama-3.2-1b", "llama-3.2-3b")
        for context in contexts
    ]
    systems = (HILLINFER, IN_MEMORY, *_rivals())
    cases += [
        Case(model, context, systems, steps=24, warm_up=8)
        for model in PAPER_SHAPES
        for context in contexts
    ]
    cases += [
        Case("opt-6.7b", 32_768, systems, alpha=alpha, steps=24) for alpha in (0.02, 0.05, 0.2)
    ]
    cases += [
        Case("opt-6.7b", 32_768, systems, budget_share=share, steps=24)
        for share in (0.15, 0.3, 0.5)
    ]
    # Rivals have none; in memory there is room for any.
    cases += [
        Case("opt-6.7b", 32_768, (HILLINFER, IN_MEMORY), shadow=shadow, steps=24)
        for shadow in ("int8", "int4")
    ]
    cases += [Case("opt-6.7b", 8192, systems, batch=batch, steps=24) for batch in (2, 4, 8)]
    cases += [Case(model, 32_768, ABLATION, steps=24, part="ablation") for model in PAPER_SHAPES]
    cases += [_default_case(real_model, 7936, 0.25, 64), _default_case("opt-6.7b", 32_768, 0.2, 24)]
    swapped = tuple(name for name in RIVALS if "swap" in name)
    if swapped:
        cases.append(Case("opt-6.7b", 32_768, (HILLINFER, *swapped), steps=16, part="swap"))
    joined = tuple(
        _joined_case(real_model, context, caches, share)
        for context, caches in ((4096, 2), (4096, 4), (4096, 8), (7808, 8))
        for share in (2.0, 0.25)
    )
    return Plan(tuple(cases), joined=joined)


def _paper(real_model: str) -> Plan:
    """Return cases after the paper's figures 12 to 16a, their names in `part`, α as there."""

    def case(figures: str, model: str, context: int, systems: tuple[str, ...], batch: int) -> Case:
        # Of few tokens buffers alone take more than a fifth.
        share = 0.5 if context < 4096 else 0.2
        given = model, context, systems, batch, 0.2, share
        return Case(*given, steps=8, warm_up=4, part=f"figure {figures}")

    systems = (HILLINFER, *PAPER_BASELINES)
    opt, llama = PAPER_SHAPES
    cases = [case("12, 13", opt, 1920, systems, batch) for batch in (8, 12)]
    cases.append(case("12, 13", opt, 32_768, systems, 1))
    cases += [case("14", opt, 1920, systems, batch) for batch in (1, 2, 4, 10)]
    cases += [case("15", opt, 1920, systems[:3], batch) for batch in (20, 25)]
    cases.append(case("16a", opt, 32_768, ABLATION, 1))
    cases += [case("12, 13", llama, one, systems, 1) for one in (1920, 8192, 16_384, 36_864)]
    return Plan(tuple(cases))


PLANS: Mapping[str, Callable[[str], Plan]] = MappingProxyType(
    {"quick": _quick, "goals": _goals, "full": _full, "paper": _paper}
)


def check_one_traced(cases: Sequence[Case]) -> None:
    """Refuse a trace unless exactly one system of exactly one case writes it.

    Raises
    ------
    SettingsError
        Where there are several, or none; the message names them.
    """
    found = [name for case in cases for name in case.systems if make_system(name).traced]
    if len(found) == 1:
        return
    named = ", ".join(dict.fromkeys(found)) or "none"
    raise SettingsError(
        "--trace writes one file, of one HillInfer system in one case; the plan has of these "
        f"systems {named}, in {len(cases)} cases: choose with --systems, --models, --contexts, "
        "--alphas, --budgets, --batches"
    )
