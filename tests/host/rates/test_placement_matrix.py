# SPDX-License-Identifier: Apache-2.0
"""Budget, device, policy, path and batch change no output bit of a decode step."""

import pytest
import torch
from placement_matrix import Budget, Path, Way, every, met, pairs

from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.settings import Settings

LAYERS, STEPS = 2, 3
# A full segment, whose shadow may lie on the drive, and an open one with a group that fills.
PROMPT = 1100
SHAPE = ModelShape(LAYERS, 2, 4, 32, StoredType.BFLOAT16, 4096)
CHOSEN = Settings().changed(alpha=0.2, kept_recent=4, block_rows=64, shadow="int4")
SCALING = SHAPE.head_dim**-0.5


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Decoded:
    """What the sequences of a way gave, and what was counted.

    Queries are announced before their layer begins, as predicted ones are. With `flip` a bit of a
    stored value of the first sequence is another one, in a row that is kept whatever is selected.
    """

    def __init__(self, way, cold_dir, flip=False):
        self.runtime = way.open(SHAPE, CHOSEN, cold_dir, PROMPT + STEPS)
        self.landed = 0
        try:
            sequences = [self._read(number, flip and not number) for number in range(way.batch)]
            self.outputs = [
                [self._step(step, number, one) for number, one in enumerate(sequences)]
                for step in range(STEPS)
            ]
            self.statistics = self.runtime.statistics()
        finally:
            self.runtime.close()

    def _read(self, number, flip):
        sequence = self.runtime.open_sequence()
        self.runtime.begin_step()
        for layer in range(LAYERS):
            keys, values = random(100 * number + layer, 2, 2, PROMPT - 7 * number, 32)
            if flip and layer == 1:
                values.view(torch.int16)[0, 1, 3] ^= 0x40
            self.runtime.append(layer, sequence, keys, values)
            self.runtime.code_full_segments(layer, sequence, keys)
        return sequence

    def _step(self, step, number, sequence):
        self.runtime.begin_step()
        out = []
        for layer in range(LAYERS):
            seed = 10_000 + 1000 * number + 10 * step + layer
            query = random(seed, 4, 1, 32)
            self.runtime.announce(layer, sequence, query, SCALING)
            ahead = self.runtime.parts.pipeline.announced(layer, sequence)
            self.landed += ahead is not None and ahead.landed is not None
            keys, values = random(seed + 5, 2, 2, 1, 32)
            self.runtime.append(layer, sequence, keys, values)
            out.append(self.runtime.attend_selected(layer, sequence, query, keys, SCALING))
        return torch.stack(out).view(torch.int16)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What comes out with the plain drive and all rows hot."""
    return Decoded(Way(batch=3), tmp_path_factory.mktemp("hot")).outputs


def same(outputs, expected):
    """Whether each sequence gave at each step what it gives beside others."""
    return all(
        torch.equal(one, other)
        for own, others in zip(outputs, expected, strict=True)
        for one, other in zip(own, others, strict=False)
    )


@pytest.mark.parametrize("way", pairs(), ids=str)
def test_every_way_gives_the_same_bits(way, expected, cold_dir):
    found = Decoded(way, cold_dir)
    assert same(found.outputs, expected)
    assert way.was_taken(found.statistics)
    assert (found.landed > 0) == (way.path is Path.PREFETCHED)
    assert (found.statistics.device_scored_tokens > 0) == (way.device == "core")
    assert found.statistics.dram_peak_bytes <= found.statistics.dram_budget_bytes


@pytest.mark.parametrize("way", pairs(device=("nvme",), policy=("lru",), batch=(1,)), ids=str)
def test_a_flipped_bit_of_one_row_changes_every_way(way, expected, cold_dir):
    """The twin."""
    assert not same(Decoded(way, cold_dir, flip=True).outputs, expected)


def test_all_pairs_meet_in_few_lines():
    lines, whole = pairs(), list(every())
    assert set().union(*map(met, lines)) == set().union(*map(met, whole))
    assert len(lines) < len(whole) / 5
    # The twin: each line has a pair that no later one has, the first one too.
    assert set().union(*map(met, lines[1:])) != set().union(*map(met, whole))


def test_what_does_not_go_together_is_in_no_line():
    assert not Way(Budget.LEAST, path=Path.HOT).can_be
    assert not Way(Budget.ALL_HOT, path=Path.COLD).can_be
    assert not Way(device="core", path=Path.STREAMED).can_be
    assert Way(Budget.ALL_HOT, path=Path.STREAMED).can_be
    with pytest.raises(AssertionError, match="no column"):
        list(every(colour=("red",)))
