# SPDX-License-Identifier: Apache-2.0
"""Several queries in one pass over the keys, each with the scores that it has alone (section 17).

Golden of version 1, one launch per query, says what is right.
"""

from dataclasses import replace

import numpy as np
import pytest
from executions import GoldenExecution, csim, preset_like, rtl_execution
from launch_builder import ScoreSegment, as_stored, score_launch
from launch_cases import any_keys, any_query, base_of, generator_of, spoil
from launch_flips import flip_bit
from launch_oracle import OracleExecution

from hillinfer_hw.csim import CsimError
from hillinfer_model.beats import beat_count
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.descriptor import Descriptor
from hillinfer_model.golden_launch import run_score_launch
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.launch_shape import query_beats
from hillinfer_model.score_launch import scope_number

# Several blocks in a segment, and a kernel that is built in seconds: products in DSP blocks are a
# third of the code that bit planes are. Then rows and query blocks that end in mid-beat.
SMALL = KernelSpec(64, 2, 1, key_mode=KeyMode.INT8, segment_tokens=512, block_tokens=64, queries=4)
SHAPE = KernelSpec(80, 3, 2, segment_tokens=512, block_tokens=64, queries=4)
SPECS = {
    "small": SMALL,
    "int4": preset_like(replace(SHAPE, key_mode=KeyMode.INT4)),
    "fp16": preset_like(replace(SHAPE, key_mode=KeyMode.FP16, rule=Rule.RAW_SUM, queries=2)),
}
TOKENS = (150, 0, 1, 64, 79)
LAUNCHES = [
    pytest.param(mode, scope, queries, id=f"{mode}-{scope}-{queries}")
    for mode, counts in (("small", (4, 2, 1)), ("int4", (4, 3, 1)), ("fp16", (2, 1)))
    for queries in counts
    for scope in Scope
]
MAKERS = {
    "oracle": OracleExecution,
    "csim": csim("sequential"),
    "csim-threads": csim("threads"),
    "rtl": rtl_execution,
}


def marks(name, mode):
    """Tests of one build run in one process; larger kernels, and threads, are of the slow runs."""
    is_slow = name != "oracle" and (mode != "small" or name == "csim-threads")
    own = [pytest.mark.xdist_group(f"queries-{name}-{mode}")]
    return own + ([pytest.mark.kernels] if is_slow else [])


def runs(names):
    return [
        pytest.param(name, *case.values, id=f"{name}-{case.id}", marks=marks(name, case.values[0]))
        for name in names
        for case in LAUNCHES
    ]


NAMES = [pytest.param(name, marks=marks(name, "small")) for name in MAKERS]


def launch_of(spec, scope, queries, tokens=TOKENS):
    """Segments of anything, with as many queries each."""
    generator = generator_of("queries")
    segments = [
        ScoreSegment(
            base_of(spec, index),
            any_keys(spec, generator, count),
            any_query(spec, generator, 2**12, -25, -5),
            tuple(any_query(spec, generator, 2**12, -25, -5) for _ in range(queries - 1)),
        )
        for index, count in enumerate(tokens)
    ]
    return score_launch(spec, scope, segments)


def alone(spec, scope, launch, queries):
    """Scores and status of the launches of every query by itself, in version 1."""
    one = replace(spec, queries=1)
    block = query_beats(as_stored(spec))
    sets = spec.kv_heads if scope is Scope.KV_HEAD else 1
    scores = launch.scores
    for number in range(queries):
        descriptors = []
        for beat in launch.segments:
            own = Descriptor.unpack(beat[None])
            descriptors.append(
                replace(
                    own,
                    query=own.query + number * block,
                    score=own.score + number * sets * own.score_stride,
                    score_stride=own.score_stride if scope is Scope.KV_HEAD else 0,
                ).pack()
            )
        own_launch = replace(
            launch,
            segments=np.concatenate(descriptors),
            scores=scores,
            scope=scope_number(scope),
        )
        scores = run_score_launch(one, own_launch).output
    return scores


def made(name):
    return MAKERS[name]()


@pytest.mark.parametrize(("mode", "scope", "queries"), LAUNCHES)
def test_every_query_has_the_scores_that_it_has_alone(mode, scope, queries):
    spec = SPECS[mode]
    launch = launch_of(spec, scope, queries)
    found = GoldenExecution().score(spec, launch).output
    assert np.array_equal(found, alone(spec, scope, launch, queries))
    assert not np.array_equal(found, launch.scores)


