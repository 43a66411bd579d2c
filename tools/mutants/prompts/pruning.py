# SPDX-License-Identifier: Apache-2.0
"""Faults of reading prompts in stages and of what is kept of them."""

from __future__ import annotations

from mutants.mutant import Mutant

_READING = "host/hillinfer/pruning/reading.py"
_RANKERS = "host/hillinfer/pruning/rankers.py"
_STAGES = "host/hillinfer/pruning/stages.py"
_KEEPING = "host/hillinfer/pruning/guards.py"
_CENSUS = "tests/host/limits/test_pruned_census.py"
_BANDS = "tests/host/pruning/test_bands.py"
_READ_TESTS = "tests/host/pruning/test_reading.py"
_RANK_TESTS = "tests/host/pruning/test_rankers.py"
_DECODING_TESTS = "tests/host/pruning/test_decoding.py"
_MOVED = (
    f"{_DECODING_TESTS}::"
    "test_rows_of_a_block_are_those_of_a_direct_computation_and_return_as_they_were"
)
_PAPERS_RULE = f"{_DECODING_TESTS}::test_the_papers_rule_moves_its_candidates_and_nothing_else"
_COMPLETION = "tests/host/pruning/test_completion.py"
_STORED = "tests/host/pruning/test_stored_prefix.py"
_CHOSEN = f"{_STORED}::test_what_is_stored_stays_and_the_rest_is_chosen_from"
_REFERENCE = f"{_READ_TESTS}::test_a_prompt_keeps_what_the_reference_keeps_and_answers_as_it_does"

