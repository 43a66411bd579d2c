# SPDX-License-Identifier: Apache-2.0
"""Text comes whole however characters are spread over tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_folder import byte_tokenizer, character_tokenizer
from tokenizers import decoders

from hillinfer.generate.tokens import TextStream

BYTES = byte_tokenizer()


def streamed(tokenizer, ids, before=()):
    stream = TextStream(tokenizer, before)
    return [stream.push(token_id) for token_id in ids] + [stream.finish()]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_pieces_are_whole_characters_and_add_up(text):
    ids = BYTES(text).input_ids
    pieces = streamed(BYTES, ids)
    assert "".join(pieces) == BYTES.decode(ids, clean_up_tokenization_spaces=False) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_comes_with_its_last_byte():
    assert streamed(BYTES, BYTES("é🙂").input_ids) == ["", "é", "", "", "", "🙂", ""]


def test_half_a_character_at_the_end_is_shown_at_the_end():
    ids = BYTES("a🙂").input_ids[:-1]
    assert streamed(BYTES, ids) == ["a", "", "", "", "\ufffd"]


@pytest.mark.parametrize("text", ["a cat sat on a mat.", "<u>hello<e>"])
def test_special_tokens_are_not_shown(text):
    tokenizer = character_tokenizer()
    pieces = streamed(tokenizer, tokenizer(text).input_ids)
    assert "".join(pieces) == text.replace("<u>", "").replace("<e>", "")


def test_a_text_that_goes_on_keeps_its_space():
    """Decoders of Llama's kind leave out the space that a text begins with."""
    tokenizer = character_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    before, ids = tokenizer("a cat").input_ids, tokenizer(" sat").input_ids
    assert "".join(streamed(tokenizer, ids, before)) == " sat"
    assert "".join(streamed(tokenizer, ids)) == "sat"


@pytest.mark.parametrize("cut", [0, 1])
def test_what_goes_on_behind_half_a_character(cut):
    before = BYTES("a🙂").input_ids
    ids = BYTES("é🙂").input_ids
    assert "".join(streamed(BYTES, ids, before[: len(before) - cut])) == "é🙂"


def test_each_step_decodes_a_few_tokens_only():
    class Counting:
        longest = 0

        def decode(self, ids, **options):
            self.longest = max(self.longest, len(ids))
            return BYTES.decode(ids, **options)

    counting = Counting()
    ids = BYTES("🙂é and plain text " * 50).input_ids
    assert len("".join(streamed(counting, ids))) == 50 * 18
    assert counting.longest <= 8
