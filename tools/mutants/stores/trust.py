# SPDX-License-Identifier: Apache-2.0
"""Faults that an attack found, each as one line that brings it back."""

from __future__ import annotations

from mutants.mutant import Mutant

_HOST = "host/hillinfer"
_TESTS = "tests/host"
_FOLDERS = f"{_TESTS}/models/test_hostile_folders.py::test_a_hostile_folder_ends_in_one_line"

TRUST: tuple[Mutant, ...] = (
    Mutant(
        "modules-from-the-current-directory",
        "Worker processes take modules from the directory that a command is called from.",
        "tools/hillinfer_bench/replay/processes.py",
        'os.environ[_SAFE_PATH] = "1"',
        'os.environ[_SAFE_PATH] = ""',
        (f"{_TESTS}/models/test_planted_code.py::test_workers_run_nothing_planted",),
    ),
    Mutant(
        "headers-not-compared",
        "Tensors are not compared with the config before a model is loaded.",
        f"{_HOST}/models/loader.py",
        "            check_stored(skeleton, tensors, source.path)",
        "            pass",
        (f"{_FOLDERS}[other shape]", f"{_FOLDERS}[tensor missing]"),
    ),
    Mutant(
        "any-variable-of-an-image",
        "What lies beside an xclbin sets any variable.",
        f"{_HOST}/devices/xrt/process.py",
        "    if name != _MODE and name not in _PATHS:",
        "    if False:",
        (
            f"{_TESTS}/devices/test_environment.py"
            "::test_another_variable_is_refused_with_its_name[LD_AUDIT]",
        ),
    ),
    Mutant(
        "short-context-gets-its-share-alone",
        "A share of a short context is less than what it needs.",
        f"{_HOST}/engine/budget_growth.py",
        "        works = working_bytes(shape, settings, tokens, wanted, sequences, beside_bytes)",
        "        works = wanted",
        (
            f"{_TESTS}/engine/test_small_plans.py",
            f"{_TESTS}/hf/test_small_contexts.py"
            "::test_the_defaults_work_and_the_length_says_nothing_about_the_answer",
        ),
    ),
    Mutant(
        "special-tokens-obeyed",
        "Special tokens in documents are control tokens.",
        f"{_HOST}/generate/special_tokens.py",
        "        if self._reading is SpecialTokens.CONTROL or not self._may_hold_control(text):",
        "        if self._reading is not None:",
        (f"{_TESTS}/generate/test_special_tokens.py::test_planted_tokens_are_characters",),
    ),
    Mutant(
        "dead-reader-is-success",
        "A command whose reader has gone ends with 0.",
        f"{_HOST}/cli/ending.py",
        "        return ExitStatus.NO_READER",
        "        return ExitStatus.DONE",
        (f"{_TESTS}/cli/test_ending.py", f"{_TESTS}/cli/test_process.py"),
    ),
    Mutant(
        "reports-open-to-others",
        "Whoever has an account on the machine reads questions and answers.",
        f"{_HOST}/system/files.py",
        "_FILE_MODE = 0o600",
        "_FILE_MODE = 0o644",
        (f"{_TESTS}/cli/test_places.py",),
    ),
    Mutant(
        "cache-open-to-others",
        "Others may enter the folder of models and cold files.",
        f"{_HOST}/system/files.py",
        "_FOLDER_MODE = 0o700",
        "_FOLDER_MODE = 0o755",
        (f"{_TESTS}/system/test_user_cache.py",),
    ),
    Mutant(
        "changed-rows-pass",
        "Bytes that a drive returns otherwise than they were written are attended to.",
        f"{_HOST}/drive/checksums.py",
        "        return int(rows[differs.argmax()]) if differs.any() else None",
        "        return None",
        (f"{_TESTS}/faults/test_changed_rows.py",),
    ),
    Mutant(
        "threads-in-no-order",
        "Two threads use what forks share at the same time.",
        f"{_HOST}/hf/engine.py",
        "        while (first := self._first()) is not use:",
        "        while (first := self._first()) is None:",
        (
            f"{_TESTS}/hf/test_threads.py::test_every_thread_gets_the_answer_that_it_would_get_alone",
        ),
    ),
    Mutant(
        "garbage-is-never-collected-again",
        "Whoever looks for another thread's use leaves the garbage collector off.",
        f"{_HOST}/hf/engine.py",
        "            if collects:\n                gc.enable()\n",
        "            pass\n",
        (f"{_TESTS}/hf/test_dropped_caches.py",),
    ),
    Mutant(
        "another-attention-passes",
        "An attention implementation that was changed while attached attends to nothing of ours.",
        f"{_HOST}/hf/attention.py",
        "    if module.config._attn_implementation != NAME:",
        "    if False:",
        (f"{_TESTS}/hf/test_untold_passes.py::test_another_attention_implementation",),
    ),
    Mutant(
        "tokens-of-no-numbers",
        "A token is chosen from logits that are no numbers.",
        f"{_HOST}/generate/tokens.py",
        "        if not math.isfinite(float(logits.max())):",
        "        if False:",
        (f"{_TESTS}/generate/test_token_chooser.py",),
    ),
    Mutant(
        "interrupted-pass-goes-on",
        "A pass that Ctrl-C broke off keeps what its caller has alive.",
        f"{_HOST}/hf/cache_pass.py",
        "            self._pass.end()",
        "            pass",
        (f"{_TESTS}/hf/test_broken_forward.py::test_an_interrupted_generate_keeps_nothing_alive",),
    ),
    Mutant(
        "template-joins-tokens",
        "A chat template makes control tokens of what it leaves around a part of the user's text.",
        f"{_HOST}/generate/prompt.py",
        "            self._encoder.check_same_control(text, other)",
        "            pass",
        (
            f"{_TESTS}/generate/test_special_tokens.py"
            "::test_a_template_that_makes_tokens_of_the_text_is_refused",
        ),
    ),
    Mutant(
        "report-lost-after-the-answer",
        "What strikes while HillInfer is taken off the model costs the report.",
        f"{_HOST}/cli/run.py",
        "            attached.close()\n",
        "        attached.close()\n",
        (f"{_TESTS}/cli/test_ending.py::test_what_strikes_after_the_answer_costs_neither",),
    ),
    Mutant(
        "report-over-the-weights",
        "An output replaces a file of the model or of a session.",
        f"{_HOST}/system/files.py",
        "            if other != option and any(one.is_relative_to(whole) for one in written):",
        "            if False:",
        (f"{_TESTS}/cli/test_places.py::test_nothing_is_written_into_what_another_option_names",),
    ),
    Mutant(
        "signals-after-imports",
        "A signal while the command is imported is a traceback.",
        "host/hillinfer_command.py",
        "    _take(_end_unbegun)",
        "    pass",
        (f"{_TESTS}/cli/test_entry.py::test_a_signal_while_the_command_is_imported",),
    ),
    Mutant(
        "ties-not-kept",
        "Weights that the config ties and that differ are used apart.",
        f"{_HOST}/models/loader.py",
        "        check_ties(self.skeleton, model, self.source.path)",
        "        pass",
        (f"{_FOLDERS}[tied and apart]",),
    ),
    Mutant(
        "address-space-or-nothing",
        "A cache is refused where address space for the longest context is not there.",
        f"{_HOST}/kv/hot_pools.py",
        "                if most <= least:",
        "                if most > 0:",
        (
            f"{_TESTS}/kv/test_hot_pools.py"
            "::test_address_space_for_growth_is_taken_as_far_as_it_goes",
        ),
    ),
)
