# SPDX-License-Identifier: Apache-2.0
"""Faults of one store for two engines: whose rows are taken, and what is stored behind them."""

from __future__ import annotations

from mutants.mutant import Mutant

_VLLM = "plugins/hillinfer_vllm/hillinfer_vllm"
_TESTS = "tests/host/reuse/test_other_makers.py"
_ADAPTERS = "tests/host/store/test_vllm_adapters.py"

MAKERS: tuple[Mutant, ...] = (
    Mutant(
        "sessions-of-other-makers",
        "A session is saved of rows that another engine made, and does not say so.",
        "host/hillinfer/generate/run_report.py",
        "    if told is not None and told.is_of_another:",
        "    if told is None:",
        (f"{_TESTS}::test_a_session_is_saved_of_own_rows_alone",),
    ),
    Mutant(
        "rows-of-other-weights-taken",
        "Rows of another engine are taken whatever model made them.",
        "host/hillinfer/store_namespaces.py",
        "if other == kind and (",
        "if (",
        (f"{_TESTS}::test_other_weights_are_always_a_miss",),
    ),
    Mutant(
        "weights-in-memory-not-compared",
        "A model that was changed in memory takes rows of its files.",
        "host/hillinfer/reuse/other_makers.py",
        "    _check_weights(model, directory)\n    return kind",
        "    return kind",
        (f"{_TESTS}::test_other_weights_are_always_a_miss",),
    ),
    Mutant(
        "rotation-in-memory-not-compared",
        "A model whose keys are turned otherwise takes rows of its config.",
        "host/hillinfer/reuse/other_makers.py",
        "    _check_modules(model)\n",
        "",
        (f"{_TESTS}::test_another_rotation_is_always_a_miss",),
    ),
    Mutant(
        "rows-of-others-taken-unasked",
        "vLLM takes rows of HillInfer that nobody told it to take.",
        f"{_VLLM}/shared_store.py",
        '    named = extra.get("accept")\n    if named is None:\n        return None\n',
        '    named = extra.get("accept", Maker.HILLINFER)\n',
        (f"{_TESTS}::test_vllm_takes_rows_of_others_only_where_it_is_told_to",),
    ),
    Mutant(
        "rows-behind-others-stored-as-own",
        "What was computed behind another engine's rows is stored under the model's namespace.",
        "host/hillinfer/hf/stored_cache.py",
        "if told.is_of_another:",
        "if told.is_of_another and not told.found_tokens:",
        (f"{_TESTS}::test_what_is_read_behind_rows_of_others_is_stored_by_nobody",),
    ),
    Mutant(
        "rows-behind-others-recorded",
        "What is read behind another engine's rows goes on in its chain.",
        "host/hillinfer/reuse/stored_prompts.py",
        "if whole and not facts.is_of_another and self._prompts.is_own(found):",
        "if whole:",
        (f"{_TESTS}::test_what_is_read_behind_rows_of_others_is_stored_by_nobody",),
    ),
    Mutant(
        "logprobs-of-loaded-tokens",
        "vLLM is promised rows of a prompt whose logprobs are asked for.",
        f"{_VLLM}/scheduling.py",
        "if known is None or request.skip_reading_prefix_cache:",
        "if known is None:",
        (
            "tests/host/store/test_vllm_steps.py::"
            "test_nothing_is_loaded_where_the_answer_needs_all_tokens_computed",
        ),
    ),
    Mutant(
        "vllm-stores-behind-others",
        "vLLM stores what it computed behind another engine's rows.",
        f"{_VLLM}/scheduling.py",
        "            if turn.request in behind:\n",
        "            if False:\n",
        (f"{_TESTS}::test_vllm_stores_nothing_that_it_computed_behind_rows_of_others",),
    ),
    Mutant(
        "adapters-share-a-namespace",
        "Rows of an adapter are stored as those of the model without it.",
        f"{_VLLM}/adapters.py",
        "    if not adapter:\n",
        "    if len(adapter) < 1000:\n",
        (f"{_ADAPTERS}::test_another_adapter_is_always_a_miss",),
    ),
    Mutant(
        "changed-adapters-trusted",
        "An adapter whose files changed under the engine goes on by what they are now.",
        f"{_VLLM}/adapters.py",
        "if self._by_number.setdefault(number, found) != found:",
        "if not found:",
        (f"{_ADAPTERS}::test_an_adapter_of_this_name_that_changed_is_refused_from_then_on",),
    ),
    Mutant(
        "adapters-take-rows-of-others",
        "A request with an adapter takes rows that another engine made without it.",
        f"{_VLLM}/ranks.py",
        "if len(namespaces) == 1 and not prompt.adapter else ()",
        "if len(namespaces) == 1 else ()",
        (f"{_TESTS}::test_a_request_with_an_adapter_takes_none",),
    ),
)
