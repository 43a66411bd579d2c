# SPDX-License-Identifier: Apache-2.0
"""What the C++ simulation finds besides wrong results: FIFOs, leftovers, stray writes."""

import os
from dataclasses import replace

import numpy as np
import pytest
from executions import csim, small_spec
from launch_cases import random_launch, random_shadow_launch

from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.golden_launch import run_score_launch
from hillinfer_model.kernel_spec import KernelSpec, ProductStyle


def threads(**depths):
    return replace(csim("threads")(), depths=depths)


def error_type():
    csim("threads")()
    from hillinfer_hw.csim import CsimError

    return CsimError


def cast_launch(tokens):
    """FP16 heads of 80 channels: two and a half beats, so that the third tells the exponent."""
    spec = small_spec("half-beat", KeyMode.FP16, Rule.WEIGHT_SUM)
    return spec, random_launch(spec, Scope.LAYER, tokens)


def assert_equal(found, expected):
    assert np.array_equal(found.output, expected.output)
    assert np.array_equal(found.status, expected.status)


def test_a_fifo_that_is_too_shallow_deadlocks_and_is_named():
    spec, launch = cast_launch([20, 3])
    with pytest.raises(error_type(), match=r"DEADLOCK.* centred is full \(1 of 1") as error:
        threads(centred=1).score(spec, launch)
    assert "exponents_to_round is empty" in str(error.value)


def test_one_place_more_is_enough():
    spec, launch = cast_launch([20, 3])
    found = threads(centred=2).score(spec, launch)
    assert_equal(found, run_score_launch(spec, launch))


def test_a_kernel_runs_again_after_a_deadlock():
    spec, launch = cast_launch([20, 3])
    shallow = threads(centred=1)
    for _ in range(2):
        with pytest.raises(error_type(), match="DEADLOCK"):
            shallow.score(spec, launch)
    # Nothing is in the FIFOs when no segment has tokens.
    empty = random_launch(spec, Scope.LAYER, [0, 0])
    assert_equal(shallow.score(spec, empty), run_score_launch(spec, empty))


def test_many_empty_segments_do_not_block_the_ones_around_them():
    """More empty segments than a command FIFO holds, between two that are computed."""
    spec, launch = cast_launch([20, *[0] * 12, 3, *[1] * 9])
    assert_equal(threads().score(spec, launch), run_score_launch(spec, launch))


def test_a_write_beside_a_buffer_is_an_error():
    """The last segment's scores point behind the buffer, which a kernel cannot know."""
    spec, launch = cast_launch([16])
    beats = launch.scores.shape[0]
    segments = launch.segments.copy()
    segments[0, 16:24] = np.frombuffer(beats.to_bytes(8, "little"), dtype=np.uint8)
    with pytest.raises(error_type(), match="a write beside the output buffer"):
        csim("sequential")().score(spec, replace(launch, segments=segments))


@pytest.mark.parametrize(
    ("write", "said"),
    [("", "read while empty"), ("s.write(1); s.write(2);", "leftover data")],
)
def test_what_a_stream_complains_about_is_an_error(write, said):
    """The vendor's streams complain on standard output; the simulation must hear it."""
    csim("sequential")()
    import ctypes

    from hillinfer_hw.csim import stdout_of_libraries
    from hillinfer_hw.csim_build import compile_sources

    source = (
        "#include <hls_stream.h>\n"
        f'extern "C" void talk() {{ hls::stream<int> s("s"); {write} s.read(); }}\n'
    )
    library = ctypes.CDLL(str(compile_sources("talk.cpp", {"talk.cpp": source}, [])))
    with stdout_of_libraries() as heard:
        library.talk()
    assert said in heard[0]


def test_what_others_print_during_a_launch_is_no_complaint(capfd):
    """Another thread may be telling an answer; so may the streams of a library afterwards."""
    csim("sequential")()
    import ctypes

    from hillinfer_hw.csim import stdout_of_libraries
    from hillinfer_hw.csim_build import compile_sources

    source = (
        '#include <hls_stream.h>\nextern "C" void talk() { hls::stream<int> s("s"); s.read(); }\n'
    )
    library = ctypes.CDLL(str(compile_sources("talk.cpp", {"talk.cpp": source}, [])))
    with stdout_of_libraries() as heard:
        os.write(1, b"an answer\n")
    assert heard == []
    assert capfd.readouterr().out == "an answer\n"
    with stdout_of_libraries() as heard:
        os.write(1, b"an answer\n")
        library.talk()
    assert "read while empty" in heard[0]
    assert "an answer" not in heard[0]
    assert capfd.readouterr().out == "an answer\n"
    library.talk()
    assert "read while empty" in capfd.readouterr().out


# A process polls two streams in turn. Once it has nearly polled in vain often enough to wait, both
# places of the first are filled behind its back, and whoever fills them waits for a third.
TWO_POLLED = """
#include <atomic>
#include <hls_stream.h>
static std::atomic<bool> may_fill{false};
static_assert(hls_threads::IDLE_POLLS % 2 == 0, "or the poll that is one too many is of the first");
static void fill(hls::stream<int> &first, hls::stream<int> &done) {
    while (!may_fill) std::this_thread::yield();
    for (int i = 0; i < 3; ++i) first.write(i);
    done.write(1);
}
static bool filler_waits() {
    std::lock_guard<std::mutex> lock(hls_threads::Region::current().mutex);
    return hls_threads::Region::current().waiting == 1;
}
extern "C" int poll_two(int leaves_first) {
    may_fill = false;
    int found = 0;
    {
        hls::stream<int> first("first"), second("second"), done("done");
        auto poll = [&] {
            int value;
            size_t polls = second.read_nb(value) ? 0 : 1;
            for (; found < 3; polls += 2) {
                if (!(leaves_first && may_fill) && first.read_nb(value)) ++found;
                // The next poll in vain is one too many.
                if (polls + 1 == hls_threads::IDLE_POLLS && !may_fill) {
                    may_fill = true;
                    while (!filler_waits()) std::this_thread::yield();
                }
                second.read_nb(value);
            }
            done.read();
        };
        PROCESS(fill(first, done));
        PROCESS(poll());
    }
    return found;
}
"""
DEPTHS = """#pragma once
struct StreamDepth { const char *name; int depth; };
static const StreamDepth STREAM_DEPTHS[] = {{"first", 2}, {"second", 2}, {"done", 2}};
"""


