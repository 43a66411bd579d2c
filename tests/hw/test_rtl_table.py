# SPDX-License-Identifier: Apache-2.0
"""The long runs' table (`tools/rtl.py`): throughput, the cycle model, and what it finds wrong."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

rtl = pytest.importorskip("rtl", reason="tools/rtl.py renders kernels: pip install jinja2")

from hillinfer_hw.memory_model import IDEAL, REALISTIC  # noqa: E402
from hillinfer_hw.rtl import RtlSession  # noqa: E402
from hillinfer_hw.rtl_table import Case, Kernel, cases, kernels  # noqa: E402
from hillinfer_hw.toolchain import MissingToolError  # noqa: E402
from hillinfer_model.choices import KeyMode, Rule, Scope  # noqa: E402
from hillinfer_model.presets import PRESETS  # noqa: E402

# Fewest beats per token of what builds in seconds: what surrounds a launch weighs most here.
KERNEL = Kernel("qwen2.5-0.5b", KeyMode.INT4, Rule.RAW_SUM)
SHORT = (1024,) * 4

# With test_cycle_model_rtl.py, which builds the same one.
pytestmark = pytest.mark.xdist_group(KERNEL.spec.digest().hex())


@pytest.fixture(scope="module")
def session():
    try:
        made = RtlSession(KERNEL.spec, KERNEL.name)
    except MissingToolError as missing:
        pytest.skip(str(missing))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("scope", "memory", "counts"),
    [
        (Scope.LAYER, IDEAL, SHORT),
        (Scope.KV_HEAD, IDEAL, SHORT),
        (Scope.LAYER, REALISTIC, (1024,) * 16 + (517,)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_key_beat_is_taken_in_nearly_every_cycle(session, scope, memory, counts):
    row = rtl.row_of(KERNEL, session, Case(scope, memory, counts))
    assert row["faults"] == []
    assert row["mismatches"] == 0
    assert row["tokens"] == sum(counts)
    # Two beats of codes per token and KV head, one beat of exponents per group and KV head.
    assert row["code_beats"] == sum(-(-count // 8) * 8 for count in counts)
    assert row["beats"] - row["code_beats"] == 2 * sum(-(-count // 64) for count in counts)


def test_a_slow_memory_misses_the_goal_and_the_model(session):
    slow = replace(IDEAL, read_latency=(300, 300), outstanding=1)
    row = rtl.row_of(KERNEL, session, Case(Scope.LAYER, slow, SHORT))
    assert row["mismatches"] == 0
    assert any("the goal is 0.98" in fault for fault in row["faults"])


@dataclass
class Changed:
    """A session whose runs are told otherwise."""

    session: RtlSession
    change: Callable

    def run(self, *given, **named):
        return self.change(self.session.run(*given, **named))


def test_a_wrong_cycle_model_is_named(session):
    def faster(run):
        return replace(run, outcome=replace(run.outcome, cycles=run.outcome.cycles - 200))

    row = rtl.row_of(KERNEL, Changed(session, faster), Case(Scope.LAYER, IDEAL, SHORT))
    assert any(fault.startswith("the cycle model is ") for fault in row["faults"])


def test_a_tuple_that_is_not_goldens_is_counted(session):
    def flipped(run):
        output = run.result.output.copy()
        output.reshape(-1)[5000] ^= 1
        return replace(run, result=replace(run.result, output=output))

    row = rtl.row_of(KERNEL, Changed(session, flipped), Case(Scope.LAYER, IDEAL, SHORT))
    assert row["mismatches"] == 1


def test_tokens_are_counted_where_a_status_says_so():
    spec = KERNEL.spec
    launch = rtl.any_launch(KERNEL, Case(Scope.LAYER, IDEAL, (100, 0, 17)), 0)
    golden = rtl.run_score_launch(spec, launch)
    assert golden.completed_tokens == 117
    # A beat that nobody wrote counts nothing.
    golden.status[0] = 0xA5
    assert golden.completed_tokens == 17


@pytest.mark.parametrize("mode", KeyMode)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_scoring_kernel_scores_as_many_tokens_as_are_asked_for(preset, mode):
    kernel = Kernel(preset, mode, Rule.RAW_SUM)
    most = 10_000_000
    for tokens in (1, most):
        first, *others = cases(kernel, tokens)
        assert first.launches * sum(first.counts) >= tokens
        assert {one.launches for one in others} == {1}
    # The twin: one launch less would not do.
    assert (first.launches - 1) * sum(first.counts) < most


def test_a_kernel_that_makes_shadows_knows_no_rule_and_no_scope():
    table = list(kernels(["qwen2.5-0.5b"], list(KeyMode), list(Rule)))
    makers = [kernel for kernel in table if kernel.name == "make_shadow"]
    assert [kernel.mode for kernel in makers] == [one for one in KeyMode if one != KeyMode.FP16]
    assert len(table) == len(makers) + len(KeyMode) * len(Rule)
    assert {case.scope for kernel in makers for case in cases(kernel, 1)} == {None}
    # The twin: those that score have both.
    scored = {case.scope for case in cases(Kernel("qwen2.5-0.5b", KeyMode.INT4, Rule.RAW_SUM), 1)}
    assert scored == set(Scope)
