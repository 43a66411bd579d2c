# SPDX-License-Identifier: Apache-2.0
"""Where the texts come from, and what is refused."""

import pytest
from tiny_folder import byte_tokenizer

from hillinfer.errors import PromptError
from hillinfer_bench.quality.texts import DEFAULT_TEXTS, file_samples, standard_library_samples

TOKENIZER = byte_tokenizer()


def test_default_texts_are_different_and_long_enough():
    samples = standard_library_samples(TOKENIZER, 8000)
    assert len(samples) == DEFAULT_TEXTS >= 3
    assert all(len(sample.token_ids) == 8001 for sample in samples)
    texts = [TOKENIZER.decode(sample.token_ids) for sample in samples]
    # No piece of one is in another: the parts do not overlap.
    pieces = [{text[i : i + 200] for i in range(len(text) - 200)} for text in texts]
    assert sum(len(own) for own in pieces) == len(set().union(*pieces))
    assert len({sample.name for sample in samples}) == DEFAULT_TEXTS


def test_as_many_parts_as_are_asked_for():
    samples = standard_library_samples(TOKENIZER, 500, 12)
    assert len(samples) == len({sample.token_ids for sample in samples}) == 12
    assert samples[-1].name.endswith("part 12 of 12")


def test_default_texts_are_the_same_each_time():
    assert standard_library_samples(TOKENIZER, 500) == standard_library_samples(TOKENIZER, 500)


def test_files_give_their_beginning(tmp_path):
    files = [tmp_path / name for name in ("one.txt", "two.txt")]
    for file in files:
        file.write_text(f"{file.name} " * 100, encoding="utf-8")
    one, two = file_samples(TOKENIZER, files, 50)
    assert (one.name, two.name) == ("one.txt", "two.txt")
    assert TOKENIZER.decode(two.token_ids) == ("two.txt " * 100)[:51]


def test_tokens_of_many_characters(tmp_path):
    """The first cut of a text may fall short of the tokens that are asked for."""
    file = tmp_path / "text.txt"
    file.write_text("x" * 5000, encoding="utf-8")

    class Greedy:
        def __call__(self, text):
            return type("Encoded", (), {"input_ids": list(range(len(text) // 20))})

    (sample,) = file_samples(Greedy(), [file], 200)
    assert len(sample.token_ids) == 201


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"short", "has 5 tokens but --context 50 needs 51"), (b"\xff\xfe", "not UTF-8")],
)
def test_texts_that_do_not_do(content, message, tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    with pytest.raises(PromptError, match=message):
        file_samples(TOKENIZER, [file], 50)


def test_a_missing_text(tmp_path):
    with pytest.raises(PromptError, match=r"cannot read .*--texts"):
        file_samples(TOKENIZER, [tmp_path / "none.txt"], 50)
