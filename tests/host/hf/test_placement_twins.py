# SPDX-License-Identifier: Apache-2.0
"""What placement invariance is worth: one flipped bit of what is stored does change the logits."""

import os

import numpy as np
import pytest
import torch
from generation_runs import attached
from placement_cases import ALL_HOT, Case
from tiny_models import VOCABULARY, TinyModel, prompts

from hillinfer.errors import ColdPoolError

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
        disturb(cache.engine.runtime)
        out = model(torch.tensor([[VOCABULARY - 1]]), past_key_values=cache)
        cache.close()
    return out.logits


def leave_alone(runtime):
    pass


def flip_on_drive(runtime):
    """Flip a bit of the first number of position 70 in layer 1, not one that rounding may hide."""
    runtime.parts.store.settle(1, np.arange(4096))
    # A second, buffered descriptor of the nameless file, because direct I/O moves whole pages.
    path = f"/proc/self/fd/{runtime.parts.store.files[1].descriptor}"
    descriptor = os.open(path, os.O_RDWR)
    offset = 70 * runtime.shape.row_bytes + 1
    byte = os.pread(descriptor, 1, offset)[0]
    os.pwrite(descriptor, bytes([byte ^ 1]), offset)
    os.fsync(descriptor)
    os.close(descriptor)


def flip_in_hot_pool(runtime):
    pool = runtime.parts.pools.layers[1]
    slot = int(pool.slots(np.array([70]))[0])
    assert slot >= 0
    pool.columns.data[slot, 1] ^= 1


def flip_in_tail(runtime):
    runtime.parts.rows.sequences[0].tails[1, 3, 1] ^= 1


@pytest.mark.parametrize(
    ("disturb", "hot"),
    [(flip_in_hot_pool, True), (flip_in_tail, False)],
)
def test_one_flipped_bit_of_a_row_changes_the_logits(disturb, hot, cold_dir):
    budget = ALL_HOT if hot else TWIN.least_bytes()
    expected = disturbed(cold_dir, leave_alone, dram_budget=budget)
    assert torch.equal(disturbed(cold_dir, leave_alone, dram_budget=budget), expected)
    assert not torch.equal(disturbed(cold_dir, disturb, dram_budget=budget), expected)


def test_one_flipped_bit_of_a_row_on_the_drive_is_an_error(cold_dir):
    with pytest.raises(ColdPoolError, match="rows of layer 1 of the cold pool"):
        disturbed(cold_dir, flip_on_drive, dram_budget=TWIN.least_bytes())


def test_a_bit_on_the_drive_is_not_read_while_its_row_is_hot(cold_dir):
    expected = disturbed(cold_dir, leave_alone, dram_budget=ALL_HOT)
    assert torch.equal(disturbed(cold_dir, flip_on_drive, dram_budget=ALL_HOT), expected)


@pytest.mark.parametrize("device", ["nvme", "golden"])
def test_one_flipped_bit_of_a_shadow_changes_the_logits(device, cold_dir):
    case = Case(TinyModel(), (200,), 64, 3, {"alpha": 0.2, "kept_recent": 6})

    def flip(position):
        def disturb(runtime):
            # Contract, section 9: a group is a beat of exponents per KV head, then codes.
            group, token = divmod(position, 64)
            at = group * runtime.parts.spec.group_beats
            runtime.parts.rows.sequences[0].segments[0].layers[1].shadow[at, token] ^= 16

        return disturb

    expected = disturbed(cold_dir, leave_alone, case, dram_budget=ALL_HOT, device=device)
    changed = [
        not torch.equal(
            disturbed(cold_dir, flip(position), case, dram_budget=ALL_HOT, device=device), expected
        )
        for position in (70, 71, 72, 73)
    ]
    assert any(changed)
