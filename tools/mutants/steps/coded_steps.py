# SPDX-License-Identifier: Apache-2.0
"""Faults of decode steps with coded tokens: choosing, reading and attending."""

from __future__ import annotations

from mutants.mutant import Built, Mutant

_STEP = "host/hillinfer/engine/coded_step.py"
_NATIVE = "host/native/coded_step.cpp"
_SPLIT = "host/native/coded_split.cpp"
_SLOTS = "host/native/coded_slots.cpp"
_STEP_TESTS = "tests/host/engine/test_coded_step.py"
_PLACES = f"{_STEP_TESTS}::test_every_placement_gives_the_golden_models_bits"
_KINDS = f"{_STEP_TESTS}::test_every_kind_of_selection"
_LANES = "tests/host/gpu/test_coded_lanes.py"
_COLD_CALLS = "tests/host/engine/test_cold_calls.py"
_CENSUS = "tests/host/limits/test_memory_census.py"

CODED_STEPS: tuple[Mutant, ...] = (
    Mutant(
        "two-heads-of-a-lonely-tile-are-one",
        "Products of a tile without its neighbour are those of the first of two heads.",
        "host/native/avx512vnni.cpp",
        "_mm256_castsi256_si128(others)",
        "_mm256_castsi256_si128(own)",
        ("tests/host/scoring/test_aligned.py",),
        Built.NATIVE,
    ),
    Mutant(
        "tiles-without-chosen-tokens-shift-those-behind",
        "Codes of a tile that has none of some tokens are those of the next one that has.",
        "host/native/group_scores.h",
        "            Products::tiles(shape, tile + number * shape.tile_bytes(), in.arranged,\n"
        "                            in.products + first, coming.ahead());",
        "            Products::tiles(shape, tile, in.arranged,\n"
        "                            in.products + first, coming.ahead());",
        ("tests/host/scoring/test_aligned.py",),
        Built.NATIVE,
    ),
    Mutant(
        "products-of-the-first-group-weigh-all",
        "Products that were kept while choosing are those of other tokens.",
        "host/native/aligned_tokens.cpp",
        "in.products = products + group.group * shape.rows() * kGroupTokens;",
        "in.products = products;",
        (_PLACES, _KINDS),
        Built.NATIVE,
    ),
    Mutant(
        "kept-products-uncounted",
        "Products that are kept until they weigh take memory that nobody counts.",
        _STEP,
        "                self._kept.expect(kept)\n",
        "",
        (f"{_STEP_TESTS}::test_products_that_ranked_weigh_and_are_counted",),
    ),
    Mutant(
        "sets-of-steps-together-uncounted",
        "What is chosen for rows of a step together takes memory that nobody counts.",
        "host/hillinfer/native/split.py",
        "            self._counted.expect(rows.byte_count + misses.byte_count)\n",
        "",
        (f"{_CENSUS}::test_steps_together_hold_nothing_that_is_not_counted",),
    ),
    Mutant(
        "products-of-summed-queries-weigh",
        "Products of a query that is summed over its heads weigh each head's tokens.",
        "host/hillinfer/engine/budget_plan.py",
        "own if spec.rule is Rule.WEIGHT_SUM and own <=",
        "own if own <=",
        (_KINDS, f"{_STEP_TESTS}::test_products_that_ranked_weigh_and_are_counted"),
    ),
    Mutant(
        "coded-tokens-in-too-small-a-budget",
        "Tokens are coded by default where shadow and tables of codes do not fit.",
        "host/hillinfer/engine/budget_growth.py",
        "if fits and choice.settings.has_coded_tokens:",
        "if choice.settings.has_coded_tokens:",
        ("tests/host/engine/test_shadow_choice.py",),
    ),
    Mutant(
        "the-library-finds-codes-of-other-statistics",
        "The library finds codes by row number alone, whichever statistics they were coded with.",
        _SLOTS,
        "slot >= 0 && slots.numbers[slot] == number",
        "slot >= 0",
        (f"{_STEP_TESTS}::test_forks_that_took_statistics_of_their_own_find_their_own_codes",),
        Built.NATIVE,
    ),
    Mutant(
        "found-codes-give-way-before-they-are-attended-to",
        "Codes of cold tokens take the slots of codes that the library is about to attend to.",
        _NATIVE,
        "    if (!SplitAttention(variant, table, step, split, products).run(out)) {\n"
        "        return false;\n"
        "    }\n"
        "    if (split.missing_count) {\n"
        "        offer(slots, split);\n"
        "    }\n"
        "    return true;\n",
        "    if (split.missing_count) {\n"
        "        offer(slots, split);\n"
        "    }\n"
        "    return SplitAttention(variant, table, step, split, products).run(out);\n",
        (f"{_STEP_TESTS}::test_codes_that_came_do_not_push_out_what_is_attended_to",),
        Built.NATIVE,
    ),
    Mutant(
        "codes-take-the-place-of-their-equals",
        "What is offered pushes out what is wanted as much.",
        _SLOTS,
        "fresh[i].worth > lowest[i].worth",
        "fresh[i].worth >= lowest[i].worth",
        ("tests/host/shadow/test_value_codes.py",),
        Built.NATIVE,
    ),
    Mutant(
        "the-most-wanted-codes-give-way",
        "Codes give way to others in the wrong order.",
        _SLOTS,
        "return a.worth < b.worth;",
        "return a.worth > b.worth;",
        ("tests/host/shadow/test_value_codes.py",),
        Built.NATIVE,
    ),
    Mutant(
        "codes-of-a-row-that-landed-beside",
        "A token without codes is coded by the row that landed behind its own.",
        _SPLIT,
        "landed.landed_places[next] * table.row_bytes",
        "(landed.landed_places[next] + 1) * table.row_bytes",
        (f"{_STEP_TESTS}::test_tokens_that_the_file_lacks_come_as_rows",),
        Built.NATIVE,
    ),
    Mutant(
        "a-tail-s-codes-are-of-the-next-row",
        "Values of a coded token in the tail are those of the row behind its own.",
        _NATIVE,
        "table.tail + (position - table.held) * table.row_bytes",
        "table.tail + (position - table.held + 1) * table.row_bytes",
        (_KINDS, _PLACES),
        Built.NATIVE,
    ),
    Mutant(
        "shadows-are-read-once-for-each-set",
        "Sets of their own ask for streamed shadows one set after the other.",
        "host/hillinfer/engine/cold_rows.py",
        "found = self.weights.of_each(scaled, shadows(), coded)",
        "found = [self.weights.of_each(scaled, shadows(), [one])[0] for one in coded]",
        (f"{_STEP_TESTS}::test_streamed_shadows_that_only_some_sets_want",),
    ),
    Mutant(
        "what-many-wanted-is-wanted-for-ever",
        "Sums of how often codes were wanted run into infinity.",
        _SLOTS,
        "std::min(worth_of(own) + slots.step_worth, slots.most_worth)",
        "worth_of(own) + slots.step_worth",
        ("tests/host/shadow/test_value_codes.py", "tests/host/shadow/test_shortage_of_codes.py"),
        Built.NATIVE,
    ),
    Mutant(
        "exponents-of-another-token",
        "Exponents of a coded token are looked for one byte too far.",
        _NATIVE,
        "codes[i] + shape.code_row_bytes()",
        "codes[i] + shape.code_row_bytes() + 1",
        (_PLACES,),
        Built.NATIVE,
    ),
    Mutant(
        "a-floor-that-nobody-keeps",
        "The least number of exact tokens is left out.",
        "host/hillinfer/scoring/scorer.py",
        "own = settings.exact_floor, min(self._kept, length), wanted.count",
        "own = 0, min(self._kept, length), wanted.count",
        (_KINDS,),
    ),
    Mutant(
        "summed-queries-weigh-coded-tokens",
        "Under raw_sum coded tokens weigh by the sum of the queries.",
        "host/hillinfer/scoring/coded.py",
        "self.spec = replace(spec, rule=Rule.WEIGHT_SUM)",
        "self.spec = replace(spec, rule=spec.rule)",
        (f"{_STEP_TESTS}::test_the_library_does_what_python_does_part_by_part",),
    ),
    Mutant(
        "codes-of-a-broken-pass-stay",
        "What a pass that broke off began to read of the file of codes is not dropped.",
        _STEP,
        "                    self._reads.has_begun = True\n",
        "",
        (f"{_STEP_TESTS}::test_codes_that_a_pass_began_to_read_are_dropped_when_it_breaks_off",),
    ),
    Mutant(
        "a-table-that-grows-goes-while-the-library-looks",
        "What says which rows are hot is given back under the thread that lists cold ones.",
        "host/hillinfer/engine/cold_rows.py",
        "kept = hot.slot_of_row",
        "kept = None",
        (f"{_STEP_TESTS}::test_tables_that_grow_stay_while_the_library_looks",),
    ),
    Mutant(
        "exact-rows-come-as-codes",
        "Exact tokens that are cold are read of the file of codes, and their rows on demand.",
        "host/native/coded_split.cpp",
        "list(position, row, kNoNumber);",
        "list(position, row, split.segments[0].number);",
        (f"{_STEP_TESTS}::test_exact_rows_are_not_read_of_the_file_of_codes",),
        Built.NATIVE,
    ),
    Mutant(
        "cold-tokens-are-coded-into-others-places",
        "Rows that stay to be read, once codes came of a file, are coded to the first places.",
        "host/hillinfer/native/split.py",
        "            column[: len(own)] = column[own]\n",
        "            pass\n",
        (_PLACES, f"{_STEP_TESTS}::test_tokens_that_the_file_lacks_come_as_rows"),
    ),
    Mutant(
        "coded-steps-do-not-wait-for-the-newest-row",
        "A coded step of a model on a GPU looks at a row that has not come back.",
        "host/hillinfer/engine/gpu_coded_step.py",
        "        self._gpu.arrivals.settle()\n",
        "",
        (_LANES,),
    ),
    Mutant(
        "memory-for-exact-rows-is-taken-once-somebody-looks-at-them",
        "A step of a model on a GPU takes memory, for which hot rows move, behind the first run.",
        "host/hillinfer/engine/gpu_coded_step.py",
        """\
        # Before anybody looks at rows, which to take memory may move.
        together = self._together.take(len(union))
        out = query
        runs = self._gather.in_place(layer, sequence, union, step, landed)
        with closing(runs):
            for addresses in _at_once(runs, together):
""",
        """\
        out = query
        runs = self._gather.in_place(layer, sequence, union, step, landed)
        with closing(runs):
            first = [next(runs)]
            together = self._together.take(len(union))
            for addresses in _at_once((one for own in (first, runs) for one in own), together):
""",
        (f"{_LANES}::test_lanes_give_the_golden_models_bits",),
    ),
    Mutant(
        "halves-of-code-bytes-change-places",
        "A code row's high halves are unpacked as its low ones.",
        "host/hillinfer/attention/torch_coded.py",
        "torch.cat([(halves << 4) >> 4, halves >> 4], dim=3)",
        "torch.cat([halves >> 4, (halves << 4) >> 4], dim=3)",
        (_LANES,),
    ),
    Mutant(
        "rows-that-were-sent-ahead-are-held",
        "Copies to a GPU that are over stay among those that are under way.",
        "host/hillinfer/gpu/copies.py",
        "        copied.add_done_callback(self._under_way.discard)\n",
        "",
        (
            "tests/host/gpu/test_gpu_runtime.py::test_rows_that_a_layer_attended_to_do_not_stay_in_the_gpus_memory",
        ),
    ),
    Mutant(
        "codes-on-a-gpu-are-of-the-first-segments",
        "Statistics of coded tokens on a GPU are those of the first segments.",
        "host/hillinfer/gpu/attention.py",
        "[own[number].statistics for number in numbers.tolist()]",
        "[own[0].statistics for number in numbers.tolist()]",
        (_LANES,),
    ),
    Mutant(
        "a-group-has-its-first-token-alone",
        "Of a group's tokens only the first one is weighed.",
        "host/native/aligned_tokens.cpp",
        "uint64_t(1) << (positions[i] % kGroupTokens);",
        "uint64_t(1) << (positions[groups.back().first] % kGroupTokens);",
        (_PLACES,),
        Built.NATIVE,
    ),
    Mutant(
        "refused-products-are-counted-as-had",
        "Products that found no memory are never counted, whoever has it later.",
        _STEP,
        "                self._kept.expect(kept)\n                self._kept_of = groups, kept\n",
        "                self._kept_of = groups, kept\n                self._kept.expect(kept)\n",
        (f"{_STEP_TESTS}::test_products_are_counted_after_a_refusal",),
    ),
    Mutant(
        "refused-memory-is-counted-as-had",
        "What a step makes anew and found no memory for is never counted.",
        "host/hillinfer/native/split.py",
        "            self._accountant.take(Part.STAGING, more * self._token_bytes)\n"
        "            self._tokens += more\n",
        "            self._tokens += more\n"
        "            self._accountant.take(Part.STAGING, more * self._token_bytes)\n",
        (f"{_STEP_TESTS}::test_products_are_counted_after_a_refusal",),
    ),
    Mutant(
        "rows-that-did-not-land-are-there",
        "What a thread of the library could not read counts as there.",
        "host/hillinfer/drive/read_engines.py",
        "        if table.landed < table.count:\n            # What came",
        "        if table.landed > table.count:\n            # What came",
        ("tests/host/drive/test_row_lander.py",),
    ),
    Mutant(
        "huge-pages-beyond-a-buffer",
        "A buffer asks for a huge page that it does not fill, which nobody counts.",
        "host/hillinfer/drive/files.py",
        "mapping.madvise(advice, start, size // HUGE_BYTES * HUGE_BYTES)",
        "mapping.madvise(advice, start)",
        ("tests/host/drive/test_cold_file.py",),
    ),
    Mutant(
        "buffers-in-small-pages",
        "A buffer that drives read into asks for no huge page.",
        "host/hillinfer/drive/files.py",
        "        mapping.madvise(advice, start, size",
        "        mapping.madvise(mmap.MADV_NOHUGEPAGE, start, size",
        ("tests/host/drive/test_cold_file.py",),
    ),
    Mutant(
        "buffers-of-codes-stay-in-use",
        "Once attention has looked at codes of a file, nothing is read to their buffer any more.",
        "host/hillinfer/engine/coded_call.py",
        "                self._file.let_go(self._layer, id(self._sequence))\n",
        "                pass\n",
        (_STEP_TESTS,),
    ),
    Mutant(
        "rows-of-coded-tokens-lie-on-exact-ones",
        "Rows that are read to be coded go where exact rows are attended to.",
        "host/hillinfer/engine/cold_rows.py",
        "memory = self._buffers.behind(used) if used else self._buffers.take_both()",
        "memory = self._buffers.take_both()",
        (_STEP_TESTS, _COLD_CALLS),
    ),
    Mutant(
        "codes-that-did-not-come-are-attended-to",
        "Tokens whose codes cannot be read of the file are not read as rows either.",
        "host/hillinfer/engine/coded_call.py",
        "        split.take_back(filed.only(~filled))\n",
        "        split.take_back(filed.only(filled & ~filled))\n",
        (_STEP_TESTS,),
    ),
    Mutant(
        "codes-on-their-way-are-waited-for-apart",
        "A layer whose codes were begun to be read looks, waits and attends in three calls.",
        "host/hillinfer/engine/coded_call.py",
        "split.table.coming = codes\n",
        "split.table.coming = None\n",
        (_COLD_CALLS,),
    ),
    Mutant(
        "what-did-not-come-is-attended-to",
        "Attention looks at what was read ahead, whether or not it came as it was written.",
        "host/native/lander.cpp",
        "    return coming.is_whole;\n",
        "    return true;\n",
        (_COLD_CALLS,),
        Built.NATIVE,
    ),
    Mutant(
        "codes-of-the-token-before",
        "Codes on their way are taken for those of the token behind their own.",
        "host/native/coded_split.cpp",
        "records[size_t(i)] = next;",
        "records[size_t(i)] = next ? next - 1 : 0;",
        (_COLD_CALLS,),
        Built.NATIVE,
    ),
    Mutant(
        "what-was-not-read-ahead-comes-call-by-call",
        "Rows and codes that were not read ahead are landed, coded and attended to by a call each.",
        "host/hillinfer/engine/cold_rows.py",
        "is_here = self._land_all(entry, sequence, split, coming)",
        "is_here = False",
        (_COLD_CALLS,),
    ),
    Mutant(
        "missing-rows-lie-at-the-first-exact-ones",
        "Exact rows that were landed are taken for the first ones of all that are exact.",
        _NATIVE,
        "split.exact->addresses[landing.numbers[i]] = row;",
        "split.exact->addresses[i] = row;",
        (_COLD_CALLS, _PLACES),
        Built.NATIVE,
    ),
    Mutant(
        "hits-are-noted-of-rows-that-did-not-come",
        "Where rows that were read ahead have to be read again, hits count twice.",
        "host/hillinfer/engine/coded_call.py",
        "        if not split.misses.is_looked_for:\n            return False\n",
        "",
        (_COLD_CALLS,),
    ),
    Mutant(
        "a-choice-is-ended-apart",
        "Who lists what is cold of a choice waits for it in a call before.",
        "host/hillinfer/engine/coded_call.py",
        "return self._read(self._choice.address)",
        "self._choice.end()\n                return self._read(self._choice.address)",
        (_COLD_CALLS,),
    ),
    Mutant(
        "a-choice-is-nobodys-after-an-interrupt",
        "Ctrl-C while its layer's rows move leaves a thread writing to memory that is used again.",
        "host/hillinfer/engine/coded_call.py",
        "return self._read(self._choice.address)",
        "own, self._choice = self._choice, AsideChoice()\n"
        "                return self._read(own.address)",
        (_COLD_CALLS,),
    ),
    Mutant(
        "a-choice-that-nobody-kept-goes-on",
        "Ctrl-C before a choice is kept leaves a thread writing to memory that is freed.",
        "host/hillinfer/engine/coded_call.py",
        "        with suppress(Exception):\n            self._choice.end()",
        "        with suppress(Exception):\n            self._choice.address",
        (_COLD_CALLS,),
    ),
    Mutant(
        "what-threads-read-at-once-has-one-line",
        "A trace shows rows and codes that two threads read at once on the line of who waits.",
        "host/hillinfer/trace/trace_file.py",
        "threading.get_ident() if thread is None else thread",
        "threading.get_ident()",
        (_COLD_CALLS,),
    ),
    Mutant(
        "a-traced-run-says-nothing-of-attention",
        "A trace lacks attention to what a call of the library has landed.",
        "host/hillinfer/engine/coded_call.py",
        "            if is_here and self._recorder is not SILENT:",
        "            if not is_here and self._recorder is not SILENT:",
        (_COLD_CALLS,),
    ),
    Mutant(
        "memory-of-a-shorter-text-is-chosen-in",
        "Tokens are chosen in memory that was made for fewer of them.",
        "host/hillinfer/engine/coded_call.py",
        "while (split := self._spare.pop()).room != room:",
        "while (split := self._spare.pop()).room > room:",
        ("tests/host/engine/test_split_pool.py",),
    ),
    Mutant(
        "lists-of-layers-are-nobodys-memory",
        "M0 does not know of what layers choose in.",
        "host/hillinfer/engine/coded_call.py",
        "with self._accountant.taking(Part.STAGING, byte_count):",
        "with self._accountant.taking(Part.STAGING, 0):",
        ("tests/host/engine/test_split_pool.py",),
    ),
    Mutant(
        "lists-that-are-gone-are-counted",
        "What layers chose in stays in M0 when nobody has it any more.",
        "host/hillinfer/engine/coded_call.py",
        "weakref.finalize(split, self._accountant.give, Part.STAGING, byte_count)",
        "weakref.finalize(split, self._accountant.give, Part.STAGING, 0)",
        ("tests/host/engine/test_split_pool.py",),
    ),
    Mutant(
        "who-attends-waits-for-who-scores",
        "A layer attends once the next one is chosen, where another thread scores.",
        "host/hillinfer/engine/coded_step.py",
        "words, kept = self._shadow.settled(layer, sequence, length) or (None, None)",
        "words = kept = None",
        (_COLD_CALLS,),
    ),
    Mutant(
        "a-segment-without-codes-weighs-every-layer-in-python",
        "While some values have no codes no layer's weights are made by the call that attends.",
        "host/hillinfer/engine/coded_step.py",
        "                if self._shadow.described(layer, sequence, length) is None:\n"
        "                    shadows",
        "                if True:\n                    shadows",
        (_COLD_CALLS,),
    ),
)
