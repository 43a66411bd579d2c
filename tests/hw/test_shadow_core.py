# SPDX-License-Identifier: Apache-2.0
"""The datapath of make_shadow alone: rows in, shadow beats out."""

import numpy as np
import pytest
from core_streams import NO_STALLS, Streams, add_shadow_segment, core_case, make_spec, run_core

from hillinfer_hw.synth import core_parameters

CORES = [(80, 3, "int4"), (64, 2, "int8"), (96, 1, "int2")]
STALLS = [NO_STALLS, (30, 30, 30, 30), (0, 0, 0, 80), (0, 0, 70, 0), (95, 0, 0, 0)]
TOKENS = (1, 64, 3, 200, 16, 65, 5, 17, 1, 1, 1, 130)


def core(head_dim, kv, mode):
    spec = make_spec(head_dim, kv, 1, mode, "raw_sum", "dsp")
    return spec, core_case("shadow_core", core_parameters(spec, "make_shadow"))


def segments(spec, adversarial, seed=0, tokens=TOKENS):
    rng = np.random.default_rng(seed)
    streams = Streams()
    for count in tokens:
        add_shadow_segment(streams, rng, spec, count, adversarial)
    return streams


@pytest.mark.parametrize("case", CORES, ids=lambda case: "-".join(map(str, case)))
def test_every_beat_is_golden(case, tmp_path):
    spec, built = core(*case)
    for number, stalls in enumerate([*STALLS, *STALLS]):
        streams = segments(spec, adversarial=number % 3 > 0, seed=number)
        run = run_core(tmp_path, *built, streams, stalls=stalls, seed=number + 1)
        assert run.changed_while_waiting == 0
        assert run.out == streams.out, stalls


@pytest.mark.parametrize("case", CORES, ids=lambda case: "-".join(map(str, case)))
def test_a_key_beat_per_cycle(case, tmp_path):
    spec, built = core(*case)
    streams = segments(spec, adversarial=False, tokens=(1024, 1024))
    run = run_core(tmp_path, *built, streams)
    assert run.out == streams.out
    # Statistics of the second segment are read while the first is computed: no beat waits.
    assert run.key_cycles == len(streams.keys)


@pytest.mark.parametrize("stream", ["load", "keys"])
def test_a_flipped_bit_shows(stream, tmp_path):
    spec, built = core(*CORES[1])
    streams = segments(spec, adversarial=False, seed=1)
    # The first token's first head must not be invalid, or its codes are 0 whatever its keys.
    assert next(content for content, beat, _ in streams.out if beat == 0)[0] != 255
    beat = getattr(streams, stream)[0].copy()
    # A high bit of a mean; the sign of a key.
    beat[1] ^= 0x80
    getattr(streams, stream)[0] = beat
    assert run_core(tmp_path, *built, streams).out != streams.out
