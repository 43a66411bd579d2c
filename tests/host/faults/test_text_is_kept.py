# SPDX-License-Identifier: Apache-2.0
"""A drive that fails in the middle costs no text: in Python and in an answer."""

import errno
import re

import pytest
import torch
from faulty_calls import Fault, FaultyCalls, Injection
from tiny_folder import character_tokenizer
from tiny_models import TinyModel, prompts

import hillinfer
from hillinfer.errors import ColdPoolError, Finish
from hillinfer.generate.answering import Answering, AnswerOptions, Generation
from hillinfer.generate.prompt import DocumentPrompt, PromptStyle
from hillinfer.generate.stages import AnswerProgress
from hillinfer.generate.tokens import Sampling
from hillinfer.hf.attach import Attachment
from hillinfer.settings import QuestionReading, Settings

SETTINGS = {"alpha": 0.2, "kept_sinks": 2, "kept_recent": 6, "block_rows": 48, "io_threads": 2}


class BreaksLater(FaultyCalls):
    """A drive on which every write or read fails from a moment on."""

    def __init__(self):
        super().__init__()

    def break_now(self, kind, fault=Fault.EIO):
        self.injection = Injection(kind, None, fault)

    def repair(self):
        self.injection = None


@pytest.fixture
def drive():
    return BreaksLater()


@pytest.fixture
def attachment(drive, cold_dir):
    model = TinyModel().build()
    settings = Settings().changed(**SETTINGS, dram_budget="8MiB", cold_dir=cold_dir)
    with Attachment(model, settings, drive) as attachment:
        yield attachment


def reference(ids, count, cold_dir):
    model = TinyModel().build()
    with hillinfer.attach(model, **SETTINGS, dram_budget="8MiB", cold_dir=cold_dir) as attachment:
        generation = Generation(model, attachment.new_cache(), 64)
        generation.read(ids)
        return list(generation.decode(Sampling(), count, frozenset()))


def ask(attachment, drive, break_at, options=None, question=None):
    """Answer with a drive that breaks at the given number of new tokens."""
    tokenizer = character_tokenizer()
    prompt = DocumentPrompt(tokenizer, "a cat sat on a mat. " * 12, PromptStyle.PLAIN)
    generation = Generation(attachment.model, attachment.new_cache(), 64)
    answering = Answering(
        generation,
        tokenizer,
        prompt,
        options or AnswerOptions(Sampling(), 200, frozenset()),
    )
    shown = []

    class Breaks(AnswerProgress):
        def decoded(self, done):
            if done == break_at:
                drive.break_now("pwrite")

    ids = prompt.alone()
    answering.read(ids)
    if question is not None:
        # Behind the question's first pass: a thread that writes may fail within a later one.
        hook = attachment.model.register_forward_hook(lambda *_: drive.break_now("pwrite"))
        answer = answering.ask(question, shown.append)
        hook.remove()
    else:
        answer = answering.ask_last(None, shown.append, Breaks())
    generation.close()
    return ids, answer, "".join(shown)


def test_an_answer_that_breaks_keeps_its_text_and_says_why(attachment, drive, cold_dir):
    ids, answer, shown = ask(attachment, drive, break_at=5)
    assert answer.finish is Finish.FAILED
    assert re.match(r"could not write .* of rows of layer \d .*Input/output error", answer.error)
    assert 5 <= len(answer.token_ids) < 200
    assert answer.text == shown != ""
    assert list(answer.token_ids) == reference(ids, len(answer.token_ids), cold_dir)
    assert answer.decode_counts["selected_tokens"] > 0


def test_an_answer_on_a_good_drive_says_nothing(attachment, drive):
    _, answer, _ = ask(attachment, drive, break_at=-1)
    assert answer.finish is Finish.LENGTH
    assert answer.error is None
    assert len(answer.token_ids) == 200


