# SPDX-License-Identifier: Apache-2.0
"""Launches with known bytes: every number here was worked out by hand from the contract."""

from dataclasses import replace

import numpy as np
import pytest
from golden_inputs import bit_flipped

from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.golden_launch import run_score_launch, run_shadow_launch
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.launch import Descriptor, ScoreLaunch, ShadowLaunch

NOTHING = np.zeros((0, 64), dtype=np.uint8)
# One KV head of 64 channels and one query head: an exponent beat, then four beats per tile.
SPEC = KernelSpec(64, 1, 1, key_mode=KeyMode.INT8, rule=Rule.RAW_SUM)


def filled(beats, byte=0xC3):
    return np.full((beats, 64), byte, dtype=np.uint8)


def score_launch(**changes):
    """Three tokens, score codes 32768 + 2·k for k in 5, -3 and an invalid one, and 7 added."""
    shadow = np.zeros((7, 64), dtype=np.uint8)
    # t = 6 and s = 0 align by 2^0; the third token is invalid.
    shadow[2, :3] = (6, 6, 255)
    # Channel 16 of each token: byte 0, 16 and 32 of the second slice's beat.
    shadow[4, 0], shadow[4, 16], shadow[4, 32] = 5, 256 - 3, 77
    queries = np.zeros((6, 64), dtype=np.uint8)
    queries[0, 0] = 7
    queries[1, 0] = 0
    queries[2, 16] = 2
    # Kernels do not look at spare bytes of a query block.
    queries[0, 4:], queries[1, 1:] = 0xEE, 0xEE
    descriptor = Descriptor(shadow=2, query=0, score=1, base_position=0x3FC00, tokens=3)
    own = ScoreLaunch(descriptor.pack(), shadow, NOTHING, queries, filled(3), 0, 0x01020304)
    return replace(own, **changes)


def test_a_score_launch_has_its_known_bytes():
    result = run_score_launch(SPEC, score_launch())
    expected = filled(3)
    expected[1] = 0
    # V = 2·5 + 7 = 17 and 2·(-3) + 7 = 1; positions 0xFC00.. of the window.
    words = [(32768 + 17) << 16 | 0xFC00, (32768 + 1) << 16 | 0xFC01, 0xFC02]
    expected[1, :12] = np.array(words, dtype="<u4").view(np.uint8)
    assert np.array_equal(result.output, expected)
    assert result.status.tobytes() == (
        SPEC.digest()[:8] + bytes.fromhex("040302010300000000000000") + bytes(44)
    )
    for name, place, bit in (
        ("shadow", (4, 16), 0),
        ("shadow", (2, 2), 0),
        ("queries", (2, 16), 1),
        ("queries", (0, 1), 2),
        ("segments", (0, 25), 2),
    ):
        launch = score_launch()
        flip = replace(launch, **{name: bit_flipped(getattr(launch, name), place, bit)})
        assert not np.array_equal(run_score_launch(SPEC, flip).output, expected)


def test_the_launch_itself_stays_as_it_was():
    launch = score_launch()
    run_score_launch(SPEC, launch)
    assert np.array_equal(launch.scores, filled(3))


def shadow_launch(**changes):
    """65 tokens of two heads of 64 channels, INT4, in rows of 5 beats; only four are keys."""
    rows = filled(2 + 65 * 5, 0x7E)
    keys = np.zeros((65, 128), dtype=np.float16)
    # With c = 0 and M = 0 a key x is D = 2^14·x: 7 gives D = 7·2^14, L = 17, t = 14, code 7.
    keys[0, 1] = 7
    keys[64, 127] = -0.5
    rows[2:].reshape(65, 320)[:, :256] = keys.view(np.uint8).reshape(65, 256)
    rows[2 + 5 * 3, 0:2] = (0x01, 0x7C)
    statistics = np.zeros((8, 64), dtype=np.uint8)
    descriptor = Descriptor(
        shadow=1, query=2, score=0, base_position=0, tokens=65, row_stride=5, statistics=0
    )
    own = ShadowLaunch(descriptor.pack(), rows, statistics, filled(80), 9)
    return replace(own, **changes)


def test_a_shadow_launch_has_its_known_bytes():
    spec = KernelSpec(64, 2, 1, key_mode=KeyMode.INT4)
    result = run_shadow_launch(spec, shadow_launch())
    expected = filled(80)
    # A group of 2 + 8 tiles · 2 · 4 = 66 beats, then 2 exponent beats and one tile of 8.
    expected[1 : 1 + 66 + 2 + 8] = 0
    expected[1, 0] = 14
    expected[1 + 2, 0] = 0x70
    expected[1, 3] = 255
    # -0.5: D = -2^13, L = 14, t = 11, code -4; channel 63 of head 1, slice 3, token 0 of its tile.
    expected[1 + 66 + 1, 0] = 11
    expected[1 + 66 + 2 + 7, 7] = 0xC0
    assert np.argwhere(result.output != expected).tolist() == []
    assert result.status[0, 8:20].tobytes().hex() == "090000004100000000000000"
    flip = shadow_launch(rows=bit_flipped(shadow_launch().rows, (2, 3), 7))
    assert not np.array_equal(run_shadow_launch(spec, flip).output, expected)


@pytest.mark.parametrize(
    ("place", "error"),
    [((1, 44), 3), ((1, 63), 3), ((1, 24), 1), ((1, 36), 1), ((1, 40), 1), ((1, 48), 1)],
)
def test_a_wrong_descriptor_ends_a_launch(place, error):
    sound = score_launch().segments
    segments = bit_flipped(np.concatenate([sound, sound, sound]), place, 0)
    result = run_score_launch(SPEC, score_launch(segments=segments))
    one = run_score_launch(SPEC, score_launch())
    assert np.array_equal(result.output, one.output)
    assert np.array_equal(result.status[0], one.status[0])
    assert result.status[1, 8:20].tobytes().hex() == f"04030201000000000{error}000000"
    assert np.all(result.status[2] == 0xA5)


def test_a_reserved_field_is_reported_before_a_wrong_value():
    segments = bit_flipped(bit_flipped(score_launch().segments, (0, 44), 0), (0, 24), 0)
    assert run_score_launch(SPEC, score_launch(segments=segments)).status[0, 16] == 3


def test_an_unknown_scope_is_a_wrong_descriptor():
    result = run_score_launch(SPEC, score_launch(scope=2))
    assert result.status[0, 12:20].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]
    assert np.array_equal(result.output, filled(3))
    assert run_score_launch(SPEC, score_launch(scope=2, segments=NOTHING)).status.size == 0


def test_what_no_kernel_could_be_given_is_refused():
    for change in ({"scope": -1}, {"launch_id": 2**32}, {"scores": filled(1)[0]}):
        with pytest.raises(ValueError, match=next(iter(change))):
            score_launch(**change)
    with pytest.raises(ValueError, match="rows"):
        shadow_launch(rows=filled(1).astype(np.int8))
    with pytest.raises(ValueError, match="do not lie in scores"):
        run_score_launch(SPEC, score_launch(scores=filled(1)))
    with pytest.raises(ValueError, match="statistics"):
        run_score_launch(SPEC, score_launch(statistics=filled(1)))
    with pytest.raises(ValueError, match="fp16"):
        run_shadow_launch(replace(SPEC, key_mode=KeyMode.FP16), shadow_launch())
