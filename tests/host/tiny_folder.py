# SPDX-License-Identifier: Apache-2.0
"""Tiny models as folders on a drive, with tokenizers made here."""

from __future__ import annotations

import string
from dataclasses import replace

from tiny_models import VOCABULARY, TinyModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<u>{{ message['content'] }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
_SPECIAL = ("<?>", "<u>", "<e>", "<a>")
_LETTERS = string.ascii_lowercase + " \n.,:?!'-" + string.digits + "QA()"


def character_tokenizer(chat_template=CHAT_TEMPLATE):
    """Return a tokenizer of one token per character, as large as the tiny models' vocabulary."""
    tokens = [*_SPECIAL, *_LETTERS]
    tokens += [chr(0xC0 + i) for i in range(VOCABULARY - len(tokens))]
    assert len(tokens) == VOCABULARY
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<?>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<?>",
        eos_token="<e>",
        additional_special_tokens=["<u>", "<a>"],
    )
    wrapped.chat_template = chat_template
    return wrapped


def byte_tokenizer():
    """Return a tokenizer of one token per byte, so most characters are several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def save_tiny(folder, tiny=None, tokenizer=None):
    """Write a tiny model and its tokenizer to a folder and return the folder."""
    (tiny or replace(TinyModel(), head_dim=16)).build().save_pretrained(folder)
    (tokenizer or character_tokenizer()).save_pretrained(folder)
    return folder
