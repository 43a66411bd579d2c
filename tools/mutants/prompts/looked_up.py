# SPDX-License-Identifier: Apache-2.0
"""Faults in looking prompts up in a store, and in what of them is stored."""

from __future__ import annotations

from mutants.mutant import Mutant

_TESTS = "tests/host/reuse/test_prompts_of_attached_models.py"
_BROUGHT = (
    "tests/host/reuse/test_opened_in_place.py"
    "::test_rows_that_a_dense_pass_brings_stay_where_there_is_room"
)
_WAYS = f"{_TESTS}::test_every_way_answers_alike_and_finds_what_it_stored"

LOOKED_UP: tuple[Mutant, ...] = (
    Mutant(
        "rows-behind-decoded-ones-stored",
        "A question that was read over rows of an answer is stored as if all had been read.",
        "host/hillinfer/hf/prompts.py",
        "if columns == 1 or not tokens or self.dense != start:",
        "if columns == 1 or not tokens:",
        (f"{_TESTS}::test_a_conversation_stores_what_was_read_densely_alone",),
    ),
    Mutant(
        "last-token-left-alone",
        "A prompt's last token selects where the store leaves it alone in its pass.",
        "host/hillinfer/reuse/stored_prompts.py",
        "            tokens -= self._border\n",
        "            pass\n",
        (f"{_WAYS}[llama-chunks that end oddly]",),
    ),
    Mutant(
        "exact-between-borders",
        "Behind a chunk that cannot be read, exact reuse goes on between two borders of passes.",
        "host/hillinfer/reuse/stored_prompts.py",
        "        if self.whole(opened.tokens) != opened.tokens:\n",
        "        if False:\n",
        (f"{_TESTS}::test_exact_goes_back_to_a_border_where_the_second_chunk_is_wrong",),
    ),
    Mutant(
        "exact-of-another-division",
        "Exact reuse stores rows of passes that were not as long as was told.",
        "host/hillinfer/reuse/stored_prompts.py",
        "return self.whole(made.even) if made.chunk == self._chunk_tokens else 0",
        "return self.whole(made.dense)",
        (f"{_TESTS}::test_exact_stores_no_passes_of_another_length",),
    ),
    Mutant(
        "rows-of-other-positions-stored",
        "Tokens that were given other positions are stored.",
        "host/hillinfer/hf/cache_pass.py",
        "            if plan.tokens > 1 and self._is_in_place:\n",
        "            if plan.tokens > 1:\n",
        (f"{_TESTS}::test_tokens_at_other_places_are_neither_taken_nor_stored",),
    ),
    Mutant(
        "stored-rows-of-a-broken-pass-stay",
        "What a store brought for a pass that broke off stays, and another prompt is refused.",
        "host/hillinfer/hf/cache_pass.py",
        "            if self._prompts.is_tentative:\n                # Nothing",
        "            if False:\n                # Nothing",
        (f"{_TESTS}::test_a_call_that_fails_leaves_the_cache_as_it_was",),
    ),
    Mutant(
        "collecting-hooks-name-another-model",
        "Hooks that note what layers put out make a model another one, whose prompts nobody finds.",
        "host/hillinfer/reuse/described_model.py",
        'getattr(hook, "__module__", "") == _COLLECTORS',
        "False",
        (
            "tests/host/reuse/test_streaming.py::test_a_pass_that_collects_what_layers_put_out_changes_no_name",
        ),
    ),
    Mutant(
        "seen-rows-stay-cold",
        "Rows that a dense pass brings are read again once they are selected.",
        "host/hillinfer/kv/pool_manager.py",
        "self._pools.room(layer) if self._policy.takes_seen else 0",
        "0",
        (f"{_BROUGHT}[room]",),
    ),
    Mutant(
        "seen-rows-are-old-at-once",
        "Rows that a dense pass brings give way to the next before those of earlier steps do.",
        "host/hillinfer/kv/pool_manager.py",
        "candidates, self._step, 0, note)",
        "candidates, self._redistributed_in, 0, note)",
        (
            "tests/host/kv/test_pool_manager.py::test_rows_that_a_dense_pass_brought_are_as_old_as_the_pass",
        ),
    ),
    Mutant(
        "seen-rows-lie-one-row-on",
        "Rows that a dense pass brings become hot in each other's place.",
        "host/hillinfer/kv/pool_manager.py",
        "_candidates(layer, sequence, settled[places], source, places)",
        "_candidates(layer, sequence, settled[places], source, np.roll(places, 1))",
        (f"{_BROUGHT}[room]",),
    ),
    Mutant(
        "grouped-heads-attend-to-another-group",
        "Query heads attend to the keys of another group.",
        "host/hillinfer/attention/grouped_query.py",
        "query.reshape(kv_heads, group, tokens, head_dim)",
        "query.reshape(group, kv_heads, tokens, head_dim).transpose(0, 1)",
        ("tests/host/attention/test_grouped_query.py::test_bits_are_those_of_transformers",),
    ),
)
