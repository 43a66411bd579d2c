# SPDX-License-Identifier: Apache-2.0
"""An emulated card behind the real XRT makes shadows of rows, and loads while it scores."""

import json
import os
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from emulated_cards import ONE_PROCESS, SMALL

from hillinfer.devices.device import (
    ROWS_TOGETHER,
    DeviceSegment,
    FilePiece,
    StoredRows,
    StoredShadow,
)
from hillinfer.devices.opening import GoldenScorer, open_xrt
from hillinfer.drive.files import PAGE_BYTES, round_up
from hillinfer.errors import DeviceError
from hillinfer.settings import DeviceOptions
from hillinfer_hw.emulation import Engine
from hillinfer_model.choices import Scope

pytestmark = ONE_PROCESS

SEGMENT = SMALL.segment_tokens
ROW_BYTES = 2 * SMALL.kv_heads * SMALL.head_dim * 2
GROUP_BYTES = 64 * ROW_BYTES
SLOT_BYTES = round_up(SMALL.segment_bytes, PAGE_BYTES)


@contextmanager
def card(surrounding):
    """The device of an emulated card, and its shadows' counts."""
    scorer = open_xrt(SMALL, Scope.LAYER, DeviceOptions(xclbin=surrounding.xclbin))
    try:
        yield scorer.shadows.device
    finally:
        scorer.shadows.close()


@contextmanager
def direct(path, content):
    """A descriptor of a file that is read past the page cache."""
    path.write_bytes(content)
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        yield file
    finally:
        os.close(file)


class Document:
    """Rows of some segments, and what they become by the golden model."""

    def __init__(self, segments, flip=False):
        generator = torch.Generator().manual_seed(segments)
        tokens = segments * SEGMENT
        rows = torch.randn(tokens, 2, SMALL.kv_heads, SMALL.head_dim, generator=generator).half()
        scorer, before = GoldenScorer(SMALL, Scope.LAYER), None
        self.statistics, self.shadows = [], []
        for base in range(0, tokens, SEGMENT):
            keys = rows[base : base + SEGMENT, 0].contiguous()
            before = scorer.statistics(keys, base, before)
            shadow = np.zeros((SMALL.segment_beats, 64), np.uint8)
            scorer.encode(keys, before, shadow, 0)
            self.statistics.append(before)
            self.shadows.append(shadow)
        content = rows.numpy().view(np.uint8).reshape(-1, GROUP_BYTES).copy()
        if flip:
            # The sign of a key's number.
            content[3, 1] ^= 0x80
        # On the drive the groups lie in another order.
        self.order = np.random.default_rng(segments).permutation(len(content))
        placed = np.zeros_like(content)
        placed[self.order] = content
        self.content = placed.tobytes()

    def rows(self, file, number, slot):
        own = self.order[number * SEGMENT // 64 : (number + 1) * SEGMENT // 64]
        pieces = [FilePiece(file, int(group) * GROUP_BYTES, GROUP_BYTES) for group in own]
        return StoredRows(slot, number * SEGMENT, self.statistics[number], pieces)


def made(device, document, file):
    """What the card makes of a document, in slots of which some stay empty."""
    count = len(document.shadows)
    slots = [20 + 3 * number for number in range(count)]
    assert all(map(device.has_room, slots))
    stored = [document.rows(file, number, slots[number]) for number in range(count)]
    for start in range(0, count, ROWS_TOGETHER):
        device.make(stored[start : start + ROWS_TOGETHER])
    found = np.zeros((count, SMALL.segment_beats, 64), np.uint8)
    for slot, into in zip(slots, found, strict=True):
        device.read(slot, into)
    return found


@pytest.mark.parametrize("engine", Engine)
def test_a_card_makes_the_shadows_that_golden_makes(cards, engine, tmp_path, monkeypatch):
    log = tmp_path / "card.log"
    monkeypatch.setenv("HILLINFER_EMULATION_LOG", str(log))
    document = Document(ROWS_TOGETHER + 1)
    with direct(tmp_path / "rows", document.content) as file, card(cards(engine)) as device:
        np.testing.assert_array_equal(made(device, document, file), document.shadows)
    # Of make_shadow alone, as the program says that plays the card.
    told = json.loads(log.read_text())
    assert (told["launches"], told["kernels"]) == (2, [0, 2])


def test_a_flipped_bit_of_a_row_shows(cards, tmp_path):
    document = Document(1, flip=True)
    with direct(tmp_path / "rows", document.content) as file, card(cards(Engine.HLS)) as device:
        assert not np.array_equal(made(device, document, file), document.shadows)


def test_rows_of_a_file_that_ends_early_lose_the_card(cards, tmp_path):
    document = Document(1)
    content = document.content[:-PAGE_BYTES]
    with (
        direct(tmp_path / "rows", content) as file,
        card(cards(Engine.HLS)) as device,
        pytest.raises(DeviceError, match="ends at byte"),
    ):
        made(device, document, file)


@pytest.mark.parametrize("engine", Engine)
def test_what_comes_next_is_loaded_while_a_launch_scores(cards, engine, tmp_path):
    document = Document(2)
    content = b"".join(one.tobytes().ljust(SLOT_BYTES, b"\0") for one in document.shadows)
    queries = np.zeros((4, 64), np.uint8)
    with direct(tmp_path / "shadows", content) as file, card(cards(engine)) as device:
        first, second = (StoredShadow(slot, file, slot * SLOT_BYTES) for slot in (0, 1))
        device.load([first])
        own = [DeviceSegment(0, 0, SEGMENT)]
        parts = [*device.score(Scope.LAYER, queries, own, [second])]
        assert sum(one.tuples.shape[1] for one in parts) == SEGMENT
        for slot, shadow in enumerate(document.shadows):
            into = np.zeros_like(shadow)
            device.read(slot, into)
            np.testing.assert_array_equal(into, shadow)
