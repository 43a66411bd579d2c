# SPDX-License-Identifier: Apache-2.0
"""Faults in what a server does around its answers: it starts, takes files, sends, ends."""

from __future__ import annotations

from mutants.mutant import Mutant

_TESTS = "tests/host/serve"
_FETCHED = "tests/host/models/test_fetch_ended.py::test_nothing_is_left"
_DELETED = "test_a_file_that_is_deleted_while_it_is_written_does_not_stay"
_RUNNING = "host/hillinfer/serve/http/running.py"
_ENDS = f"{_TESTS}/test_early_end.py"
_STREAMS = "host/hillinfer/serve/http/streams.py"
_EVENTS = f"{_TESTS}/test_stream_events.py"
_APP = "host/hillinfer/serve/http/app.py"
_OTHERS = (f"{_TESTS}/test_hostile.py::test_others_are_answered_while_many_tokens_become_a_text",)

SERVER_LIFE: tuple[Mutant, ...] = (
    Mutant(
        "fetched-where-no-signal-comes",
        "A server fetches its model in the thread that is to use it, which no signal ends.",
        "host/hillinfer/cli/serving/serve.py",
        "        opening = partial(request.opened, request.located())\n",
        "        opening = lambda: request.opened(request.located())\n",
        (f"{_FETCHED}[serve-SIGTERM]",),
    ),
    Mutant(
        "fetching-unsaid",
        "What fetching says shows once the model is there.",
        "host/hillinfer/cli/serving/serve.py",
        "        return ModelSource.locate(self.model, error_console().print)\n",
        "        with panics_unsaid():\n"
        "            return ModelSource.locate(self.model, error_console().print)\n",
        (f"{_FETCHED}[chat-SIGTERM]",),
    ),
    Mutant(
        "fetched-for-a-taken-port",
        "A server fetches its model before it says that its port is taken.",
        "host/hillinfer/cli/serving/serve.py",
        "    check_address(request.rules)\n",
        "",
        (f"{_TESTS}/test_doors.py::test_a_port_that_is_taken_is_said_before_a_model_is_fetched",),
    ),
    Mutant(
        "an-ignored-signal-ends-a-server",
        "A server that was started to ignore SIGINT ends by it.",
        _RUNNING,
        "for one in _SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]",
        "for one in _SIGNALS]",
        (f"{_ENDS}::test_a_signal_that_it_was_started_to_ignore_is_ignored",),
    ),
    Mutant(
        "a-fetch-outlives-its-signal",
        "A signal waits until a model of the hub is there.",
        "host/hillinfer/models/sources.py",
        "            end_session(process, place)\n",
        "            process.wait()\n",
        ("tests/host/models/test_hub_fetched.py::test_a_signal_ends_it",),
    ),
    Mutant(
        "any-refusal-is-a-failure",
        "A model that the hub does not have is told as a fault of the network.",
        "host/hillinfer/models/hub_child.py",
        "came, said = Came.REFUSED, str(error)",
        "came, said = Came.FAILED, str(error)",
        ("tests/host/models/test_hub_fetched.py::test_a_model_that_the_hub_does_not_have",),
    ),
    Mutant(
        "deleted-while-written-stays",
        "A file that is deleted while it is written lies in the directory of files afterwards.",
        "host/hillinfer/serve/documents.py",
        "            if not self._is_known(document.name):\n",
        "            if False:\n",
        (f"{_TESTS}/test_files.py::{_DELETED}",),
    ),
    Mutant(
        "deleted-while-written-is-read",
        "A file that is deleted while it is written is read into the store all the same.",
        "host/hillinfer/serve/documents.py",
        "            if document.name not in self._known:\n",
        "            if False:\n",
        (f"{_TESTS}/test_files.py::{_DELETED}",),
    ),
    Mutant(
        "readers-are-cut",
        "An answer that its reader has not taken a second after the end was asked for is cut.",
        _RUNNING,
        "time.monotonic() < max(least, until)",
        "time.monotonic() < least",
        (f"{_ENDS}::test_an_answer_that_its_reader_has_not_taken_yet_is_sent_to_its_end",),
    ),
    Mutant(
        "a-second-end-waits-for-readers",
        "A reader that takes nothing keeps a server that is told to end a second time.",
        _RUNNING,
        "                until = least\n",
        "                pass\n",
        (f"{_ENDS}::test_a_second_end_waits_for_no_reader",),
    ),
    Mutant(
        "two-signals-of-one-moment-are-two",
        "SIGINT and SIGTERM of one moment end what a server has under way.",
        _RUNNING,
        "            if now - last >= _ONE_END_SECONDS:\n",
        "            if now > last:\n",
        (f"{_ENDS}::test_signals_of_one_moment_are_one_end",),
    ),
    Mutant(
        "silent-while-the-model-goes-on",
        "A stream says nothing while tokens come of which nothing is told yet.",
        _STREAMS,
        "            if sent or time.monotonic() >= due:\n"
        '                yield held + sent or comment(f"ping {int(time.time())}")\n'
        '                held, due = b"", time.monotonic() + self._ping_seconds\n'
        "            told = await self._mailbox.get(due - time.monotonic())\n",
        "            if sent or told is None:\n"
        '                yield held + sent or comment(f"ping {int(time.time())}")\n'
        '                held = b""\n'
        "            told = await self._mailbox.get(_HELD_SECONDS if held else 15.0)\n",
        (f"{_EVENTS}::test_a_stream_pings_while_a_call_is_made",),
    ),
    Mutant(
        "progress-waits-for-more-progress",
        "How far a prompt is read is told once no more of it comes for a moment.",
        _STREAMS,
        "                if not held:\n"
        "                    due = min(due, time.monotonic() + _HELD_SECONDS)\n",
        "                due = time.monotonic() + _HELD_SECONDS\n",
        (f"{_EVENTS}::test_progress_that_comes_often_is_told_while_a_prompt_is_read",),
    ),
    Mutant(
        "comments-alone-are-whole",
        "A comment arrives whole and alone, and clients that strip it lose what is behind it.",
        _STREAMS,
        'is_begun = b"data: " not in data',
        "is_begun = False",
        (f"{_EVENTS}::test_a_comment_behind_which_nothing_comes_is_sent",),
    ),
    Mutant(
        "echo-before-all-others",
        "Nobody is answered while the text of a prompt's tokens is made.",
        _APP,
        "await run_in_threadpool(_prompt, served, asked)",
        "_prompt(served, asked)",
        _OTHERS,
    ),
    Mutant(
        "tokens-before-all-others",
        "Nobody is answered while a text is made of tokens.",
        _APP,
        'await run_in_threadpool(_text, self._named(fields.text("model")), fields)',
        '_text(self._named(fields.text("model")), fields)',
        _OTHERS,
    ),
    Mutant(
        "a-text-of-any-tokens",
        "A text is made of however many tokens a client sends.",
        "host/hillinfer/serve/chats.py",
        "        if len(ids) > self._context_tokens:\n",
        "        if len(ids) > 1 << 30:\n",
        (f"{_TESTS}/test_hostile.py::test_more_tokens_than_the_context_become_no_text",),
    ),
    Mutant(
        "no-tools-without-a-system-role",
        "Tools are refused where a template knows no system message.",
        "host/hillinfer/serve/chats.py",
        "        if others is not None:\n            with",
        "        if others is None:\n            with",
        (
            f"{_TESTS}/test_formats.py::"
            "test_tools_are_told_where_no_template_knows_a_system_message",
        ),
    ),
    Mutant(
        "clients-are-told-what-commands-can-do",
        "A client whose chat a template does not take is told of an option of a command.",
        "host/hillinfer/serve/chats.py",
        "take this chat ({error.reason})",
        "take this chat ({error})",
        (
            f"{_TESTS}/test_formats.py::"
            "test_a_chat_that_no_template_takes_is_refused_with_what_a_client_can_do",
        ),
    ),
    Mutant(
        "any-temperature",
        "Logits are divided by what leaves no numbers of them.",
        "host/hillinfer/generate/tokens.py",
        "        if 0 < self.temperature < _COLDEST:\n",
        "        if self.temperature < 0:\n",
        (
            "tests/host/cli/test_odd_values.py::"
            "test_a_temperature_that_no_logit_can_be_divided_by_is_named",
        ),
    ),
    Mutant(
        "likeliest-without-the-one-that-came",
        "The likeliest tokens of a text lack the one that came.",
        "host/hillinfer/serve/http/wire.py",
        "likely = (*chosen.top, Likely(chosen.token_id, chosen.logprob))",
        "likely = chosen.top",
        (
            f"{_TESTS}/test_options.py::"
            "test_the_token_that_came_is_told_with_the_likeliest_of_a_text",
        ),
    ),
    Mutant(
        "refusals-logged-as-defects",
        "The log tells of a request that is refused late as of a defect.",
        "host/hillinfer/serve/http/telemetry.py",
        "        if isinstance(error, ApiError):\n",
        "        if error is None:\n",
        (f"{_TESTS}/test_doors.py::test_a_request_that_takes_too_long",),
    ),
    Mutant(
        "a-rate-of-what-was-there",
        "What a conversation's cache has counts as read.",
        "host/hillinfer/cli/serving/conversation.py",
        'self._view.stage("reading", len(ids), found)',
        'self._view.stage("reading", len(ids))',
        (f"{_TESTS}/test_chat.py::test_what_the_cache_has_is_no_part_of_a_readings_rate",),
    ),
    Mutant(
        "a-talk-with-a-drive-that-was-full",
        "A conversation whose drive was full goes on with the engine that keeps what failed.",
        "host/hillinfer/cli/serving/conversation.py",
        "                self._has_failed_drive = True\n",
        "",
        (f"{_TESTS}/test_chat.py::test_a_drive_that_has_room_again_is_used_again",),
    ),
    Mutant(
        "a-deleted-file-is-empty",
        "A file that is deleted while a message names it is an empty text.",
        "host/hillinfer/serve/documents.py",
        "                if name not in self._texts:\n",
        "                if not self._texts.setdefault(name, ''):\n                    return ''\n"
        "                if name not in self._texts:\n",
        (
            f"{_TESTS}/test_hostile.py::"
            "test_a_file_that_goes_while_it_is_named_is_no_empty_text[in memory]",
        ),
    ),
    Mutant(
        "a-text-that-begins-anew",
        "The answer to a text loses the space that it begins with, of tokenizers of Llama's kind.",
        "host/hillinfer/serve/scheduler.py",
        "                job.before,\n",
        "",
        (f"{_TESTS}/test_options.py::test_a_text_goes_on_with_its_space",),
    ),
    Mutant(
        "a-token-without-its-space",
        "Log-probabilities name a token without the space that it has inside a text.",
        "host/hillinfer/serve/chats.py",
        "        return twice[len(alone) :] if twice.startswith(alone) else alone\n",
        "        return alone\n",
        (f"{_TESTS}/test_options.py::test_a_text_goes_on_with_its_space",),
    ),
    Mutant(
        "a-chats-first-token-inside-a-text",
        "Log-probabilities name the first token of a chat's answer as if others came before.",
        "host/hillinfer/serve/http/wire.py",
        "        text_of = self._tokens.text if choice in self._begun else self._tokens.first\n",
        "        text_of = self._tokens.text\n",
        (f"{_TESTS}/test_options.py::test_a_text_goes_on_with_its_space",),
    ),
    Mutant(
        "an-interrupt-that-ends-a-chat",
        "Ctrl-C while a chat reads a text ends the chat.",
        "host/hillinfer/cli/serving/chat.py",
        '                if str(interrupt) not in ("", "SIGINT"):\n',
        '                if word.startswith("/"):\n',
        (
            "tests/host/cli/test_ending.py"
            "::test_an_interrupt_ends_what_a_chat_does_and_not_the_chat[2-/open-2]",
        ),
    ),
    Mutant(
        "a-file-that-stays-told-as-deleted",
        "A file that its drive does not let go is told as deleted.",
        "host/hillinfer/serve/documents.py",
        "        with suppress(FileNotFoundError):\n            self._calls.unlink(self._directory",
        "        with suppress(OSError):\n            self._calls.unlink(self._directory",
        (
            f"{_TESTS}/test_hostile.py::"
            "test_a_file_whose_drive_does_not_let_it_go_is_not_told_as_deleted",
        ),
    ),
)
