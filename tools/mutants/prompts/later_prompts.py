# SPDX-License-Identifier: Apache-2.0
"""Faults in what later prompts and decoded tokens choose, and what is computed of that."""

from __future__ import annotations

from mutants.mutant import Mutant

_STAGES, _READING = "host/hillinfer/pruning/stages.py", "host/hillinfer/pruning/reading.py"
_QUALITY = "tools/hillinfer_bench/slim/quality.py"
_ENTERING = "tests/host/pruning/test_entering.py"
_ROWS = f"{_ENTERING}::test_rows_that_stay_stay_and_others_are_those_of_a_direct_computation"

_PLACING = "tests/host/reuse/test_row_placing.py"
_COMING = "tests/host/shadow/test_coming_shadows.py"
_BLOCKS = "tests/host/pruning/test_blocks.py"
_DECODING = "host/hillinfer/pruning/decoding.py"
_ENTERED = (
    f"{_BLOCKS}::test_what_enters_has_the_rows_of_its_block_behind_what_the_band_has_before_it"
)
_BROKEN = f"{_BLOCKS}::test_forks_cropped_answers_and_broken_steps_go_on_alike"
_RULE = f"{_BLOCKS}::test_layers_attend_to_blocks_that_the_rule_wants"

_TURNED = (
    "tests/host/pruning/test_completion.py::test_pieces_turn_by_the_length_of_the_whole_document"
)
_PROFILE = "host/hillinfer/pruning/profile.py"
_NAMED = "tests/host/pruning/test_profile.py::test_the_fastest_that_keeps_the_quality_is_named"

_ANSWERING = "host/hillinfer/generate/answering.py"
_SHOWN = (
    "tests/host/cli/test_prune_option.py"
    "::test_progress_has_a_stage_of_deeper_layers_before_decoding"
)

