# SPDX-License-Identifier: Apache-2.0
"""Faults in the HLS C++, tried in kernels compiled with g++; each costs one build at most."""

from __future__ import annotations

from mutants.mutant import Mutant

_HLS = "hw/hls"
_EXECUTIONS = "tests/hw/test_executions.py"
_SMALLEST = "csim-smollm2-135m"
_WRITES = "tests/hw/test_write_order.py"
_DEPTHS = "tests/hw/test_hls_lint.py"
_SKEW = "tests/hw/test_skew.py"


def _scored(*cases: str, mode: str = "int4-weight_sum") -> tuple[str, ...]:
    """Return cases of scoring in compiled C++, all of one build."""
    return tuple(
        f"{_EXECUTIONS}::test_scores_are_equal[{_SMALLEST}-{mode}-{case}]" for case in cases
    )


def _coded(*cases: str, mode: str = "int4") -> tuple[str, ...]:
    """Return cases of making shadows in compiled C++, all of one build."""
    return tuple(
        f"{_EXECUTIONS}::test_shadows_are_equal[{_SMALLEST}-{mode}-{case}]" for case in cases
    )


HLS: tuple[Mutant, ...] = (
    # These lived until the order of writes, the depth of `centred` and the corner had tests.
    Mutant(
        "hls-status-before-scores",
        "A status beat is written before the scores of the block that it counts.",
        f"{_HLS}/write_scores.h",
        """                for (uint32_t b = 0; b < block; ++b) {
#pragma HLS PIPELINE II=1
                    scores[start + b] = score_beats.read();
                }
            }
            done += block;
            const uint32_t tokens = done == beats ? c.tokens : done * TUPLES_PER_BEAT;
            status[segment] = status_beat(launch_id, tokens, ERROR_NONE);
""",
        """                done += block;
                const uint32_t tokens = done == beats ? c.tokens : done * TUPLES_PER_BEAT;
                status[segment] = status_beat(launch_id, tokens, ERROR_NONE);
                for (uint32_t b = 0; b < block; ++b) {
#pragma HLS PIPELINE II=1
                    scores[start + b] = score_beats.read();
                }
                continue;
            }
            done += block;
            const uint32_t tokens = done == beats ? c.tokens : done * TUPLES_PER_BEAT;
            status[segment] = status_beat(launch_id, tokens, ERROR_NONE);
""",
        (f"{_WRITES}::test_a_status_beat_comes_after_what_it_counts[layer]",),
    ),
    Mutant(
        "hls-status-left-out",
        "Of a segment's blocks only the last one has a status beat.",
        f"{_HLS}/write_scores.h",
        "status[segment] = status_beat(launch_id, tokens, ERROR_NONE);",
        "if (done == beats) status[segment] = status_beat(launch_id, tokens, ERROR_NONE);",
        (f"{_WRITES}::test_a_status_beat_per_block[layer]",),
    ),
    Mutant(
        "hls-shadow-status-before-exponents",
        "A status beat of a shadow is written before the exponents of the group that it counts.",
        f"{_HLS}/write_shadow.h",
        """            for (int b = 0; b < KV_HEADS; ++b) {
#pragma HLS PIPELINE II=1
                shadow[exponent_place + b] = exponent_beats.read();
            }
            exponent_place += GROUP_BEATS;
            done += tokens;
            if (done < c.tokens && done - counted >= uint32_t(BLOCK_TOKENS)) {
                counted = done;
                status[segment] = status_beat(launch_id, done, ERROR_NONE);
            }
""",
        """            done += tokens;
            if (done < c.tokens && done - counted >= uint32_t(BLOCK_TOKENS)) {
                counted = done;
                status[segment] = status_beat(launch_id, done, ERROR_NONE);
            }
            for (int b = 0; b < KV_HEADS; ++b) {
#pragma HLS PIPELINE II=1
                shadow[exponent_place + b] = exponent_beats.read();
            }
            exponent_place += GROUP_BEATS;
""",
        (f"{_WRITES}::test_a_status_beat_comes_after_what_it_counts[make_shadow]",),
    ),
    Mutant(
        "hls-shadow-status-left-out",
        "A segment of a shadow has one status beat, at its end.",
        f"{_HLS}/write_shadow.h",
        "if (done < c.tokens && done - counted >= uint32_t(BLOCK_TOKENS)) {",
        "if (done < c.tokens && done - counted >= uint32_t(SEGMENT_TOKENS)) {",
        (f"{_WRITES}::test_a_status_beat_per_block[make_shadow]",),
    ),
    Mutant(
        "hls-centred-too-shallow",
        "Centred beats have room for an exponent a few stages late: 7 of them at 64 channels.",
        f"{_HLS}/score_tokens.cpp.j2",
        "variable=centred depth=64",
        "variable=centred depth={{ spec.padded_head_dim // 8 }}",
        (f"{_DEPTHS}::test_centred_beats_wait_for_an_exponent_that_comes_stages_later",),
    ),
    Mutant(
        "hls-shadow-centred-too-shallow",
        "As above, where a shadow is made.",
        f"{_HLS}/make_shadow.cpp.j2",
        "variable=centred depth=64",
        "variable=centred depth={{ spec.padded_head_dim // 8 }}",
        (f"{_DEPTHS}::test_centred_beats_wait_for_an_exponent_that_comes_stages_later",),
    ),
    Mutant(
        "hls-align-corner",
        "An aligned product of exactly -2^23 is not limited.",
        f"{_HLS}/rules.h",
        "(wide < -LIMIT ? ap_int<24>(-LIMIT)",
        "(wide < -LIMIT - 1 ? ap_int<24>(-LIMIT)",
        _scored("layer-saturated_products", mode="int2-raw_sum"),
    ),
    # What the synthesis tool would refuse, or pipeline otherwise than it says.
    Mutant(
        "hls-free-running",
        "A loop that polls asks for a free-running pipeline.",
        f"{_HLS}/dot.h",
        """    // recurrence: partial sums of a tile, one 23-bit addition; distance 1
    while (open) {
#pragma HLS PIPELINE II=1 style=stp
""",
        """    // recurrence: partial sums of a tile, one 23-bit addition; distance 1
    while (open) {
#pragma HLS PIPELINE II=1 style=frp
""",
        (f"{_DEPTHS}::test_no_preset_has_findings[smollm2-135m]",),
    ),
    Mutant(
        "hls-round-waits",
        "A round waits for its sum, with results of the rounds before it in the pipeline.",
        f"{_HLS}/score.h",
        "if (!has_sum) has_sum = sums.read_nb(coming_sum);",
        """if (!has_sum && left != 0) {
            coming_sum = sums.read();
            has_sum = true;
        }""",
        (f"{_DEPTHS}::test_no_preset_has_findings[smollm2-135m]",),
    ),
    Mutant(
        "hls-distance-too-far",
        "Three rounds are said to lie between a write of statistics and its read.",
        f"{_HLS}/cast.h",
        "#pragma HLS DEPENDENCE variable=even type=inter direction=RAW distance=2",
        "#pragma HLS DEPENDENCE variable=even type=inter direction=RAW distance=3",
        (f"{_DEPTHS}::test_no_preset_has_findings[smollm2-135m]",),
    ),
    Mutant(
        "hls-halves-met",
        "A segment starts in the round that takes its last query, whose half is still the other.",
        f"{_HLS}/score.h",
        "if (told && (c.end || loaded == KV_HEADS)) {",
        "if (told && (c.end || loaded >= KV_HEADS - 1)) {",
        (f"{_SKEW}::test_no_delay_of_a_stream_changes_a_bit_or_ends_in_a_deadlock[int4-3]",),
    ),
    Mutant(
        "hls-centred-of-8",
        "Centred beats have room for 8, which is enough as long as nothing has stages.",
        f"{_HLS}/make_shadow.cpp.j2",
        "variable=centred depth=64",
        "variable=centred depth=8",
        (f"{_SKEW}::test_an_exponent_may_come_as_late_as_a_delay_can_be[int4]",),
    ),
    Mutant(
        "hls-linear-rows",
        "The linear reader takes rows with gaps for rows without.",
        f"{_HLS}/read_linear.h",
        "first += c.stride;",
        "first += beats;",
        ("tests/hw/test_key_reader.py::test_it_gives_the_same_scores[layouts]",),
    ),
    # These were caught before.
    Mutant(
        "hls-exponents-too-shallow",
        "The exponents of a group with many KV heads do not fit their FIFO.",
        f"{_HLS}/score_tokens.cpp.j2",
        "variable=exponent_beats depth={{ spec.kv_heads + 8 }}",
        "variable=exponent_beats depth=8",
        (f"{_DEPTHS}::test_exponents_of_a_whole_group_fit_their_fifo",),
    ),
    Mutant(
        "hls-align-rounds-down",
        "Alignment drops the bits behind the point and does not round.",
        f"{_HLS}/rules.h",
        "const ap_int<25> rounding = ap_int<25>(1) << (right - 1);",
        "const ap_int<25> rounding = 0;",
        _scored("kv_head-anything"),
    ),
    Mutant(
        "hls-align-not-limited",
        "An aligned product above the limit keeps its low bits.",
        f"{_HLS}/rules.h",
        "return wide > LIMIT ? ap_int<24>(LIMIT)",
        "return wide > 2 * LIMIT ? ap_int<24>(LIMIT)",
        _scored("layer-saturated_products", mode="int2-raw_sum"),
    ),
    Mutant(
        "hls-weight-limit",
        "Weights are limited from 2^25 on, not from 2^24.",
        f"{_HLS}/rules.h",
        "if (integer >= 24) return ~Total(0);",
        "if (integer > 24) return ~Total(0);",
        (
            f"{_EXECUTIONS}::test_scores_are_equal"
            "[csim-threads-half-beat-int4-weight_sum-layer-steps_of_weight]",
        ),
    ),
    Mutant(
        "hls-sum-not-limited",
        "A sum of weights is not limited to 48 bits.",
        f"{_HLS}/rules.h",
        "return sum.range(51, 48) != 0 ? ~Total(0) : Total(sum);",
        "return Total(sum);",
        _scored("kv_head-anything", "layer-every_code"),
    ),
    Mutant(
        "hls-accumulator-not-cleared",
        "The sum of a KV head starts from that of the head before.",
        f"{_HLS}/dot.h",
        "slice == 0 ? HeadSum(0) : partial[i][r]",
        "word == 0 ? HeadSum(0) : partial[i][r]",
        _scored("kv_head-anything"),
    ),
    Mutant(
        "hls-total-not-cleared",
        "In scope kv_head the total of a KV head starts from that of the head before.",
        f"{_HLS}/score.h",
        "head_step == 0 && (per_kv_head || kv_head == 0);",
        "head_step == 0 && kv_head == 0;",
        _scored("kv_head-anything"),
    ),
    Mutant(
        "hls-invalid-lost",
        "A token is valid where the key of its last KV head is.",
        f"{_HLS}/score.h",
        "invalid[i] = bad || (!starts_total && invalid[i]);",
        "invalid[i] = bad;",
        _scored("layer-invalid"),
    ),
    Mutant(
        "hls-segment-starts-within-group",
        "A segment behind a short group is taken apart as if that group went on.",
        f"{_HLS}/split.h",
        """                left = c.rounds;
                within = 0;
""",
        """                left = c.rounds;
""",
        _scored("layer-sequences"),
    ),
    Mutant(
        "hls-segment-end-lost",
        "The last tuples of a segment stay where they are unless they fill a beat.",
        f"{_HLS}/tuples.h",
        "const bool last_tile = left <= arrays;",
        "const bool last_tile = left < arrays;",
        _scored("layer-sequences"),
    ),
    Mutant(
        "hls-stale-tuples",
        "Tuples behind the last token hold codes.",
        f"{_HLS}/tuples.h",
        "counted ? code : ap_uint<16>(0);",
        "code;",
        _scored("layer-sequences"),
    ),
    Mutant(
        "hls-ties-up",
        "A key code at a tie rounds up though the one below is even.",
        f"{_HLS}/cast.h",
        "doubled[0] && (rest || floor[0]);",
        "doubled[0];",
        _coded("layouts"),
    ),
    Mutant(
        "hls-code-not-limited",
        "A key code that rounds up past the largest one wraps.",
        f"{_HLS}/cast.h",
        "return rounded > LIMIT ? ap_int<26>(LIMIT)",
        "return rounded > LIMIT + 1 ? ap_int<26>(LIMIT)",
        _coded("every_code"),
    ),
    Mutant(
        "hls-centre-not-limited",
        "A key far above its channel's mean is not limited to 24 bits.",
        f"{_HLS}/cast.h",
        "shifted > LIMIT ? ap_uint<24>(LIMIT) : shifted;",
        "shifted;",
        _coded("every_code"),
    ),
    Mutant(
        "hls-nan-lost",
        "A NaN counts only where it lies in the last beat of its head.",
        f"{_HLS}/cast.h",
        "const bool nan_low = nan_before || nan[0];",
        "const bool nan_low = nan[0];",
        _coded("invalid", mode="int8"),
    ),
    Mutant(
        "hls-stale-tile",
        "Padding tokens of a tile hold what an earlier tile left there.",
        f"{_HLS}/tiles.h",
        "i < leaving_tokens ? lane : Lane(0);",
        "lane;",
        _coded("layouts"),
    ),
    # A lost wake-up of the bench looked like a deadlock of the kernel, on a busy machine alone.
    Mutant(
        "threads-sleep-beside-data",
        "A simulated process goes to sleep though a stream that it polls has got data.",
        "hw/testbench/threads/hls_stream.h",
        "        if (polling.has_missed()) return polling.forget();\n",
        "",
        ("tests/hw/test_csim.py::test_data_that_come_between_two_polls_are_no_deadlock",),
    ),
    Mutant(
        "changed-template-not-read",
        "A template that changes while a process runs is rendered as it was.",
        "tools/hillinfer_hw/render.py",
        'return path.is_file() and path.read_text(encoding="utf-8") == text',
        "return True",
        ("tests/hw/test_render.py::test_a_template_that_changed_is_read_anew",),
    ),
)
