# SPDX-License-Identifier: Apache-2.0
"""`hillinfer chat`: a conversation about texts, in the terminal's way and from a pipe."""

import errno
import itertools
import re

import pytest
from generation_runs import SETTINGS

from hillinfer.cli.console import NoProgress
from hillinfer.cli.serving.conversation import Conversation
from hillinfer.drive.calls import DriveCalls
from hillinfer.errors import ColdPoolError, PromptError
from hillinfer.generate.tokens import Sampling
from hillinfer.models.loader import load_model
from hillinfer.serve.requests import chat_request
from hillinfer.serve.rules import ServerRules
from hillinfer.serve.served_model import served_model
from hillinfer.settings import Settings

BOOK = "".join(f"cat {i} sat on mat {i * 7 % 61}. " for i in range(20))


@pytest.fixture
def book(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text(BOOK)
    return file


@pytest.fixture
def talk(command, endless_folder, cold_dir):
    def talk(*arguments, stdin):
        return command(
            *("chat", "--model", endless_folder, "--cold-dir", cold_dir, "--max-new-tokens", 12),
            *arguments,
            stdin=stdin,
        )

    return talk


def read_tokens(outcome):
    """Return pairs: how many tokens were read, and of how many."""
    return [
        (int(read), int(whole))
        for read, whole in re.findall(r"(\d+) of (\d+) tokens read", outcome.err)
    ]


def test_a_question_about_a_text_is_answered_as_generate_does(
    talk, command, book, endless_folder, cold_dir
):
    outcome = talk(book, stdin="where is cat 3?\n")
    assert outcome.code == 0, outcome.err
    expected = command(
        *("generate", "--model", endless_folder, "--cold-dir", cold_dir, "--shadow", "int4"),
        *("--prompt-file", book, "--question", "where is cat 3?", "--max-new-tokens", 12),
        *("--prefill-chunk", 512),
    )
    assert outcome.out == expected.out
    other = talk(book, stdin="999 (((((( 999\n")
    assert other.out != outcome.out


def test_turns_go_on_in_one_cache(talk, book):
    outcome = talk(book, stdin="where is cat 3?\nand cat 4?\n\nnot read any more\n")
    assert outcome.code == 0, outcome.err
    document, first, second = read_tokens(outcome)
    assert document[0] == document[1] > len(BOOK)
    # The question, and what the template has around it.
    assert first[0] < len("where is cat 3?") + 8
    # The answer at most, where its text has other tokens than were chosen.
    assert second[0] < len("and cat 4?") + 8 + 12
    assert second[1] > first[1] + len("and cat 4?")


def test_words_with_a_slash(talk, book, tmp_path):
    saved = tmp_path / "talk.md"
    lines = [
        "/help", "/stats", "/open", "/open nothing.txt", "/what", f"/open {book}",
        "where is cat 3?", "/stats", f"/save {saved}", f"/save {saved}", "/new", "hello", "/exit",
        "more",
    ]  # fmt: skip
    outcome = talk(stdin="\n".join(lines) + "\n")
    assert outcome.code == 0, outcome.err
    for said in (
        "/open FILE", "nothing was read yet", "/open needs a file", "cannot read the text",
        "there is no such word", "KV cache", "saved", "is there already", "all is forgotten",
    ):  # fmt: skip
        assert said in outcome.err, said
    document, question, hello = read_tokens(outcome)
    assert question[0] < document[0]
    assert hello[0] == hello[1] == len("hello") + 3
    first, _ = outcome.out.split("\n", 1) if outcome.out[0] != "\n" else (outcome.out, "")
    written = saved.read_text()
    assert written.startswith("**user**\n\ncat 0")
    assert "**assistant**" in written
    assert first.strip()[:4] in written


def test_a_name_that_means_no_file_ends_no_conversation(talk, book, tmp_path):
    names = "~nobody-has-this-name/talk.md", f"{tmp_path}/{'long' * 80}"
    lines = [f"{word} {name}" for name in names for word in ("/open", "/save")]
    lines += ["/open a\0b", f"/open {book}", "where is cat 3?", f"/save {tmp_path / 'talk.md'}"]
    outcome = talk(stdin="\n".join(lines) + "\n")
    assert outcome.code == 0, outcome.err
    assert outcome.err.count("is in no home that is known here") == 2
    assert "cannot read the text" in outcome.err
    assert "cannot write the conversation" in outcome.err
    assert "where is cat 3?" in (tmp_path / "talk.md").read_text()


def test_a_store_has_the_text_the_next_day(talk, book, tmp_path):
    options = ("--store", tmp_path / "store", "--store-size", "64MiB", book)
    one, two = (talk(*options, stdin="where is cat 3?\n") for _ in range(2))
    assert one.out == two.out
    assert read_tokens(one)[0][0] == read_tokens(one)[0][1]
    assert read_tokens(two)[0][0] < 64 + 8


def test_no_text(talk, tmp_path):
    assert "cannot read" in talk(tmp_path / "none", stdin="").error_line()


class Stages(NoProgress):
    """Notes of each stage how many tokens it is of, and how many are there when it begins."""

    def __init__(self):
        self.begun = []

    def stage(self, name, total, begun=0):
        self.begun.append((total, begun))
        return super().stage(name, total, begun)


@pytest.fixture
def stages():
    return Stages()


@pytest.fixture
def conversation(endless_folder, cold_dir, stages):
    settings = Settings().changed(cold_dir=cold_dir, **SETTINGS)
    rules = ServerRules(context_tokens=600)
    asked = chat_request(
        {"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 0}
    )
    with served_model(load_model(str(endless_folder)), settings, rules) as served:
        made = Conversation(served, asked.wishes, 12, stages)
        yield made
        made.close()


def test_what_the_cache_has_is_no_part_of_a_readings_rate(conversation, stages):
    turns = [conversation.ask(one, lambda piece: None) for one in ("the cat", "and the mat")]
    assert stages.begun == [(one.prompt_tokens, one.held_tokens) for one in turns]
    assert [bool(begun) for _, begun in stages.begun] == [False, True]


def test_an_interrupt_ends_an_answer_and_not_the_conversation(conversation):
    shown = []

    def interrupt(piece):
        shown.append(piece)
        if len(shown) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversation.ask("the cat", interrupt)
    assert conversation.messages[-1] == {"role": "assistant", "content": "".join(shown)}
    pieces = []
    turn = conversation.ask("and the mat", pieces.append)
    assert turn.tokens == 12
    assert turn.held_tokens > len("the cat")
    assert [one["role"] for one in conversation.messages] == ["user", "assistant"] * 2


@pytest.mark.parametrize("at", [1, 4])
def test_what_follows_a_pass_that_broke_off_is_answered_as_in_a_new_conversation(
    at, endless_folder, cold_dir
):
    """In the question's own pass, or in that of a token of the answer."""
    settings = Settings().changed(cold_dir=cold_dir, **SETTINGS | {"alpha": 1.0, "exact": 1.0})
    asked = chat_request(
        {"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 0}
    )
    loaded, passes = load_model(str(endless_folder)), iter(())

    def interrupt(*_):
        if next(passes, None) == at:
            raise KeyboardInterrupt

    rules = ServerRules(context_tokens=900, chunk_tokens=64)
    with served_model(loaded, settings, rules) as served:
        conversation, pieces = Conversation(served, asked.wishes, 8, NoProgress()), []
        conversation.ask("the cat sat on the mat", lambda piece: None)
        passes = itertools.count(1)
        hook = loaded.model.model.layers[1].mlp.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            conversation.ask("where is the cat", lambda piece: None)
        hook.remove()
        question = {"role": "user", "content": "where is it?"}
        ids = served.prompts.of_chat([*conversation.messages, question])
        turn = conversation.ask(question["content"], pieces.append)
        assert turn.held_tokens
        begun = served.begin(b"", ids, len(ids) + 8)
        begun.generation.read(ids)
        expected = list(begun.generation.decode(Sampling(), 8, frozenset()))
        told = served.tokenizer.decode(expected, skip_special_tokens=True)
        assert "".join(pieces) == told
        begun.generation.close()
        conversation.close()


def test_what_is_too_long_is_said_and_the_conversation_goes_on(conversation):
    with pytest.raises(PromptError, match="/new begins anew"):
        conversation.open("a" * 700)
    assert conversation.ask("the cat", lambda piece: None).tokens == 12
    conversation.open("b" * 100)
    turn = conversation.ask("what was it?", lambda piece: None)
    assert conversation.messages[-2]["content"] == "b" * 100 + "\n\nwhat was it?"
    assert turn.held_tokens > 100


class FullDrive(DriveCalls):
    """A drive that takes nothing while it is full."""

    is_full = False

    def pwrite(self, descriptor, data, offset):
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().pwrite(descriptor, data, offset)


def test_a_drive_that_has_room_again_is_used_again(endless_folder, cold_dir):
    settings, drive = Settings().changed(cold_dir=cold_dir, **SETTINGS), FullDrive()
    asked = chat_request(
        {"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 0}
    )
    loaded = load_model(str(endless_folder))
    rules = ServerRules(context_tokens=900, chunk_tokens=64)

    def talked(is_full):
        with served_model(loaded, settings, rules, calls=drive) as served:
            conversation, pieces = Conversation(served, asked.wishes, 8, NoProgress()), []
            conversation.open(BOOK[:300])
            drive.is_full = is_full
            for _ in range(2 * is_full):
                with pytest.raises(ColdPoolError, match="free space on the drive"):
                    conversation.open("d" * 300)
            drive.is_full = False
            turn = conversation.ask("where is the cat?", pieces.append)
            conversation.close()
            return turn.held_tokens, "".join(pieces)

    held, told = talked(is_full=False)
    assert held
    # All of it is read anew, into an engine of its own.
    assert talked(is_full=True) == (0, told)
