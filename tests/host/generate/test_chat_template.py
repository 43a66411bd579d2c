# SPDX-License-Identifier: Apache-2.0
"""Chat templates: the text that transformers makes of them, in bounded time and memory."""

import signal
import threading
import time

import pytest
from tiny_folder import CHAT_TEMPLATE, character_tokenizer

from hillinfer.generate.prompt import (
    DocumentPrompt,
    PromptForm,
    QuestionPrompt,
    TemplateError,
    TemplateProcess,
    rendered_chats,
    rendered_turns,
)

SECONDS = 60
CONTENTS = ["a cat", ' lines\n\nand "quotes" <e> {{ 1 }} \u2402 \U0001f600 ', "\ud800", ""]
# Everything that transformers adds to jinja2, and what its settings change.
TEMPLATES = {
    "tiny": CHAT_TEMPLATE,
    "SmolLM2": "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}",
    "Llama": "{{- bos_token }}{%- if tools is not none %}T{%- endif %}{%- for m in messages %}"
    "{{- m['role'] + m['content'] | trim + eos_token }}{%- endfor %}",
    "blocks": "  {% if true %}\n    a\n  {% endif %}\n{% for m in messages %}\n{{ m }}\n"
    "{% endfor %}\n",
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ {'b': 1, 'a': '<é>'} | "
    "tojson(sort_keys=True, ensure_ascii=True, separators=(',', ':')) }}",
    "generation": "{% generation %}{{ messages[0].content }}{% endgeneration %}!",
    "loop controls": "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}"
    "{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "namespace": "{% set n = namespace(a=1) %}{% for m in messages %}{% set n.a = n.a + 1 %}"
    "{% endfor %}{{ n.a }}{{ dict(a=2) }}{{ dict.fromkeys([1]) }}",
    "date": "{{ strftime_now('%Y') }}",
    "undefined": "{{ documents }}{{ nothing }}{{ nothing is defined }}{{ unk_token }}",
    "macro": "{% macro one(m) %}<{{ m.content }}>{% endmacro %}{% for m in messages %}{{ one(m) }}"
    "{% endfor %}",
}
# Name, template, a part of the reason.
HOSTILE = [
    # Nothing inside the interpreter ends it, as it would end loops in loops.
    ("a power", "{{ 10 ** (10 ** 9) }}", "too long"),
    ("a loop too long", "{% for i in range(10 ** 9) %}x{% endfor %}", "OverflowError"),
    ("repeated", "{{ 'x' * 10 ** 11 }}", "MemoryError"),
    ("padded", "{{ '%099999999999d' | format(1) }}", "MemoryError"),
    ("doubled", "{% set s = 'xxxx' %}" + "{% set s = s ~ s %}" * 60 + "{{ s }}", "MemoryError"),
    ("much text", "{{ 'x' * 10 ** 7 }}", "makes 10000000 letters"),
    ("syntax", "{% for %}", "TemplateSyntaxError"),
    ("nested", "{% if 1 %}" * 5000 + "{% endif %}" * 5000, ""),
    ("brackets", "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", ""),
    ("refuses", "{{ raise_exception('no users here') }}", "no users here"),
    ("divides", "{{ 1 / 0 }}", "ZeroDivisionError"),
    ("changes what it is given", "{{ messages.append(1) }}", "SecurityError"),
    ("leaves the sandbox", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    ("reads a file", "{% include '/etc/passwd' %}", "TypeError"),
    ("hides in a namespace", "{% set n = namespace(_a=1) %}", "SecurityError"),
]


@pytest.fixture(scope="module")
def process():
    """Renders as a process for each chat does, which takes a tenth of a second to start."""
    made = TemplateProcess()
    yield made
    made.close()


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_the_text_is_that_of_transformers(template, process):
    tokenizer = character_tokenizer(chat_template=template)
    expected = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        for content in CONTENTS
    ]
    chats = [[{"role": "user", "content": content}] for content in CONTENTS]
    assert rendered_turns(tokenizer, chats, process) == expected


@pytest.mark.parametrize(
    ("template", "said"), [c[1:] for c in HOSTILE], ids=[c[0] for c in HOSTILE]
)
def test_a_hostile_template_ends_in_one_line(template, said):
    started = time.monotonic()
    with pytest.raises(TemplateError, match="use --prompt-style plain") as refused:
        DocumentPrompt(character_tokenizer(chat_template=template), "a cat")
    assert time.monotonic() - started < SECONDS
    assert said in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_other_text_or_another_template_shows():
    tokenizer = character_tokenizer()
    found = rendered_chats(tokenizer, ["a cat", "a cau"])
    assert found == ["<u>a cat<e><a>", "<u>a cau<e><a>"]
    assert rendered_chats(tokenizer, CONTENTS) == [f"<u>{one}<e><a>" for one in CONTENTS]
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<e>", "<f>")
    assert rendered_chats(tokenizer, ["a cat"]) == ["<u>a cat<f><a>"]


def test_a_session_meets_the_same_bounds():
    with pytest.raises(TemplateError, match="ZeroDivisionError"):
        QuestionPrompt(character_tokenizer(chat_template="{{ 1 / 0 }}"), PromptForm.CHAT)


def test_several_templates_without_a_default():
    tokenizer = character_tokenizer(chat_template={"rag": CHAT_TEMPLATE})
    with pytest.raises(TemplateError, match="multiple chat templates with no default"):
        rendered_chats(tokenizer, ["a"])
    tokenizer.chat_template = {"default": CHAT_TEMPLATE, "rag": "{{ 1 / 0 }}"}
    assert rendered_chats(tokenizer, ["a"]) == ["<u>a<e><a>"]


def test_a_process_for_many_chats_answers_as_one_for_each():
    """Also behind a template that its limits ended, and behind the process' own end."""
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a cat"}]
    process = TemplateProcess()
    try:
        for name, template in TEMPLATES.items():
            tokenizer = character_tokenizer(chat_template=template)
            found = rendered_turns(tokenizer, [turns, turns[1:]], process)
            assert found == [
                tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True)
                for one in (turns, turns[1:])
            ], name
        for _, template, said in HOSTILE[2:5] + HOSTILE[-5:]:
            hostile = character_tokenizer(chat_template=template)
            with pytest.raises(TemplateError) as refused:
                rendered_turns(hostile, [turns], process)
            assert said in str(refused.value)
        process._child.kill()
        process._child.wait()
        assert rendered_turns(character_tokenizer(), [turns], process) == [
            "<u>be kind<e><u>a cat<e><a>"
        ]
    finally:
        process.close()
    with pytest.raises(TemplateError, match="no more"):
        rendered_turns(character_tokenizer(), [turns], process)


# It takes longer than a timer.
SLOW = "{% for i in range(1700) %}{% for j in range(1700) %}{% endfor %}{% endfor %}"


def test_what_an_interrupted_call_asked_for_is_told_to_nobody_else():
    tokenizer = character_tokenizer(chat_template=SLOW + CHAT_TEMPLATE)
    own, process = threading.get_ident(), TemplateProcess()

    def rendered(said):
        return rendered_turns(tokenizer, [[{"role": "user", "content": said}]], process)

    def interrupted():
        watch = threading.Timer(0.1, signal.pthread_kill, [own, signal.SIGINT])
        watch.start()
        try:
            while watch.is_alive():
                rendered("b")
        finally:
            watch.join()

    try:
        rendered("a")
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        for said in ("c", "d"):
            assert rendered(said) == [f"<u>{said}<e><a>"]
    finally:
        process.close()
