# SPDX-License-Identifier: Apache-2.0
"""Which tokens come out does not depend on where rows lie nor on what scored them.

Everything that may change the output is drawn at random and kept; budget, device, block size and
reads in flight vary, and every bit of every logit must stay.
"""

import os
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from generation_runs import attached, bits, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import DTYPES, FAMILIES, VOCABULARY, TinyModel, prompts

from hillinfer.model_shape import ModelShape
from hillinfer.pools.budget_plan import BudgetPlan
from hillinfer.settings import Settings

ALL_HOT = "32MiB"


@dataclass(frozen=True)
class Case:
    """A model, prompts and every setting that may change what comes out."""

    tiny: TinyModel
    lengths: tuple[int, ...]
    chunk: int | None
    new_tokens: int
    selection: dict = field(default_factory=dict)

    def run(self, model, cold_dir, **placement):
        ids, mask = prompts(list(self.lengths), seed=len(self.lengths))
        with attached(model, cold_dir, **self.selection, **placement) as hill:
            cache = hill.new_cache()
            output = run(model, cache, ids, mask, self.new_tokens, prefill_chunk_size=self.chunk)
            statistics = cache.statistics()
            cache.close()
        assert statistics.dram_peak_bytes <= statistics.dram_budget_bytes
        return output, statistics

    def least_bytes(self, **placement):
        shape = ModelShape.from_config(self.tiny.config(), self.tiny.dtype)
        chosen = Settings().changed(**self.selection, **placement)
        tokens = max(self.lengths) + self.new_tokens
        return BudgetPlan.with_whole_shadow(shape, chosen, tokens, len(self.lengths)).required_bytes


@st.composite
def cases(draw):
    family = draw(st.sampled_from(FAMILIES))
    tiny = TinyModel(
        family=family,
        heads="mha" if family == "opt" else draw(st.sampled_from(["mha", "gqa", "mqa"])),
        dtype=draw(st.sampled_from(DTYPES)),
        # Rows of 64 to 384 bytes, padded or not.
        head_dim=draw(st.sampled_from([4, 6, 8, 12, 16])),
        seed=draw(st.integers(0, 1000)),
    )
    batch = draw(st.sampled_from([1, 4]))
    lengths = [draw(st.integers(140, 260))]
    lengths += [draw(st.integers(1, lengths[0])) for _ in range(batch - 1)]
    return Case(
        tiny=tiny,
        lengths=tuple(lengths),
        chunk=draw(st.sampled_from([None, 50, 64, 100])),
        new_tokens=draw(st.integers(2, 7)),
        selection={
            "rule": draw(st.sampled_from(["weight_sum", "raw_sum"])),
            "scope": draw(st.sampled_from(["layer", "kv_head"])),
            "shadow": draw(st.sampled_from(["int8", "int4", "int2"])),
            "alpha": draw(st.sampled_from([0.02, 0.1, 0.25, 0.5, 0.9, 1.0])),
            "kept_sinks": draw(st.integers(0, 5)),
            "kept_recent": draw(st.integers(1, 9)),
            "max_selected": draw(st.sampled_from([None, None, 1, 40])),
            "block_rows": draw(st.sampled_from([16, 37, 64, 100])),
        },
    )


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    case=cases(),
    share=st.floats(0, 1),
    block_tokens=st.integers(1, 256),
    io_threads=st.integers(1, 4),
)
def test_every_placement_gives_the_same_bits(case, share, block_tokens, io_threads, cold_dir):
    model = case.tiny.build()
    expected, hot = case.run(model, cold_dir, dram_budget=ALL_HOT)
    assert hot.cold_read_bytes == 0
    least = case.least_bytes()
    between = int(least + share * hot.kv_bytes)
    placements = [
        {"dram_budget": least},
        {"dram_budget": between, "block_tokens": block_tokens, "io_threads": io_threads},
        {"dram_budget": ALL_HOT, "device": "golden"},
        {"dram_budget": least, "device": "golden", "block_tokens": block_tokens},
    ]
    for placement in placements:
        found, statistics = case.run(model, cold_dir, **placement)
        assert torch.equal(found.sequences, expected.sequences), placement
        assert torch.equal(bits(found), bits(expected)), placement
        assert statistics.cold_write_bytes == hot.cold_write_bytes
        assert statistics.selected_tokens == hot.selected_tokens
        assert (statistics.hot_rows_read + statistics.cold_rows_read) == (
            hot.hot_rows_read + hot.cold_rows_read
        )


LONG = Case(
    tiny=TinyModel("qwen3", "gqa", torch.bfloat16, head_dim=12),
    lengths=(1500, 1100),
    chunk=256,
    new_tokens=4,
    selection={"alpha": 0.3, "kept_recent": 6, "block_rows": 100},
)


def test_two_segments_and_almost_nothing_hot(cold_dir):
    model = LONG.tiny.build()
    expected, _ = LONG.run(model, cold_dir, dram_budget=ALL_HOT)
    for device in ("nvme", "golden"):
        placement = {"dram_budget": LONG.least_bytes(), "device": device, "block_tokens": 100}
        found, statistics = LONG.run(model, cold_dir, **placement)
        assert torch.equal(bits(found), bits(expected))
        # Selected rows really came from the drive, not only the past that prefill streams.
        assert statistics.cold_rows_read > statistics.hot_rows_read > 0


