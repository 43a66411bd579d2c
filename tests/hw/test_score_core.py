# SPDX-License-Identifier: Apache-2.0
"""The scoring datapath alone: every stream stalls, segments of any length follow each other."""

import numpy as np
import pytest
from core_streams import (
    NO_STALLS,
    Streams,
    add_score_segment,
    core_case,
    make_spec,
    run_core,
)

from hillinfer_hw.synth import core_parameters
from hillinfer_model.choices import Scope

# head_dim, KV heads, G, key mode, rule, style: odd and even numbers of slices, pairs of tokens and
# of heads in a multiplier, one and more lanes and steps of tokens and of heads in the score units.
CORES = [
    (64, 3, 3, "int8", "weight_sum", "dsp"),
    (80, 2, 1, "int2", "raw_sum", "lut"),
    (80, 3, 1, "fp16", "raw_sum", "dsp"),
    (128, 1, 3, "fp16", "weight_sum", "dsp"),
    (64, 2, 3, "int4", "weight_sum", "lut"),
    (256, 1, 4, "int8", "weight_sum", "dsp"),
    (96, 1, 2, "int2", "weight_sum", "dsp"),
    (64, 1, 1, "int8", "raw_sum", "lut"),
]
STALLS = [NO_STALLS, (30, 30, 30, 30), (0, 0, 0, 80), (0, 0, 70, 0), (95, 0, 0, 0)]
TOKENS = (1, 64, 3, 200, 16, 65, 5, 17, 1, 1, 1, 130)


def core(head_dim, kv, group, mode, rule, style):
    spec = make_spec(head_dim, kv, group, mode, rule, style)
    return spec, core_case("score_core", core_parameters(spec, "score_tokens"))


def segments(spec, scope, adversarial, seed=0, tokens=TOKENS):
    rng = np.random.default_rng(seed)
    streams = Streams()
    for count in tokens:
        add_score_segment(streams, rng, spec, scope, count, adversarial)
    return streams


@pytest.mark.parametrize("case", CORES, ids=lambda case: "-".join(map(str, case)))
def test_every_tuple_is_golden(case, tmp_path):
    spec, built = core(*case)
    for scope in Scope:
        for number, stalls in enumerate(STALLS):
            streams = segments(spec, scope, adversarial=number % 2 == 1, seed=number)
            run = run_core(tmp_path, *built, streams, scope, stalls, seed=number + 1)
            assert run.changed_while_waiting == 0
            assert run.out == streams.out, (scope, stalls)


@pytest.mark.parametrize("case", CORES, ids=lambda case: "-".join(map(str, case)))
def test_a_key_beat_per_cycle(case, tmp_path):
    spec, built = core(*case)
    for scope in Scope:
        streams = segments(spec, scope, adversarial=False, tokens=(1024, 1000, 1024))
        run = run_core(tmp_path, *built, streams, scope)
        assert run.out == streams.out
        assert run.key_cycles == len(streams.keys)


# One bit of an addend; one bit of a token's exponent.
@pytest.mark.parametrize(("stream", "byte"), [("load", 1), ("keys", 0)])
def test_a_flipped_bit_shows(stream, byte, tmp_path):
    spec, built = core(*CORES[-1])
    streams = segments(spec, Scope.LAYER, adversarial=False)
    beat = getattr(streams, stream)[0].copy()
    beat[byte] ^= 0x10
    getattr(streams, stream)[0] = beat
    assert run_core(tmp_path, *built, streams).out != streams.out