@pytest.mark.parametrize(("leaves_first", "found", "is_dead"), [(0, 3, False), (1, 0, True)])
def test_data_that_come_between_two_polls_are_no_deadlock(leaves_first, found, is_dead):
    """Of a process that does not poll that stream any more, they are one."""
    csim("threads")()
    import ctypes

    from hillinfer_hw.csim import stdout_of_libraries
    from hillinfer_hw.csim_build import THREADS, compile_sources

    sources = {"polls.cpp": TWO_POLLED, "stream_depths.h": DEPTHS}
    flags = [f"-I{THREADS}", "-pthread"]
    library = ctypes.CDLL(str(compile_sources("polls.cpp", sources, flags)))
    with stdout_of_libraries() as heard:
        assert library.poll_two(leaves_first) == found
    assert ("DEADLOCK" in "".join(heard)) == is_dead


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize(
    ("mode", "style"),
    [
        (KeyMode.INT8, ProductStyle.LUT),
        (KeyMode.INT4, ProductStyle.DSP),
        (KeyMode.INT2, ProductStyle.DSP),
        (KeyMode.FP16, ProductStyle.LUT),
    ],
)
def test_the_other_product_style_gives_the_same_scores(mode, style, scope):
    spec = KernelSpec(64, 1, 3, key_mode=mode, product_style=style, segment_tokens=512)
    launch = random_launch(spec, scope, [70, 9])
    assert_equal(csim("sequential")().score(spec, launch), run_score_launch(spec, launch))


def test_score_blocks_shorter_than_a_segment():
    spec = KernelSpec(64, 2, 1, segment_tokens=512, block_tokens=32)
    launch = random_launch(spec, Scope.LAYER, [100, 512, 31])
    assert_equal(csim("sequential")().score(spec, launch), run_score_launch(spec, launch))


def test_shadows_of_many_short_segments_with_many_heads():
    """Exponents of two segments wait at once; a FIFO that holds one segment's only deadlocks."""
    spec = KernelSpec(64, 24, 1, key_mode=KeyMode.INT4, segment_tokens=512)
    launch = random_shadow_launch(spec, [1] * 5 + [65, 1, 1], 5)
    from hillinfer_model.golden_launch import run_shadow_launch

    assert_equal(threads().make_shadow(spec, launch), run_shadow_launch(spec, launch))
    with pytest.raises(error_type(), match=r"exponent_beats is full \(4 of 4"):
        threads(exponent_beats=4, exponents_to_keep=8).make_shadow(spec, launch)


def test_the_last_tile_leaves_though_no_other_segment_comes():
    """More empty segments than a command FIFO holds, behind one whose last tile waits to leave."""
    from hillinfer_model.golden_launch import run_shadow_launch

    spec = small_spec("half-beat", KeyMode.INT4, Rule.WEIGHT_SUM)
    launch = random_shadow_launch(spec, [20, *[0] * 12, 3], 6)
    assert_equal(threads().make_shadow(spec, launch), run_shadow_launch(spec, launch))


MUTANTS_OF_READING = {
    "one burst too many": (
        "BURSTS_UNDER_WAY = 16",
        "BURSTS_UNDER_WAY = 17",
        "16 others are under way",
    ),
    "pages of 8 KiB": ("BURST_BEATS = 64", "BURST_BEATS = 128", "not between 1 and 64 beats"),
    "bursts of 64 from anywhere": (
        "ap_uint<7>(stop - offset % BURST_BEATS + 1)",
        "BURST_BEATS",
        "crosses 4 KiB",
    ),
    "a beat nobody asked for": (
        "memory.read_request(next.offset, next.beats)",
        "memory.read_request(next.offset, (next.beats + 1) / 2)",
        "no burst was requested for",
    ),
    "a beat too many": (
        "memory.read_request(next.offset, next.beats)",
        "memory.read_request(next.offset, next.beats + (next.beats != 64))",
        "(leaves the buffer|never read to its end)",
    ),
}


@pytest.mark.parametrize("name", MUTANTS_OF_READING)
def test_a_wrong_burst_is_an_error(name):
    """One run of several pages, then rows with gaps, many and short."""
    execution = csim("sequential")()
    from hillinfer_hw.csim_build import HLS, compile_sources, rendered_sources

    right, wrong, said = MUTANTS_OF_READING[name]
    spec = small_spec("two-heads", KeyMode.FP16, Rule.RAW_SUM)
    launches = [random_launch(spec, Scope.LAYER, [37, 50], extra_beats=extra) for extra in (0, 1)]

    def run_all(execution):
        for launch in launches:
            assert_equal(execution.score(spec, launch), run_score_launch(spec, launch))

    def build_mutant(kernel, spec, scheduling):
        header = (HLS / "read_keys.h").read_text(encoding="utf-8")
        assert header.count(right) == 1
        sources = rendered_sources(kernel, spec) | {"read_keys.h": header.replace(right, wrong)}
        return compile_sources(f"{kernel}.cpp", sources, [])

    run_all(execution)
    with pytest.raises(error_type(), match=said):
        run_all(replace(execution, build=build_mutant))