def test_beams_and_turns_wherever_rows_lie(cold_dir):
    """Sequences that fork, are reordered and go on, with almost nothing hot."""
    tiny = TinyModel("qwen2")
    model = tiny.build()
    ids, mask = prompts([200, 130])
    question, _ = prompts([30, 30], seed=2)
    chosen = {"alpha": 0.2, "block_rows": 37, "kept_recent": 5}
    least = Case(tiny, (300,) * 8, 64, 10, chosen).least_bytes()
    outputs = []
    for budget, device in ((ALL_HOT, "nvme"), (least, "nvme"), (least, "golden")):
        with attached(model, cold_dir, **chosen, dram_budget=budget, device=device) as hill:
            cache = hill.new_cache()
            first = run(model, cache, ids, mask)
            talk = torch.cat([first.sequences, question], dim=1)
            longer = torch.cat([mask, mask.new_ones(2, 40)], dim=1)
            branch = cache.fork()
            second = run(model, cache, talk, longer)
            branch.crop(-7)
            branch.batch_repeat_interleave(3)
            beams = run(model, branch, talk, longer, num_beams=3, output_scores=True, new_tokens=8)
            outputs.append((bits(first), bits(second), beams.sequences, beams.sequences_scores))
            cache.close()
            branch.close()
    for found in outputs[1:]:
        for one, other in zip(found, outputs[0], strict=True):
            assert torch.equal(one, other)


def test_other_selections_give_other_bits(cold_dir):
    """What invariance is worth: each setting that may change the output does change it here."""
    case = Case(TinyModel(), (250,), 64, 5, {"alpha": 0.2, "kept_sinks": 2, "kept_recent": 4})
    model = case.tiny.build()
    expected, _ = case.run(model, cold_dir, dram_budget=ALL_HOT)
    for changes in (
        {"alpha": 0.3},
        {"rule": "raw_sum"},
        {"scope": "kv_head"},
        {"shadow": "int2"},
        {"kept_sinks": 20},
        {"kept_recent": 30},
        {"max_selected": 20},
    ):
        other = Case(case.tiny, case.lengths, 64, 5, case.selection | changes)
        found, _ = other.run(model, cold_dir, dram_budget=ALL_HOT)
        assert not torch.equal(bits(found), bits(expected)), changes


# --- mutation twins ------------------------------------------------------------------------

# All but a token or two are selected, so that nearly every stored row counts; almost nothing is
# hot, or all is.
TWIN = Case(TinyModel(), (200,), 64, 3, {"alpha": 0.99, "block_rows": 64})


def disturbed(cold_dir, disturb, case=TWIN, **placement):
    """Read the prompt, disturb what is stored, and return the logits that follow."""
    model = case.tiny.build()
    ids, _ = prompts(list(case.lengths))
    with attached(model, cold_dir, **case.selection, **placement) as hill, torch.no_grad():
        cache = hill.new_cache()
        for part in torch.split(ids, 64, dim=1):
            out = model(part, past_key_values=cache)
        model(out.logits[:, -1:].argmax(-1), past_key_values=cache)
        disturb(cache._runtime)
        out = model(torch.tensor([[VOCABULARY - 1]]), past_key_values=cache)
        cache.close()
    return out.logits


def leave_alone(runtime):
    pass


def flip_on_drive(runtime):
    """Flip the lowest bit of the first key value of position 70 in layer 1."""
    runtime._store.settle(1, np.arange(4096))
    # A second, buffered descriptor of the nameless file, because direct I/O moves whole pages.
    path = f"/proc/self/fd/{runtime._store._files[1]._descriptor}"
    descriptor = os.open(path, os.O_RDWR)
    offset = 70 * runtime.shape.row_bytes
    byte = os.pread(descriptor, 1, offset)[0]
    os.pwrite(descriptor, bytes([byte ^ 1]), offset)
    os.fsync(descriptor)
    os.close(descriptor)


def flip_in_hot_pool(runtime):
    pool = runtime._pools.layers[1]
    slot = int(pool.slots(np.array([70]))[0])
    assert slot >= 0
    pool._rows[slot, 0] ^= 1


def flip_in_tail(runtime):
    runtime._sequences[0].tails[1, 3, 0] ^= 1


@pytest.mark.parametrize(
    ("disturb", "hot"),
    [(flip_on_drive, False), (flip_in_hot_pool, True), (flip_in_tail, False)],
)
def test_one_flipped_bit_of_a_row_changes_the_logits(disturb, hot, cold_dir):
    budget = ALL_HOT if hot else TWIN.least_bytes()
    expected = disturbed(cold_dir, leave_alone, dram_budget=budget)
    assert torch.equal(disturbed(cold_dir, leave_alone, dram_budget=budget), expected)
    assert not torch.equal(disturbed(cold_dir, disturb, dram_budget=budget), expected)


def test_a_bit_on_the_drive_is_not_read_while_its_row_is_hot(cold_dir):
    expected = disturbed(cold_dir, leave_alone, dram_budget=ALL_HOT)
    assert torch.equal(disturbed(cold_dir, flip_on_drive, dram_budget=ALL_HOT), expected)


@pytest.mark.parametrize("device", ["nvme", "golden"])
def test_one_flipped_bit_of_a_shadow_changes_the_logits(device, cold_dir):
    case = Case(TinyModel(), (200,), 64, 3, {"alpha": 0.2, "kept_recent": 6})

    def flip(position):
        def disturb(runtime):
            # Contract, section 5: a group is a beat of exponents per KV head, then codes.
            group, token = divmod(position, 64)
            at = group * runtime._spec.group_beats
            runtime._sequences[0].segments[0].shadows[1][at, token] ^= 16

        return disturb

    expected = disturbed(cold_dir, leave_alone, case, dram_budget=ALL_HOT, device=device)
    changed = [
        not torch.equal(
            disturbed(cold_dir, flip(position), case, dram_budget=ALL_HOT, device=device), expected
        )
        for position in (70, 71, 72, 73)
    ]
    assert any(changed)
