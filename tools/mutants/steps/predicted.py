# SPDX-License-Identifier: Apache-2.0
"""Faults in predicted queries: hooks, norms, and what is chosen ahead of a layer's turn."""

from __future__ import annotations

from mutants.mutant import Mutant

_TESTS = "tests/host"

PREDICTED: tuple[Mutant, ...] = (
    Mutant(
        "hook-of-the-layer-before",
        "A query hook predicts with the weights of the layer that it stands on.",
        "host/hillinfer/hf/hooks.py",
        "before, following = layers[number - 1 : number + 1]",
        "before = following = layers[number - 1]",
        (
            f"{_TESTS}/hf/test_query_prediction.py::test_behind_a_layer_that_adds_nothing_the_prediction_is_the_query",
        ),
    ),
    Mutant(
        "query-of-the-other-norm",
        "A query is predicted behind the norm of the feed-forward part.",
        "host/hillinfer/hf/hooks.py",
        "norm: Any = layer.input_layernorm",
        "norm: Any = layer.post_attention_layernorm",
        (
            f"{_TESTS}/hf/test_query_prediction.py::test_of_a_layers_own_input_the_very_query_is_made",
        ),
    ),
    Mutant(
        "query-of-the-other-norm-opt",
        "A query of OPT is predicted behind the norm of the feed-forward part.",
        "host/hillinfer/hf/hooks.py",
        "layer.self_attn_layer_norm(hidden)",
        "layer.final_layer_norm(hidden)",
        (
            f"{_TESTS}/hf/test_query_prediction.py::test_of_a_layers_own_input_the_very_query_is_made",
        ),
    ),
    Mutant(
        "query-with-the-norm-of-keys",
        "A query of Qwen3 is predicted with the norm of its keys.",
        "host/hillinfer/hf/hooks.py",
        "attention.q_norm(query)",
        "attention.k_norm(query)",
        (
            f"{_TESTS}/hf/test_query_prediction.py::test_of_a_layers_own_input_the_very_query_is_made",
        ),
    ),
    Mutant(
        "query-kept-at-a-groups-end",
        "A predicted query is kept though the token that comes begins a group or fills one.",
        "host/hillinfer/engine/decode_step.py",
        "is_inside = 0 < past % GROUP_TOKENS < GROUP_TOKENS - 1",
        "is_inside = True",
        (
            f"{_TESTS}/engine/test_choice_aside.py::test_where_a_group_or_a_segment_ends_tokens_are_chosen_at_once",
        ),
    ),
    Mutant(
        "query-kept-after-cold-rows",
        "A predicted query is kept for its layer's turn though rows may have to be read before.",
        "host/hillinfer/engine/decode_step.py",
        "            or self._newest_step < self._calls.aside_from\n",
        "",
        (
            f"{_TESTS}/engine/test_choice_aside.py::test_where_rows_were_cold_a_query_is_computed_at_once",
        ),
    ),
    Mutant(
        "kept-query-by-another-sequences-length",
        "What is chosen by a kept query is as much as for the sequence that was announced last.",
        "host/hillinfer/engine/decode_step.py",
        "        if self._before.of != asked:\n            past, lacking, _ = asked",
        "        if self._before.of is None:\n            past, lacking, _ = asked",
        (
            f"{_TESTS}/engine/test_joined_step.py::test_rows_together_have_the_bits_sets_and_counts_of_rows_alone",
        ),
    ),
    Mutant(
        "chosen-aside-and-read-too-late",
        "What another thread chose is not read before its layer wants it.",
        "host/hillinfer/engine/runtime.py",
        "        self._pipeline.read_on()\n",
        "",
        (
            f"{_TESTS}/engine/test_choice_aside.py::"
            "test_what_is_cold_of_a_choice_aside_is_read_while_the_layer_before_attends",
        ),
    ),
    Mutant(
        "next-layers-error-is-told-now",
        "A layer ends with what went wrong while tokens of the next one were chosen.",
        "host/hillinfer/engine/selection.py",
        "            except Exception as error:\n                ahead.set_exception(error)\n"
        "            self._ahead[key] = ahead\n            del",
        "            except KeyError:\n                pass\n            del",
        (
            f"{_TESTS}/engine/test_choice_aside.py::test_a_query_that_is_not_finite_is_told_of_by_its_layer",
        ),
    ),
    Mutant(
        "choice-that-failed-is-waited-for-again",
        "Whoever asks again after a choice that failed has the library wait for nothing.",
        "host/hillinfer/engine/decode_step.py",
        " and kept.choice.is_under_way:",
        ":",
        (
            f"{_TESTS}/engine/test_choice_aside.py::"
            "test_a_choice_that_failed_is_over_for_whoever_asks_again",
        ),
    ),
    Mutant(
        "divided-before-it-was-changed",
        "A norm takes what was divided for another prediction though its input was changed since.",
        "host/hillinfer/hf/attention.py",
        " or kept[1] != hidden_states._version",
        "",
        (f"{_TESTS}/hf/test_query_prediction.py::test_norms_that_divide_alike_divide_once",),
    ),
    Mutant(
        "norms-behind-somebody-elses-hook",
        "A norm takes what was divided before another hook changed the states.",
        "host/hillinfer/hf/attention.py",
        "is_last = next(reversed(layer._forward_pre_hooks.values())) is hook",
        "is_last = True",
        (f"{_TESTS}/hf/test_query_prediction.py::test_norms_that_divide_alike_divide_once",),
    ),
    Mutant(
        "norms-of-a-changed-class",
        "A norm whose class somebody changed is taken for the one that transformers made.",
        "host/hillinfer/hf/attention.py",
        "is_own = is_own and of_class.__module__.startswith(_MODELS)",
        "pass",
        (
            f"{_TESTS}/hf/test_query_prediction.py::"
            "test_nothing_is_shared_with_what_divides_by_something_else",
        ),
    ),
    Mutant(
        "described-while-somebody-chooses",
        "Rows that step together are described while another thread chooses by their tables.",
        "host/hillinfer/engine/joined_step.py",
        "        self._read_on()\n",
        "",
        (
            f"{_TESTS}/engine/test_joined_step.py::"
            "test_what_is_chosen_aside_is_there_before_rows_together_are_described",
        ),
    ),
    Mutant(
        "norms-that-divide-by-others",
        "A layer's norm takes the quotient of one with another epsilon.",
        "host/hillinfer/hf/attention.py",
        "if epsilon == other else None",
        "if epsilon else None",
        (
            f"{_TESTS}/hf/test_query_prediction.py::"
            "test_nothing_is_shared_with_what_divides_by_something_else",
        ),
    ),
    Mutant(
        "choice-aside-at-a-groups-end",
        "Another thread chooses while the token that comes begins a group, over the tail's rows.",
        "host/hillinfer/engine/queries.py",
        "return past % GROUP_TOKENS != 0 and 0 < inside",
        "return 0 < inside",
        (
            f"{_TESTS}/engine/test_choice_aside.py::test_where_a_group_or_a_segment_ends_the_caller_chooses[1088-False]",
        ),
    ),
)
