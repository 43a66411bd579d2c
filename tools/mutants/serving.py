# SPDX-License-Identifier: Apache-2.0
"""Faults in the server: whose turn it is, who is let in, what is sent."""

from __future__ import annotations

from mutants.mutant import Mutant

_TESTS = "tests/host/serve"

SERVING: tuple[Mutant, ...] = (
    Mutant(
        "first-come-reads-first",
        "A prompt is read to its end before the next one gets a chunk.",
        "host/hillinfer/serve/scheduler.py",
        "return min(reading, key=lambda job: job.last_turn)",
        "return reading[0]",
        (f"{_TESTS}/test_together.py::test_a_short_prompt_does_not_wait_for_a_long_one",),
    ),
    Mutant(
        "who-left-is-answered",
        "The work of a client that has left goes on to its end.",
        "host/hillinfer/serve/scheduler.py",
        "            if job.is_cancelled:\n",
        "            if False:\n",
        (f"{_TESTS}/test_together.py::test_who_is_cancelled_gets_no_pass_more",),
    ),
    Mutant(
        "nobody-looks-for-who-left",
        "Whether a client is still there is not asked while its answer is made whole.",
        "host/hillinfer/serve/http/streams.py",
        "await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)\n"
        "        if work.done():\n            return work.result()\n        raise GoneError",
        "return await work",
        (f"{_TESTS}/test_together.py::test_who_leaves_ends_the_work[answering-False]",),
    ),
    Mutant(
        "tenants-share-prompts",
        "All API keys find each other's stored prompts.",
        "host/hillinfer/reuse/model_prompts.py",
        "twin._salt, twin._opened = salt, None",
        "twin._opened = None",
        (f"{_TESTS}/test_together.py::test_tenants_find_nothing_of_each_other",),
    ),
    Mutant(
        "stop-text-in-one-token-alone",
        "A stop text that is spread over tokens begins to come.",
        "host/hillinfer/serve/answers.py",
        "return self._out(len(self._held) - self._may_begin(), None)",
        "return self._out(len(self._held), None)",
        (f"{_TESTS}/test_options.py::test_a_stop_text_ends_an_answer_and_never_comes",),
    ),
    Mutant(
        "rows-of-a-step-swapped",
        "Answers that step together get each other's logits.",
        "host/hillinfer/generate/answering.py",
        "generation._logits = output.logits[row, -1]",
        "generation._logits = output.logits[row - 1, -1]",
        (f"{_TESTS}/test_together.py::test_answers_together_are_those_of_each_alone",),
    ),
    Mutant(
        "one-failure-ends-all",
        "A row that fails in a step of several ends the requests of all.",
        "host/hillinfer/serve/scheduler.py",
        "            if len(running) == 1:\n                self._fail(running[0].job, error)\n",
        "            if running:\n                for one in running:\n"
        "                    self._fail(one.job, error)\n",
        (f"{_TESTS}/test_together.py::test_a_row_that_fails_leaves_the_others_alone",),
    ),
    Mutant(
        "door-without-a-key",
        "Other machines are let in without a key.",
        "host/hillinfer/serve/rules.py",
        "if not self.is_local and not self.keys:",
        "if False:",
        (f"{_TESTS}/test_doors.py::test_no_door_stands_open",),
    ),
    Mutant(
        "places-are-told",
        "Clients are told of files and directories of the server's machine.",
        "host/hillinfer/serve/refusals.py",
        "message = row.public or Failure.of(error).message",
        "message = Failure.of(error).message",
        (f"{_TESTS}/test_doors.py::test_what_names_places_of_the_machine_is_not_told",),
    ),
    Mutant(
        "bodies-without-a-length",
        "A body that names no length may have any.",
        "host/hillinfer/serve/http/gate.py",
        "                if taken > most:\n",
        "                if False:\n",
        (f"{_TESTS}/test_doors.py::test_a_body_that_is_too_large",),
    ),
    Mutant(
        "texts-begin-turns",
        "Special tokens in messages are obeyed.",
        "host/hillinfer/serve/chats.py",
        "TextEncoder(tokenizer, SpecialTokens.TEXT)",
        "TextEncoder(tokenizer, SpecialTokens.CONTROL)",
        (f"{_TESTS}/test_routes.py::test_special_tokens_of_the_user_are_characters",),
    ),
    Mutant(
        "files-of-everybody",
        "A file is told and read to whoever knows its name.",
        "host/hillinfer/serve/documents.py",
        "if found is None or found.tenant != tenant:",
        "if found is None:",
        (f"{_TESTS}/test_files.py::test_nobody_has_files_of_another_key",),
    ),
    Mutant(
        "documents-take-places",
        "A document that is read ahead keeps requests waiting to its end.",
        "host/hillinfer/serve/scheduler.py",
        "reading = sum(not job.is_background for job in self._reading)",
        "reading = len(self._reading)",
        (f"{_TESTS}/test_files.py::test_who_asks_does_not_wait_for_a_document",),
    ),
    Mutant(
        "deleted-files-are-read",
        "A file that was deleted is read to its end.",
        "host/hillinfer/serve/documents.py",
        "        if job is not None:\n            job.cancel()\n",
        "",
        (f"{_TESTS}/test_files.py::test_a_file_that_is_deleted_is_read_no_further",),
    ),
    Mutant(
        "files-readable-by-all",
        "Files of clients can be read by every user of the machine.",
        "host/hillinfer/serve/documents.py",
        "os.O_TRUNC, 0o600)",
        "os.O_TRUNC, 0o644)",
        (f"{_TESTS}/test_files.py::test_kept_files_are_there_after_a_restart",),
    ),
    Mutant(
        "conversation-read-anew",
        "Each turn of a conversation reads all that was said before.",
        "host/hillinfer/cli/serving/conversation.py",
        "        if generation is not None:\n            rows",
        "        if False:\n            rows",
        (f"{_TESTS}/test_chat.py::test_turns_go_on_in_one_cache",),
    ),
    Mutant(
        "answer-of-another-turn-stays",
        "What the cache has behind the words in common stays where the conversation goes on.",
        "host/hillinfer/cli/serving/conversation.py",
        "                generation.cache.crop(held - len(own))\n",
        "",
        (f"{_TESTS}/test_chat.py::test_a_question_about_a_text_is_answered_as_generate_does",),
    ),
)
