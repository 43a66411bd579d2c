# SPDX-License-Identifier: Apache-2.0
"""The table of proofs about arithmetic units, each with a mutant that it must refute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hillinfer_hw.build_cache import ROOT
from hillinfer_hw.prove import prove

HARDWARE = ROOT / "hw"


@dataclass(frozen=True)
class Proof:
    """One proof.

    Parameters
    ----------
    top, unit
        Module with the assertions; module it is about.
    latency
        Of the unit, in clock cycles.
    change
        Text of the unit and what replaces it: the proof must refute it.
    parameters
        The top module's.
    """

    top: str
    unit: str
    latency: int
    change: tuple[str, str]
    parameters: Mapping[str, int] = field(default_factory=dict)


# Drops the lowest bit of the mantissa: codes stay monotone and are wrong.
MONOTONE_BUT_WRONG = ("after4[9:0]};", "after4[9:1], 1'b0};")
PROOFS: Mapping[str, Proof] = MappingProxyType(
    {
        "packed sums come apart": Proof(
            "prove_pair_fields", "pair_fields", 1, (" + {18'd0, low1[17]};", ";")
        ),
        "aligned product": Proof(
            "prove_align", "align_unit", 7, ("(32'(right2) <= i)", "(32'(right2) < i)")
        ),
        "weight": Proof(
            *("prove_weight", "weight_unit", 4),
            ("integer_part[5:3] >= 3'd5", "integer_part[5:3] > 3'd5"),
        ),
        "score code of a weight sum is its definition": Proof(
            *("prove_score_code", "score_code", 5, MONOTONE_BUT_WRONG), {"RULE": 1, "WIDTH": 57}
        ),
        "score code of a raw sum is its definition": Proof(
            *("prove_score_code", "score_code", 5, MONOTONE_BUT_WRONG), {"RULE": 0, "WIDTH": 40}
        ),
        "score code of a weight sum is monotone": Proof(
            *("prove_monotone", "score_code", 5),
            ("code <= size + 16'd1", "code <= size"),
            {"RULE": 1, "WIDTH": 57},
        ),
        "score code of a raw sum is monotone": Proof(
            *("prove_monotone", "score_code", 5),
            ("~size[14:0]", "size[14:0]"),
            {"RULE": 0, "WIDTH": 40},
        ),
        "a saturating sum has no order": Proof(
            *("prove_no_order", "score_code", 5),
            ("(|value[WIDTH-1:48])", "(|value[WIDTH-1:49])"),
        ),
    }
)


def holds(proof: Proof, change: tuple[str, str] | None = None) -> bool:
    """Return whether a proof holds for its unit, or for the unit with a change.

    Parameters
    ----------
    proof
        One of `PROOFS`, or one like them.
    change
        Text of the unit, which must be there once, and what replaces it.

    Raises
    ------
    ValueError
        Where the text is not there exactly once.
    SolverMissingError
        Without Yosys or a solver.
    """
    text = (HARDWARE / "rtl" / f"{proof.unit}.sv").read_text()
    if change is not None:
        if text.count(change[0]) != 1:
            raise ValueError(f"{proof.unit}.sv has {text.count(change[0])} × {change[0]!r}")
        text = text.replace(*change)
    bench = (HARDWARE / "testbench" / "proofs" / f"{proof.top}.sv").read_text()
    sources = {f"{proof.top}.sv": bench, f"{proof.unit}.sv": text}
    return prove(proof.top, sources, proof.latency + 3, proof.parameters)
