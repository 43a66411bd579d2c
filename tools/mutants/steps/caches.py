# SPDX-License-Identifier: Apache-2.0
"""Faults in what a cache is when something ended in the middle of what was done with it."""

from __future__ import annotations

from mutants.mutant import Mutant

_HF = "host/hillinfer/hf"
_TESTS = "tests/host"
_CUT = f"{_TESTS}/faults/test_cut_batches.py"
_STRICT = f"{_TESTS}/faults/test_strict_stores.py"
_ENDS = f"{_STRICT}::test_a_cache_whose_rows_could_not_be_stored_ends"

CACHES: tuple[Mutant, ...] = (
    Mutant(
        "cropped-twice-where-rows-come-back",
        "A crop that is made again behind lost rows counts from what it has cut already.",
        f"{_HF}/cache.py",
        "if length is None:",
        "if True:",
        (f"{_CUT}::test_rows_that_are_computed_between_are_cut_once",),
    ),
    Mutant(
        "half-cut-batch",
        "A batch that a crop broke off within goes on with rows of different lengths.",
        f"{_HF}/cache.py",
        "if self._batch.is_even:",
        "if True:",
        (f"{_CUT}::test_what_comes_next_cuts_what_a_drive_that_failed_left",),
    ),
    Mutant(
        "prompts-end-in-others-steps",
        "The last token of a prompt selects where it is read beside a single one.",
        f"{_HF}/joined_cache.py",
        "if together == 1 < longest_row:",
        "if together == 1 < longest_row - 1000:",
        (
            f"{_TESTS}/hf/test_joined_caches.py::"
            "test_a_prompt_beside_one_new_token_is_refused_and_nothing_is_lost",
        ),
    ),
    Mutant(
        "refused-fork-keeps-rows",
        "Rows of a batch's fork that the budget refused in the middle are never freed.",
        f"{_HF}/batch.py",
        """        except BaseException:
            copy.clear()
            raise
""",
        """        except BaseException:
            raise
""",
        (
            f"{_TESTS}/hf/test_cache_operations.py::"
            "test_a_fork_of_a_batch_that_the_budget_refuses_keeps_none_of_its_rows",
        ),
    ),
    Mutant(
        "cache-that-cannot-leave",
        "A cache whose rows could not be stored never leaves its engine, which stays open.",
        f"{_HF}/engine.py",
        """        finally:
            family.lose()
            self._members.pop()
            self._close_after_the_last()
""",
        """        except ZeroDivisionError:
            pass
        else:
            family.lose()
            self._members.pop()
            self._close_after_the_last()
""",
        (f"{_ENDS}[close-True]",),
    ),
    Mutant(
        "failure-that-keeps-caches",
        "A failed write of rows keeps every cache that met it, by the trace of its error.",
        "host/hillinfer/kv/cold_store.py",
        "raise copy.copy(self._failure) from self._failure",
        "raise self._failure",
        (f"{_ENDS}[drop-True]",),
    ),
    Mutant(
        "observed-queries-in-their-chunk",
        "Observed queries are a view, which keeps all queries of their chunk.",
        "host/hillinfer/engine/runtime.py",
        'last.to("cpu", torch.float32, copy=True)',
        'last.to("cpu", torch.float32)',
        (
            f"{_TESTS}/hf/test_cache_operations.py::"
            "test_queries_that_are_observed_do_not_keep_those_of_their_chunk",
        ),
    ),
    Mutant(
        "joined-new-tokens-cut",
        "Of new tokens alone a shorter one of joined caches is given some, or none.",
        f"{_HF}/joined_cache.py",
        "start if is_whole else 0 :",
        "start:",
        (f"{_TESTS}/hf/test_joined_caches.py::test_generate_goes_on_from_new_tokens_alone",),
    ),
    Mutant(
        "token-of-a-step-that-never-began",
        "A step that fails before its first layer leaves its token among those that were read.",
        f"{_HF}/cache_pass.py",
        """        self._plan, self._pass, self._fresh = plan, use, {}
        self.lengths.begin(plan.tokens)
        if plan""",
        """        if plan.tokens == 1:
            self._end_recordings(plan)
        self._plan, self._pass, self._fresh = plan, use, {}
        self.lengths.begin(plan.tokens)
        if plan""",
        (
            f"{_TESTS}/hf/test_broken_forward.py::"
            "test_a_step_that_fails_before_its_first_layer_leaves_no_token",
        ),
    ),
    Mutant(
        "what-is-added-to-scores-is-left-out",
        "A model that adds a bias of its own to its scores is answered without it.",
        "host/hillinfer/hf/attention.py",
        "if attention_mask is not None and attention_mask.dim() != 2:",
        "if False:",
        (
            f"{_TESTS}/hf/test_refused_models.py::"
            "test_a_model_whose_attention_is_its_own_is_refused_by_its_first_pass"
            "[doge_that_adds_to_its_scores]",
        ),
    ),
    Mutant(
        "padding-that-may-not-grow",
        "`generate` refuses more padding of a row without tokens.",
        "host/hillinfer/hf/batch.py",
        "            fits = own == pad or not sequence.token_ids\n",
        "            fits = own == pad\n",
        (
            "tests/host/hf/test_left_padding.py::"
            "test_generate_goes_on_where_a_row_of_the_cache_has_no_tokens_yet",
        ),
    ),
    Mutant(
        "padding-that-may-move",
        "`generate` goes on behind other tokens than the cache holds, where padding is as it was.",
        "host/hillinfer/hf/batch.py",
        "            if not fits or given != sequence.token_ids:\n",
        "            if not fits:\n",
        (
            "tests/host/hf/test_left_padding.py::"
            "test_generate_goes_on_where_a_row_of_the_cache_has_no_tokens_yet",
        ),
    ),
    Mutant(
        "padding-becomes-tokens",
        "What a row without tokens had as padding may be called tokens later.",
        "host/hillinfer/hf/batch.py",
        "bool(sequence.token_ids) or pads[i] < start",
        "bool(sequence.token_ids)",
        (
            "tests/host/hf/test_left_padding.py::"
            "test_padding_of_a_row_without_tokens_may_grow_but_not_become_tokens",
        ),
    ),
    Mutant(
        "a-tokenizer-taken-for-an-argument-of-attention",
        "Stop strings are refused for the tokenizer that `generate` hands on to the model.",
        "host/hillinfer/hf/attention.py",
        '        "tokenizer",  # What',
        "        # What",
        (f"{_TESTS}/hf/test_refused_uses.py::test_stop_strings",),
    ),
)
