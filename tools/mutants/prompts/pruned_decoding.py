# SPDX-License-Identifier: Apache-2.0
"""Faults of decoding behind a pruned prompt, and of its benchmark."""

from __future__ import annotations

from mutants.mutant import Mutant

_CENSUS = "tests/host/limits/test_pruned_census.py"
_BANDS = "tests/host/pruning/test_bands.py"
_DECODING = "host/hillinfer/pruning/decoding.py"
_DECODING_TESTS = "tests/host/pruning/test_decoding.py"
_MOVED = (
    f"{_DECODING_TESTS}::"
    "test_rows_of_a_block_are_those_of_a_direct_computation_and_return_as_they_were"
)
_PAPERS_RULE = f"{_DECODING_TESTS}::test_the_papers_rule_moves_its_candidates_and_nothing_else"
_CACHES = "host/hillinfer/pruning/caches.py"
_STORED = "tests/host/pruning/test_stored_prefix.py"
_TEXT = "tools/hillinfer_bench/slim/text.py"
_SLIM_TESTS = "tests/host/pruning/test_slim_text.py"
_BENCH = "tools/hillinfer_bench/slim/decoding.py"
_BENCH_TESTS = "tests/host/pruning/test_slim_command.py"

_BLOCK_TESTS = "tests/host/pruning/test_blocks.py"
_CROPPED = f"{_BLOCK_TESTS}::test_rows_of_a_cache_that_was_cropped_without_pruning_are_found"

