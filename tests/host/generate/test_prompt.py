# SPDX-License-Identifier: Apache-2.0
"""A document's ids are a prefix of every question's prompt."""

import pytest
from tiny_folder import character_tokenizer
from tokenizers import processors

from hillinfer.errors import PromptError
from hillinfer.generate.prompt import DocumentPrompt, PromptStyle

TEXT = "a cat sat.\nthe mat was red."


def whole(tokenizer, content):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text, add_special_tokens=False).input_ids


def test_chat_prompt_is_the_template_cut_in_two():
    tokenizer = character_tokenizer()
    prompt = DocumentPrompt(tokenizer, TEXT)
    for question in ("which cat?", "what was red?"):
        assert prompt.document_ids() + prompt.question_ids(question) == whole(
            tokenizer, f"{TEXT}\n\n{question}"
        )
    assert prompt.alone() == whole(tokenizer, TEXT)


def test_plain_prompt_without_a_template():
    tokenizer = character_tokenizer(chat_template=None)
    prompt = DocumentPrompt(tokenizer, TEXT)
    ids = prompt.document_ids() + prompt.question_ids(" which cat? ")
    assert tokenizer.decode(ids) == f"{TEXT}\n\nQuestion: which cat?\nAnswer:"
    assert prompt.alone() == tokenizer(TEXT).input_ids


def test_plain_style_ignores_the_template():
    with_template = DocumentPrompt(character_tokenizer(), TEXT, PromptStyle.PLAIN)
    without = DocumentPrompt(character_tokenizer(chat_template=None), TEXT)
    assert with_template.document_ids() == without.document_ids()


def test_only_the_start_gets_the_first_token():
    tokenizer = character_tokenizer(chat_template=None)
    first = tokenizer.convert_tokens_to_ids("<u>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<u> $A", special_tokens=[("<u>", first)]
    )
    prompt = DocumentPrompt(tokenizer, TEXT)
    assert prompt.alone()[0] == prompt.document_ids()[0] == first
    assert prompt.alone().count(first) == 1
    assert first not in prompt.question_ids("a")


def test_template_that_loses_the_text_is_refused():
    lossy = character_tokenizer(chat_template="{{ messages[0]['content'][:9] }}")
    with pytest.raises(PromptError, match="--prompt-style plain"):
        DocumentPrompt(lossy, TEXT)


def test_empty_texts_are_refused():
    with pytest.raises(PromptError, match="the prompt is empty"):
        DocumentPrompt(character_tokenizer(), " \n")
    with pytest.raises(PromptError, match="a question is empty"):
        DocumentPrompt(character_tokenizer(), TEXT).question_ids("\n")