LATER_PROMPTS: tuple[Mutant, ...] = (
    Mutant(
        "deeper-layers-in-silence",
        "Nothing is shown while deeper layers read a prompt with its question.",
        _ANSWERING,
        "prompt(whole, len(ids), progress.deeper)",
        "prompt(whole, len(ids))",
        (_SHOWN,),
    ),
    Mutant(
        "a-document-that-waits-is-read",
        "A document is told as read where deeper layers wait for its question.",
        _READING,
        "len(self.layers)) if waits else None",
        "len(self.layers)) if not staged else None",
        (_SHOWN,),
    ),
    Mutant(
        "the-first-token-is-decoded",
        "The rate of decoding counts a token that comes out of reading.",
        "host/hillinfer/cli/console.py",
        "view.stage(name, total, begun)",
        "view.stage(name, total)",
        (_SHOWN,),
    ),
    Mutant(
        "a-profile-names-what-forgets-two-answers",
        "`--prune auto` takes a schedule that answers two questions fewer than a whole read.",
        _PROFILE,
        "found.right >= full.right - 1",
        "found.right >= full.right - 2",
        (_NAMED,),
    ),
    Mutant(
        "a-profile-names-what-is-unsure",
        "`--prune auto` takes a schedule by which the right digits are much less probable.",
        _PROFILE,
        " and found.nll <= full.nll + 0.3:",
        ":",
        (_NAMED,),
    ),
    Mutant(
        "a-profile-of-who-finds-nothing",
        "A model that finds few needles when it reads all of it has a schedule named for it.",
        _PROFILE,
        "knows = 2 * full.right >= full.questions",
        "knows = full.right > 0",
        (_NAMED,),
    ),
    Mutant(
        "what-enters-sees-what-leaves",
        "Tokens that enter a band see rows of those that leave it.",
        _STAGES,
        "        stay = torch.isin(held, chosen).nonzero().flatten()\n",
        "        stay = torch.arange(len(held))\n",
        (_ROWS,),
    ),
    Mutant(
        "what-entered-lies-last",
        "Rows of tokens that entered lie behind those that stayed, whatever their positions.",
        _STAGES,
        "        order = torch.cat([held[stay], entering]).argsort()\n",
        "        order = torch.arange(len(stay) + len(entering))\n",
        (_ROWS,),
    ),
    Mutant(
        "all-enters",
        "All that is chosen is computed, also what a band has.",
        _READING,
        "        if self._later is LaterTurns.ENTER and now.document.positions:\n",
        "        if False:\n",
        (_ROWS,),
    ),
    Mutant(
        "pieces-of-a-prompt-in-silence",
        "A prompt whose length nobody said loses what its first chunk did not want, in silence.",
        _READING,
        "            if not coming.tokens and not self._later.chooses:\n",
        "            if False:\n",
        (
            "tests/host/pruning/test_reading.py"
            "::test_a_prompt_whose_length_nobody_said_is_warned_of",
        ),
    ),
    Mutant(
        "what-enters-costs-as-all",
        "Operations of what enters are told as those of all that a band has.",
        _QUALITY,
        "        elif read is None or read.entered is None:\n",
        "        elif read is not None:\n",
        (
            "tests/host/pruning/test_slim_text.py"
            "::test_a_second_question_computes_what_operations_say",
        ),
    ),
    Mutant(
        "pieces-turn-by-themselves",
        "Scaled rotary positions of a piece turn by that piece's length.",
        _STAGES,
        '            last = given["position_ids"].flatten()[-1:].to(places)\n',
        "            last = places[-1:]\n",
        (_TURNED,),
    ),
    Mutant(
        "completing-turns-by-the-first-piece",
        "Scaled rotary positions of a document that is completed turn by where a piece begins.",
        _STAGES,
        "        last = positions.new_tensor([[tokens - 1]])\n",
        "        last = positions.new_tensor([[first]])\n",
        (_TURNED,),
    ),
    Mutant(
        "the-first-answer-s-states-for-all",
        "Rows of an ordinary cache that decode side by side count as the first of them.",
        "host/hillinfer/pruning/caches.py",
        "        return int(self._cache.layers[0].keys.shape[0]) == 1\n",
        "        return True\n",
        (
            "tests/host/pruning/test_reading.py"
            "::test_answers_side_by_side_leave_no_states_of_the_first_for_the_others",
        ),
    ),
    Mutant(
        "answers-are-no-rows-of-blocks",
        "Layers attend to blocks of the prompt, and not to the answer.",
        "host/hillinfer/pruning/decoding.py",
        "        rows |= positions >= state.tokens\n",
        "        rows[-1] = True\n",
        (_RULE,),
    ),
    Mutant(
        "blocks-of-other-bands-are-wanted",
        "Blocks that a band does not have take places among the candidates.",
        "host/hillinfer/pruning/decoding.py",
        "        if among is not None:\n",
        "        if False:\n",
        (_RULE,),
    ),
    Mutant(
        "told-rows-stay-told",
        "Layers attend to what was told for a token before.",
        "host/hillinfer/kv/sequence.py",
        "self.told[0] == tokens else None",
        "self.told[0] else None",
        (f"{_BLOCKS}::test_what_goes_on_without_pruning_selects_as_ever",),
    ),
    Mutant(
        "told-rows-are-scored-all-the-same",
        "Where rows are told, a layer chooses by itself in one call.",
        "host/hillinfer/engine/runtime.py",
        "if ahead is None and not is_told else ()",
        "if ahead is None else ()",
        (_RULE,),
    ),
    Mutant(
        "told-rows-are-copied-ahead",
        "A GPU is sent what a token before was told.",
        "host/hillinfer/hf/cache_pass.py",
        "is_read = sequence.told is None or self._runtime.decode is not None",
        "is_read = True",
        (f"{_BLOCKS}::test_a_gpu_is_sent_rows_once_it_is_told_which",),
    ),
    Mutant(
        "ranking-blocks-forgets-what-is-read-ahead",
        "What was announced of a band is forgotten when the blocks before it are ranked.",
        "host/hillinfer/pruning/caches.py",
        "        if runtime.decode is None or sequence.of(layer + 1).told is None:\n",
        "        if True:\n",
        (f"{_BLOCKS}::test_blocks_are_read_while_the_layer_before_computes",),
    ),
    Mutant(
        "what-is-announced-stays-while-blocks-enter",
        "Rows read ahead of a band for a token stay under way while a block's rows come to it.",
        "host/hillinfer/pruning/caches.py",
        """\
            # What was announced is for a single token, and these come before it.
            self._cache.engine.runtime.settle()
""",
        "            pass\n",
        (f"{_BLOCKS}::test_what_was_announced_is_forgotten_before_a_block_enters",),
    ),
    Mutant(
        "told-rows-are-read-in-their-turn",
        "What a token before attended to is not read ahead for the next one.",
        "host/hillinfer/engine/selection.py",
        "            return lambda: [told[1]] * self._set_count\n",
        "            return lambda: [told[1][:1]] * self._set_count\n",
        (f"{_BLOCKS}::test_blocks_are_read_while_the_layer_before_computes",),
    ),
    Mutant(
        "blocks-that-enter-see-all-of-the-band",
        "A block that enters a cache on a drive sees later blocks, and the answer.",
        _DECODING,
        "            seen = (held < places[0]).nonzero().flatten()\n",
        "            seen = torch.arange(len(held))\n",
        (_ENTERED,),
    ),
    Mutant(
        "blocks-that-enter-see-themselves-alone",
        "A layer is not asked which rows a block that enters was to see.",
        "host/hillinfer/kv/sequence.py",
        "        return None if told is None else [told]\n",
        "        return None if told is None else [told[:1]]\n",
        (_ENTERED,),
    ),
    Mutant(
        "rows-of-a-step-that-broke-off-stay",
        "Rows of blocks that entered stay behind a step that broke off.",
        _DECODING,
        "            self._keep(now, now.held.positions[0])\n",
        "            pass\n",
        (_BROKEN,),
    ),
    Mutant(
        "rows-behind-what-was-cut-are-thought-there",
        "A cache that is cropped is thought to have rows of blocks that lay behind the answer.",
        "host/hillinfer/pruning/guards.py",
        "        if any(_lies_apart(one, length) for one in document.positions):\n",
        "        if False:\n",
        (_BROKEN,),
    ),
    Mutant(
        "states-of-answers-are-lost",
        "States of an answer are not kept where blocks may enter, so nothing can be completed.",
        _READING,
        "        if now.stages or self._later.chooses or self._blocks.enters:\n",
        "        if now.stages or self._later.chooses:\n",
        (f"{_BLOCKS}::test_what_has_entered_goes_on_to_a_question_and_is_completed",),
    ),
    Mutant(
        "peaks-are-asked-for-whatever-rows-take",
        "A DRAM peak is asked for that rows which stay and buffers leave no room for.",
        "tools/hillinfer_bench/slim/run.py",
        "                most = 1.1 * least\n",
        "                pass\n",
        (
            "tests/host/pruning/test_slim_command.py"
            "::test_a_peak_is_asked_for_that_rows_and_buffers_leave_room_for",
        ),
    ),
    Mutant(
        "broken-placing-is-never-done",
        "Where a pass breaks off that places rows, the thread that read them waits for ever.",
        "host/hillinfer/reuse/row_placing.py",
        "                        one.taker = None\n",
        "",
        (f"{_PLACING}::test_who_read_rows_places_them_where_the_pass_breaks_off",),
    ),
    Mutant(
        "rows-that-fail-twice-are-never-done",
        "Where placing rows fails in the thread that read them, it waits for itself.",
        "host/hillinfer/reuse/row_placing.py",
        "                own.is_done = True\n        # The memory",
        "                pass\n        # The memory",
        (f"{_PLACING}::test_rows_that_cannot_be_placed_are_an_error_of_who_read_them",),
    ),
    Mutant(
        "an-open-group-is-looked-for-in-files-of-rows",
        "A session that is resumed in the middle of its open group reads behind its files.",
        "host/hillinfer/kv/opened_sequences.py",
        "is_cut = len(open_rows) > 0 and groups < saved.tokens // GROUP_TOKENS",
        "is_cut = not whole",
        ("tests/host/sessions/test_prefix.py::test_of_an_open_group_comes_what_is_wanted_of_it",),
    ),
    Mutant(
        "told-of-a-pass-that-broke-off",
        "What was told of tokens that broke off is told of those that come in their place.",
        "host/hillinfer/kv/sequence.py",
        "        self.told = None\n        self.tables.truncate(length)",
        "        self.tables.truncate(length)",
        ("tests/host/kv/test_sequence_rows.py::test_what_is_told_of_tokens_goes_with_them",),
    ),
    Mutant(
        "forgotten-rows-are-placed",
        "A pass places rows whose memory others have again.",
        "host/hillinfer/reuse/row_placing.py",
        """            left, self._waiting = list(self._of.values()), []
            for own in left:
                own.is_done = own.is_done or own.taker is None
            # The pass may be placing some, or be interrupted.
            self._changed.wait_for(lambda: all(own.is_done or own.taker is None for own in left))
            self._waiting = []
""",
        """            left = list(self._of.values())
            for own in left:
                own.is_done = own.is_done or own.taker is None
            # The pass may be placing some, or be interrupted.
            self._changed.wait_for(lambda: all(own.is_done or own.taker is None for own in left))
""",
        (f"{_PLACING}::test_rows_that_nobody_settles_are_placed_by_nobody",),
    ),
    Mutant(
        "memory-of-begun-rows-used-again",
        "A drive reads into memory that a thread which waits for a core still places rows from.",
        "host/hillinfer/reuse/row_placing.py",
        "        return is_free\n",
        "        return True\n",
        (f"{_PLACING}::test_memory_stays_whose_rows_somebody_has_begun",),
    ),
    Mutant(
        "huge-pages-for-what-does-not-come",
        "Memory of shadows that were expected and did not come is counted by nobody.",
        "host/hillinfer/shadow/arena.py",
        "if self._joined[page] and not self._is_covered(page):",
        "if False:",
        (f"{_COMING}::test_what_was_expected_and_does_not_come_takes_no_memory",),
    ),
    Mutant(
        "sheets-of-other-shapes",
        "A sheet of an extent of another shape passes for one of this.",
        "host/hillinfer/store/extent.py",
        "    if own != (shape.layers, shape.row_bytes, shape.shadow_bytes, shape.tag_bytes):",
        "    if False:",
        ("tests/host/store/test_store_damage.py::test_a_header_of_another_shape_is_none",),
    ),
    Mutant(
        "kept-memory-is-never-the-system-s",
        "Memory that nobody takes again stays this process' however short the system is.",
        "host/hillinfer/system/kept_memory.py",
        "            if self._is_resting:\n",
        "            if not self._is_resting:\n",
        (
            "tests/host/system/test_kept_memory.py::"
            "test_the_system_may_have_what_nobody_takes_for_a_while",
        ),
    ),
)