@pytest.mark.parametrize(("name", "mode", "scope", "queries"), runs(MAKERS))
def test_every_execution_is_golden(name, mode, scope, queries):
    spec = SPECS[mode]
    tokens = (19, 0, 1) if name == "oracle" else TOKENS
    launch = launch_of(spec, scope, queries, tokens)
    golden, found = run_score_launch(spec, launch), made(name).score(spec, launch)
    assert np.array_equal(found.output, golden.output)
    assert np.array_equal(found.status, golden.status)


@pytest.mark.parametrize(("name", "mode", "scope", "queries"), runs([*MAKERS][1:]))
def test_a_flipped_bit_of_a_query_shows_in_its_arrays_alone(name, mode, scope, queries):
    """The twin of the equality; the last query's scores move, and no other's."""
    spec = SPECS[mode]
    launch = launch_of(spec, scope, queries)
    own = Descriptor.unpack(launch.segments[:1])
    block = own.query + (queries - 1) * query_beats(as_stored(spec))
    # A code's sign: spare bytes come behind the addends and exponents of all heads.
    codes = block + query_beats(as_stored(spec)) - beat_count(spec.scored_heads * spec.head_dim)
    flipped = flip_bit(launch, "queries", codes, 1, 7)
    golden, found = run_score_launch(spec, launch), made(name).score(spec, flipped)
    moved = np.flatnonzero((found.output != golden.output).any(axis=1))
    assert moved.size
    sets = spec.kv_heads if scope is Scope.KV_HEAD else 1
    first = own.score + (queries - 1) * sets * own.score_stride
    last = first + (sets - 1) * own.score_stride + beat_count(4 * own.tokens)
    assert first <= moved.min()
    assert moved.max() < last
    assert np.array_equal(found.output, run_score_launch(spec, flipped).output)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scope", [0x400, 0x102, 0x0100_0000, 2])
def test_more_queries_than_the_kernel_knows_end_the_launch(name, scope):
    spec = SPECS["small"]
    launch = replace(launch_of(spec, Scope.KV_HEAD, 4, (19, 1)), scope=scope)
    golden, found = run_score_launch(spec, launch), made(name).score(spec, launch)
    assert np.array_equal(found.status, golden.status)
    assert np.array_equal(found.output, launch.scores)
    assert found.status[0, 16] == 1


@pytest.mark.parametrize("name", NAMES)
def test_score_arrays_of_several_queries_may_not_overlap(name):
    spec = SPECS["small"]
    launch = launch_of(spec, Scope.LAYER, 2, (40, 40, 40))
    wrong = spoil(launch, 1, ["score_stride"], spec, Scope.KV_HEAD)
    golden, found = run_score_launch(spec, wrong), made(name).score(spec, wrong)
    assert np.array_equal(found.status, golden.status)
    assert np.array_equal(found.output, golden.output)
    assert [*found.status[:, 16]] == [0, 1, 0xA5]


@pytest.mark.kernels
@pytest.mark.parametrize("mode", ["small", "fp16"])
@pytest.mark.parametrize("seed", range(1, 13))
def test_no_delay_of_a_stream_of_the_chain_changes_a_bit(mode, seed):
    """Every written stream leaves 0 to 32 rounds late, as in `test_skew.py`."""
    spec, scope = SPECS[mode], list(Scope)[seed % 2]
    launch = launch_of(spec, scope, spec.queries)
    found = replace(made("csim-threads"), seed=seed).score(spec, launch)
    golden = run_score_launch(spec, launch)
    assert np.array_equal(found.output, golden.output)
    assert np.array_equal(found.status, golden.status)


@pytest.mark.kernels
def test_some_delay_finds_words_with_too_little_room():
    """The twin: with the room that one query's words have, commands stay behind them."""
    spec = SPECS["small"]
    launch = launch_of(spec, Scope.LAYER, spec.queries)
    shallow = {f"code_beats{own}": 16 for own in ("_0", "_1", "_2", "_3", "_from_1", "_from_2")}

    def run_all():
        for seed in range(1, 13):
            replace(made("csim-threads"), depths=shallow, seed=seed).score(spec, launch)

    with pytest.raises(CsimError, match="DEADLOCK"):
        run_all()


def test_one_query_is_version_1():
    """Its digest, and a launch of one query in a kernel of several."""
    assert replace(SHAPE, queries=1).canonical_json().count("queries") == 0
    assert '"queries":4' in SHAPE.canonical_json()
    assert replace(SHAPE, queries=1).digest() != replace(SHAPE, queries=2).digest()
    spec = SPECS["small"]
    launch = launch_of(spec, Scope.LAYER, 1)
    several, one = (run_score_launch(own, launch) for own in (spec, replace(spec, queries=1)))
    assert np.array_equal(several.output, one.output)
    assert np.array_equal(several.status[:, 8:], one.status[:, 8:])
    assert not np.array_equal(several.status, one.status)
