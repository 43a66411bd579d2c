# SPDX-License-Identifier: Apache-2.0
"""The table of sizes in the page for operators is what extents take."""

import re
from pathlib import Path

import pytest

from hillinfer.store.keys import CHUNK_TOKENS, ExtentShape
from hillinfer_hosts.directory import Change, EmbeddedDirectory, Host
from hillinfer_model.kernel_spec import GROUP_TOKENS

PAGE = (Path(__file__).parents[3] / "docs/hosts.md").read_text()
# Layers, heads of keys and values, channels.
MODELS = {
    "SmolLM2-135M": (30, 3, 64),
    "Qwen2.5-7B": (28, 4, 128),
    "Llama-3.1-8B": (32, 8, 128),
    "Llama-3.1-70B": (80, 8, 128),
}
ENTRY_BYTES = 50


@pytest.mark.parametrize("model", MODELS)
def test_a_row_of_the_table_is_computed_so(model):
    layers, heads, channels = MODELS[model]
    row = 2 * heads * channels * 2
    extent = ExtentShape(layers, row, 0).byte_count
    tokens = 1e12 / extent * CHUNK_TOKENS
    told = re.search(rf"^\| {re.escape(model)} \|(.*)\|$", PAGE, re.MULTILINE)[1].split("|")
    numbers = [float(one.split()[0]) for one in told]
    assert numbers == [
        round(layers * row / 1024, 1),
        round(extent / 2**20, 1),
        round(tokens / 1e6, 1),
        round(tokens / GROUP_TOKENS * ENTRY_BYTES / 1e6),
    ]


def test_a_directory_takes_that_much_for_an_entry():
    keys = [number.to_bytes(16, "big")[::-1] for number in range(20_000)]
    directory = EmbeddedDirectory()
    directory.announce(Host("a", "http://a", session="1"), Change(keys, is_whole=True))
    assert directory.count() == len(keys)
    assert directory.byte_count() / len(keys) == pytest.approx(ENTRY_BYTES, rel=0.3)
    directory.close()