PRUNED_DECODING: tuple[Mutant, ...] = (
    Mutant(
        "rows-as-nobody-had-cropped",
        "A band that was cropped without pruning is taken to lack what came since.",
        _CACHES,
        "np.arange(own.kept_until, until)) for own in bands]",
        "np.arange(until - 1, until)) for own in bands]",
        (_CROPPED,),
    ),
    Mutant(
        "blocks-of-a-prompt-that-others-cut",
        "Blocks of a prompt that was cut without pruning are ranked and attended to as before.",
        "host/hillinfer/pruning/guards.py",
        "uncut < document.swapping.tokens",
        "uncut < 0",
        (_CROPPED,),
    ),
    Mutant(
        "passes-of-others-behind-a-broken-one",
        "States of tokens that others replaced behind a pass that broke off are chosen from.",
        "host/hillinfer/pruning/guards.py",
        "            document.passes -= 1\n",
        "            document.passes -= 0\n",
        (f"{_BANDS}::test_what_others_bring_behind_a_token_that_broke_off_is_not_taken_for_ours",),
    ),
    Mutant(
        "a-read-that-others-went-on-with-is-new",
        "A prompt that was cropped and gone on with without pruning is to be read anew.",
        "host/hillinfer/pruning/guards.py",
        "behind them.\n            document.is_new = False\n",
        "behind them.\n",
        (_CROPPED,),
    ),
    Mutant(
        "unknown-states-enter",
        "Blocks whose states are not known any more are to run through a band.",
        _DECODING,
        "enters = self.enters and now.document.boundary.tokens >= state.tokens",
        "enters = self.enters",
        (f"{_BLOCK_TESTS}::test_nothing_enters_where_others_went_on",),
    ),
    Mutant(
        "needles-of-the-first-cut-count",
        "A needle that a later cut drops counts as one that every layer has.",
        "tools/hillinfer_bench/slim/quality.py",
        "<= {*own.tolist()} for own in lost.kept)",
        "<= {*own.tolist()} for own in lost.kept[:0])",
        (f"{_BENCH_TESTS}::test_needles_are_kept_where_their_blocks_are",),
    ),
    Mutant(
        "rows-that-enter-are-those-of-one-layer",
        "What swaps bring is counted of one layer of a band.",
        _DECODING,
        "len(fresh + back) * BLOCK_TOKENS * len(band),",
        "len(fresh + back) * BLOCK_TOKENS,",
        (_MOVED,),
    ),
    Mutant(
        "keys-of-a-broken-pass-stay-counted",
        "Keys that were wanted by a pass that broke off take their part of the budget for ever.",
        _CACHES,
        "        self._expected.clear()\n        self._parts.dense.watch_none()\n",
        "",
        (f"{_BANDS}::test_keys_that_decide_go_where_their_layer_breaks_off",),
    ),
    Mutant(
        "states-keep-a-batch",
        "States of one row in counted memory keep those of the whole batch.",
        _CACHES,
        "        if states.untyped_storage().nbytes() > size:\n",
        "        if False:\n",
        (f"{_CENSUS}::test_rows_of_a_batch_keep_the_states_of_one",),
    ),
    Mutant(
        "divergence-the-other-way",
        "KL on text is weighed by what pruning expects, not by what a whole read does.",
        _TEXT,
        "(expected.exp() * (expected - found))",
        "(found.exp() * (found - expected))",
        (f"{_SLIM_TESTS}::test_a_row_is_what_logits_by_hand_say",),
    ),
    Mutant(
        "goal-without-selection",
        "Both together are compared with pruning alone.",
        _TEXT,
        "most = alone.kl + selected.kl",
        "most = alone.kl",
        (f"{_SLIM_TESTS}::test_goals_of_text_are_met_up_to_their_bar",),
    ),
    Mutant(
        "completed-in-name-alone",
        "The bench asks about a completed document before a piece of it was read.",
        "tools/hillinfer_bench/slim/quality.py",
        "        pruning.complete(cache)\n",
        "        pruning.complete(cache, lambda: True)\n",
        (f"{_SLIM_TESTS}::test_a_completed_document_answers_as_one_that_was_read_whole",),
    ),
    Mutant(
        "answers-take-places",
        "Blocks of the answer take places of the prompt's among the candidates.",
        _DECODING,
        "kept_blocks(scores, count + of_answers, forced)",
        "kept_blocks(scores, count, forced)",
        (_PAPERS_RULE,),
    ),
    Mutant(
        "later-cuts-rank-by-the-prompt",
        "A later cut ranks by the last tokens of the prompt, not by decoded ones.",
        _DECODING,
        "if self.moves or not number",
        "if not number",
        (_PAPERS_RULE,),
    ),
    Mutant(
        "what-returns-is-computed-again",
        "A block that was in a band before is computed as if it had never been there.",
        _DECODING,
        "wanted & aside.keys() - active), sorted(wanted - active - aside.keys())",
        "wanted & set()), sorted(wanted - active)",
        (_MOVED,),
    ),
    Mutant(
        "rows-stay-behind-each-other",
        "Rows of blocks that enter stay behind those of answers, and positions say otherwise.",
        _DECODING,
        "layer.keys[..., order, :], layer.values[..., order, :]",
        "layer.keys, layer.values",
        (_MOVED,),
    ),
    Mutant(
        "a-broken-step-leaves-moved-rows",
        "A step that breaks off leaves layers with the rows of other blocks.",
        _DECODING,
        "            layer.keys, layer.values = keys, values\n",
        "            pass\n",
        (f"{_DECODING_TESTS}::test_a_step_that_breaks_off_while_blocks_move_moves_none",),
    ),
    Mutant(
        "cut-off-prompts-go-on-swapping",
        "Blocks move of a prompt that was cut off, some of which are no longer there.",
        _DECODING,
        "            document.swapping = None\n",
        "            pass\n",
        (f"{_DECODING_TESTS}::test_blocks_of_a_prompt_that_is_cut_off_move_no_more",),
    ),
    Mutant(
        "a-prompt-of-one-token-is-an-answer",
        "A chunk of a single token moves blocks, as a decoded token does.",
        _DECODING,
        "now.is_prompt or now.tokens != 1",
        "now.tokens != 1",
        (f"{_DECODING_TESTS}::test_tokens_of_a_later_prompt_are_no_decoded_ones",),
    ),
    Mutant(
        "who-says-no-number-is-right",
        "The bench counts free answers that do not name the number.",
        _BENCH,
        "number in tokenizer",
        "number not in tokenizer",
        (f"{_BENCH_TESTS}::test_who_says_a_number_by_itself_is_right",),
    ),
    Mutant(
        "decoded-answers-are-right-unseen",
        "The bench takes forced answers behind moving blocks for right ones without reading them.",
        _BENCH,
        "right, nll = answer(model, cache, question, last)",
        "right, nll = True, 1.0",
        (f"{_BENCH_TESTS}::test_decoded_answers_are_those_by_hand",),
    ),
    Mutant(
        "rows-of-a-band-are-not-selected",
        "Rows of the bench with a tenth selected are measured in transformers' own cache.",
        _BENCH,
        "way = replace(way, held=Held.DRIVE)",
        "pass",
        (f"{_BENCH_TESTS}::test_decoded_answers_are_those_by_hand",),
    ),
    Mutant(
        "nine-tenths-are-a-tenth",
        "The bench selects nine tenths of the context, and names another share.",
        "tools/hillinfer_bench/slim/quality.py",
        "ALPHA = 0.1\n",
        "ALPHA = 0.9\n",
        (f"{_BENCH_TESTS}::test_decoded_answers_are_those_by_hand",),
    ),
    Mutant(
        "a-later-turn-behind-a-store-is-pruned",
        "A turn behind a document that was read whole loses blocks.",
        _CACHES,
        "return None if self._cache.passes else self._cache.dense_tokens",
        "return self._cache.dense_tokens",
        (f"{_STORED}::test_a_question_and_a_short_rest_are_read_whole",),
    ),
    Mutant(
        "keys-that-decide-are-not-counted",
        "Keys of the layer that decides lie in memory beside the budget.",
        _CACHES,
        "        accountant.take(Part.STAGING, size)\n        return Deciding",
        "        size = 0\n        return Deciding",
        (f"{_BANDS}::test_keys_that_decide_are_counted",),
    ),
    Mutant(
        "states-at-a-cut-are-not-counted",
        "States that wait in memory at a cut are counted by nobody.",
        _CACHES,
        "        accountant.take(Part.OTHER, size)\n        if states",
        "        accountant.take(Part.OTHER, 0)\n        if states",
        (f"{_CENSUS}::test_states_in_memory_are_counted_at_every_stage",),
    ),
    Mutant(
        "states-between-bands-stay-in-memory",
        "What leaves a band lies in memory that nobody counts until the next cut.",
        _CACHES,
        "            self._between = self._fresh_file()\n        return self._between.add(states)",
        "            self._between = self._fresh_file()\n        return StatesInMemory(states)",
        (f"{_BANDS}::test_a_drive_that_takes_no_states_between_bands_is_an_error",),
    ),
)