PRUNING: tuple[Mutant, ...] = (
    Mutant(
        "single-tokens-of-stages-select",
        "A single token that a stage brings attends to what it selects.",
        "host/hillinfer/hf/cache_pass.py",
        "if query.shape[2] == 1 and not self.lengths.is_staged(layer):",
        "if query.shape[2] == 1:",
        (f"{_STORED}::test_a_single_token_behind_what_is_stored_is_completed_densely",),
    ),
    Mutant(
        "rows-of-others-are-stored",
        "What is read whole goes to a store with rows of tokens that others had decoded.",
        _KEEPING,
        "            document.dense = 0\n",
        "",
        (f"{_STORED}::test_rows_that_others_decoded_are_not_stored_as_those_of_a_prompt",),
    ),
    Mutant(
        "configs-may-ask-for-all-hidden-states",
        "Hidden states that a model's config asks for come with fewer tokens in deeper layers.",
        "host/hillinfer/pruning/guards.py",
        "if given.get(name) or getattr(config, name, False):",
        "if given.get(name):",
        (f"{_READ_TESTS}::test_what_layers_make_of_all_tokens_is_refused",),
    ),
    Mutant(
        "keys-that-decide-are-read-twice",
        "Attention reads past rows, and those who choose read their keys once more.",
        "host/hillinfer/attention/row_attention.py",
        "                look(row_addresses(rows, np.arange(len(rows))))\n",
        "                pass\n",
        (f"{_BANDS}::test_keys_that_decide_are_read_once",),
    ),
    Mutant(
        "forced-blocks-compete",
        "Blocks that stay in any case are not counted among those that are to stay.",
        _RANKERS,
        "left = max(0, count - int(forced.sum()))",
        "left = count",
        (f"{_RANK_TESTS}::test_the_choice_among_blocks",),
    ),
    Mutant(
        "window-is-one-block",
        "Of the blocks that the window reaches into only the last one stays.",
        _RANKERS,
        "forced[blocks - window_blocks :] = True",
        "forced[blocks - 1 :] = True",
        (f"{_RANK_TESTS}::test_the_choice_among_blocks",),
    ),
    Mutant(
        "forced-blocks-hold-no-mass",
        "What forced blocks hold is not counted towards the share that is to stay.",
        _RANKERS,
        "before = weights[forced].sum() + weights[best]",
        "before = weights[best]",
        (f"{_RANK_TESTS}::test_the_choice_by_mass",),
    ),
    Mutant(
        "mass-is-not-told-to-the-choice",
        "A cut by mass keeps all that it may keep.",
        _STAGES,
        "count, reached, cut.mass, max(1, first))",
        "count, reached, None, max(1, first))",
        (f"{_READ_TESTS}::test_a_cut_by_mass_keeps_what_the_reference_keeps",),
    ),
    Mutant(
        "mass-of-any-scores",
        "A cut by mass takes scores that do not add up for weights.",
        _READING,
        "        check_weights(schedule, ranker)\n",
        "",
        (f"{_READ_TESTS}::test_a_cut_by_mass_needs_weights",),
    ),
    Mutant(
        "window-sees-what-comes-later",
        "A query of the window gives weight to tokens behind its own.",
        _RANKERS,
        "triu(1)",
        "triu(window)",
        (f"{_RANK_TESTS}::test_scores_are_those_of_the_restatement",),
    ),
    Mutant(
        "a-chunk-chooses-for-itself",
        "Blocks are chosen when the first chunk comes and not when the prompt is complete.",
        _READING,
        "        if length < now.whole:\n",
        "        if False:\n",
        (f"{_READ_TESTS}::test_chunks_change_no_choice",),
    ),
    Mutant(
        "kept-tokens-move-together",
        "Kept tokens are turned to the places that they have among each other.",
        _STAGES,
        "self._rotary(hidden, torch.cat([places, last]))",
        "self._rotary(hidden, torch.cat([torch.arange(len(places)), last]))",
        (_REFERENCE,),
    ),
    Mutant(
        "deeper-chunks-see-ahead",
        "In deeper layers a token sees the next one.",
        _STAGES,
        "mask.triu(held + 1)",
        "mask.triu(held + 2)",
        (_REFERENCE,),
    ),
    Mutant(
        "deeper-rows-are-not-cut-off",
        "Where a cache was cut off, deeper layers keep rows of what is gone.",
        _KEEPING,
        "            cache.shorten(layers, len(left))\n",
        "",
        (f"{_READ_TESTS}::test_what_is_cut_off_is_cut_off_everywhere",),
    ),
    Mutant(
        "a-broken-stage-leaves-rows",
        "A pass that broke off in a deeper layer leaves rows in those before it.",
        _KEEPING,
        "            self.empty(document, now.cache)\n            return\n",
        "            return\n",
        (f"{_READ_TESTS}::test_a_pass_that_breaks_off_in_a_stage_can_be_made_again",),
    ),
    Mutant(
        "answers-have-no-boundary-states",
        "A turn that chooses anew knows nothing of the answer before it.",
        _READING,
        "        if now.stages or self._later.chooses or self._blocks.enters:\n",
        "        if now.stages or self._blocks.enters:\n",
        (f"{_READ_TESTS}::test_a_turn_may_choose_anew",),
    ),
    Mutant(
        "bands-cut-by-tokens",
        "A cropped cache leaves as many rows in deeper bands as it has tokens.",
        "host/hillinfer/kv/rows.py",
        "[(one, one.rows_until(length)) for one in sequence.deeper]",
        "[(one, min(one.tokens, length)) for one in sequence.deeper]",
        (f"{_BANDS}::test_what_is_cropped_is_gone_from_every_band",),
    ),
    Mutant(
        "forks-share-deeper-rows",
        "A fork goes on in the deeper bands of the cache that it comes from.",
        "host/hillinfer/kv/rows.py",
        "copy.deepen(self._fork_band(one))",
        "copy.deepen(one)",
        (f"{_BANDS}::test_forks_go_on_by_themselves",),
    ),
    Mutant(
        "states-not-compared",
        "Boundary states that a drive changed are read on.",
        "host/hillinfer/pruning/states.py",
        "                if _sum(page) != expected[number]:\n",
        "                if False:\n",
        (f"{_BANDS}::test_states_that_a_drive_does_not_take_or_give_are_an_error_and_no_answer",),
    ),
    Mutant(
        "states-pass-uncounted-memory",
        "The buffer that states go through is counted by nobody.",
        "host/hillinfer/pruning/states.py",
        "        self._accountant.take(Part.STAGING, size)\n",
        "        self._accountant.take(Part.STAGING, 0)\n",
        (f"{_CENSUS}::test_states_on_the_drive_leave_nothing_uncounted_at_any_stage",),
    ),
    Mutant(
        "later-pieces-of-states-begin-at-zero",
        "Rows of later pieces of states are taken from the piece before.",
        "host/hillinfer/pruning/states.py",
        "rows[wanted[places] - inside.start]",
        "rows[wanted[places] - wanted[places][0]]",
        ("tests/host/pruning/test_states.py::test_states_of_many_pieces_come_back_as_they_were",),
    ),
    Mutant(
        "a-piece-of-one-token",
        "What stays goes through deeper layers in pieces of which one may be of a single token.",
        _STAGES,
        "    if len(starts) > 1 and tokens - starts[-1] == 1:\n",
        "    if False:\n",
        (f"{_BANDS}::test_a_piece_of_a_single_token_is_none",),
    ),
    Mutant(
        "alpha-of-a-bands-own-rows",
        "A band selects a share of the rows that it has, and not of the context.",
        "host/hillinfer/scoring/scorer.py",
        "        tokens = length + lacking\n        count =",
        "        tokens = length\n        count =",
        (f"{_BANDS}::test_alpha_counts_what_a_band_has_not",),
    ),
    Mutant(
        "completed-pieces-begin-at-zero",
        "Tokens of later pieces get the positions of the first piece's.",
        _STAGES,
        "positions = torch.arange(first, first + states.shape[1], device=states.device)",
        "positions = torch.arange(states.shape[1], device=states.device)",
        (f"{_COMPLETION}::test_rows_of_an_ordinary_cache_are_those_of_a_whole_read",),
    ),
    Mutant(
        "half-whole-counts-as-whole",
        "Layers that have a part of what waits for them take new tokens behind it.",
        "host/hillinfer/hf/batch.py",
        "            if band.tokens < band.rows_before(one.tokens)\n",
        "            if not band.tokens and one.tokens\n",
        (f"{_COMPLETION}::test_a_document_that_is_half_whole_is_not_answered_without_its_pruning",),
    ),
    Mutant(
        "a-broken-completion-leaves-rows",
        "Deeper layers keep what a piece brought to some of them before it broke off.",
        _READING,
        "        except BaseException:\n"
        "            self._tracker.empty(document, staged)\n            raise\n",
        "        except BaseException:\n            raise\n",
        (f"{_COMPLETION}::test_what_breaks_off_leaves_a_document_that_waits",),
    ),
    Mutant(
        "evidence-of-other-weights",
        "A schedule that was found of a model is taken for every other one.",
        "host/hillinfer/pruning/profile.py",
        'f"{weights_digest(model)}.json"',
        '"model.json"',
        (
            "tests/host/cli/test_prune_option.py::test_auto_takes_what_was_found_of_these_weights_and_nothing_else",
        ),
    ),
    Mutant(
        "gamma-is-not-enough",
        "Blocks move where as many of the candidates are there as gamma asks for.",
        "host/hillinfer/pruning/block_policies.py",
        "overlap >= self._gamma",
        "overlap > self._gamma",
        (f"{_DECODING_TESTS}::test_the_papers_gamma_is_taken_where_none_is_given",),
    ),
    Mutant(
        "entering-blocks-see-ahead",
        "A block that enters a band sees tokens behind its own.",
        _STAGES,
        "held > places[:, None]",
        "held > places[-1]",
        (_MOVED,),
    ),
    Mutant(
        "states-go-while-blocks-move",
        "Boundary states go once a prompt's read counted, though blocks may enter later.",
        _KEEPING,
        "        if not needed and document.swapping is None:\n",
        "        if not needed:\n",
        (_PAPERS_RULE,),
    ),
    Mutant(
        "a-broken-turn-changes-queries",
        "A pass of several tokens that breaks off leaves its own hidden states as the window.",
        _KEEPING,
        "        document.windows, document.is_new = held.windows, held.is_new\n",
        "        document.is_new = held.is_new\n",
        (f"{_DECODING_TESTS}::test_a_turn_that_breaks_off_leaves_the_queries_that_rank",),
    ),
    Mutant(
        "stored-blocks-are-chosen-from",
        "What a store brought is dropped like what was read.",
        _STAGES,
        "max(1, first))",
        "1)",
        (_CHOSEN,),
    ),
    Mutant(
        "stored-blocks-count-for-the-share",
        "A cut keeps its share of all blocks, and what a store brought fills it.",
        _STAGES,
        "read = max(0, tokens - first * BLOCK_TOKENS)",
        "read, first = tokens, 0",
        (_CHOSEN,),
    ),
    Mutant(
        "shared-rows-count-for-one-band",
        "Groups that bands share are counted for the layers of one of them.",
        "host/hillinfer/kv/sequence.py",
        "layers_of.setdefault(group, set()).update(one.band)",
        "layers_of[group] = set(one.band)",
        (f"{_STORED}::test_rows_that_bands_share_are_counted_once",),
    ),
    Mutant(
        "a-question-behind-a-store-is-pruned",
        "A question behind a stored document loses blocks of itself.",
        _READING,
        "has_more = new - (coming.question_tokens or 0) > 2 * BLOCK_TOKENS",
        "has_more = new > 2 * BLOCK_TOKENS",
        (f"{_STORED}::test_a_question_and_a_short_rest_are_read_whole",),
    ),
    Mutant(
        "lost-rows-are-read-in-stages",
        "Rows that a store lost are computed for the layers before the first cut alone.",
        "host/hillinfer/hf/cache.py",
        "side.is_again = True",
        "side.is_again = False",
        (
            "tests/host/faults/test_lost_rows.py::"
            "test_a_prompt_behind_lost_rows_is_read_in_stages_as_without",
        ),
    ),
    Mutant(
        "states-of-a-sealed-pool-are-not-planned",
        "The command takes a budget that does not hold boundary states in memory.",
        "host/hillinfer/cli/preflight.py",
        "        per_token += states",
        "        per_token += 0 * states",
        ("tests/host/cli/test_prune_option.py::test_the_least_budget_holds_what_bands_take",),
    ),
    Mutant(
        "a-broken-answer-costs-the-document",
        "A document whose answer breaks off is neither read whole nor kept.",
        "host/hillinfer/cli/run.py",
        "        complete_document(answering, console)\n    if record",
        "        if not record.goes_on:\n            return\n"
        "        complete_document(answering, console)\n    if record",
        (
            "tests/host/cli/test_ending.py::"
            "test_an_answer_that_breaks_off_costs_no_document_that_is_read_in_stages",
        ),
    ),
    Mutant(
        "all-states-of-a-band-in-memory",
        "What enters a band is read whole before its first chunk.",
        _STAGES,
        "hidden, places = states.part(start, stop), positions[start:stop]",
        "hidden, places = (\n                states.part(0, len(positions))[:, start:stop],\n"
        "                positions[start:stop],\n            )",
        (f"{_BANDS}::test_states_are_in_memory_chunk_by_chunk",),
    ),
)