@pytest.mark.parametrize("reading", QuestionReading)
def test_a_question_that_cannot_be_read_is_an_answer_that_failed(attachment, drive, reading):
    options = AnswerOptions(Sampling(), 20, frozenset(), reading)
    question = "what sat? " * 30
    _, answer, shown = ask(attachment, drive, 0, options, question)
    assert answer.finish is Finish.FAILED
    assert "Input/output error" in answer.error
    assert (answer.question, answer.text, answer.token_ids) == (question, "", ())
    assert 0 < answer.question_tokens < len(question)
    assert shown == ""


class TestInPython:
    def generate_until_broken(self, attachment, drive, lengths, new_tokens=200):
        ids, mask = prompts(lengths)
        cache = attachment.new_cache(sequences=len(lengths))
        steps = []

        def broken_at(given, scores):
            steps.append(given.shape[1])
            if len(steps) == 7:
                drive.break_now("pwrite")
            return torch.zeros(len(given), dtype=torch.bool)

        with pytest.raises(ColdPoolError) as caught:
            attachment.model.generate(
                ids,
                attention_mask=mask,
                past_key_values=cache,
                max_new_tokens=new_tokens,
                do_sample=False,
                prefill_chunk_size=64,
                pad_token_id=0,
                stopping_criteria=[broken_at],
            )
        return ids, mask, cache, str(caught.value), steps

    def test_the_cache_has_the_tokens_and_the_error_says_so(self, attachment, drive, cold_dir):
        ids, mask, cache, message, steps = self.generate_until_broken(attachment, drive, [150, 90])
        assert "could not write" in message
        assert message.endswith(
            "; the tokens generated until then are in the cache's token_ids (in Python: cold_dir)"
        )
        kept = cache.token_ids
        # Every token that generate chose, the one whose forward pass failed included.
        assert [len(row) for row in kept] == [steps[-1], steps[-1] - 60]
        plain = TinyModel().build()
        with hillinfer.attach(plain, **SETTINGS, dram_budget="8MiB", cold_dir=cold_dir) as other:
            expected = plain.generate(
                ids,
                attention_mask=mask,
                past_key_values=other.new_cache(sequences=2),
                max_new_tokens=steps[-1] - 150,
                do_sample=False,
                prefill_chunk_size=64,
                pad_token_id=0,
            )
        assert kept == [expected[0].tolist(), expected[1, 60:].tolist()]
        kept[0].clear()
        assert cache.token_ids[0] == expected[0].tolist()
        cache.close()

    def test_a_new_cache_in_the_same_process_works(self, attachment, drive):
        ids, mask, cache, _, steps = self.generate_until_broken(attachment, drive, [150])
        drive.repair()
        kept = cache.token_ids
        # What failed once stays failed, because rows are missing.
        with pytest.raises(ColdPoolError, match="Input/output error"):
            attachment.model.generate(
                torch.tensor(kept), past_key_values=cache, max_new_tokens=3, do_sample=False
            )
        cache.close()
        with torch.no_grad():
            again = attachment.model.generate(
                ids,
                attention_mask=mask,
                past_key_values=attachment.new_cache(),
                max_new_tokens=steps[-1] - 150,
                do_sample=False,
                prefill_chunk_size=64,
                pad_token_id=0,
            )
        assert again.tolist() == kept

    def test_an_empty_cache_has_none(self, attachment):
        cache = attachment.new_cache()
        assert cache.token_ids == []
        cache.close()
        assert cache.token_ids == []

    def test_errors_without_a_cache_of_ours_are_left_alone(self, attachment):
        ids, mask = prompts([5])
        boom = OSError(errno.EIO, "not ours")

        def fails(*args, **kwargs):
            raise boom

        hook = attachment.model.register_forward_pre_hook(fails)
        with pytest.raises(OSError, match="not ours") as caught:
            attachment.model.generate(ids, attention_mask=mask, max_new_tokens=2)
        hook.remove()
        assert caught.value is boom
