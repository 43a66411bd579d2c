# SPDX-License-Identifier: Apache-2.0
"""A step that broke off while it made room is taken again, with as much room as it writes to."""

import numpy as np
import pytest
import torch
from interrupts import interrupted
from runtime_rows import SETTINGS, SHAPE, fill, random_states

from hillinfer.engine.budget_plan import staging_bytes
from hillinfer.engine.runtime import Runtime
from hillinfer.native.selected import SelectedRows

CHOSEN = SETTINGS.changed(query="true", kept_recent=4)
# The first step selects 30 tokens and makes room for 60; the last one selects 61.
PROMPT, STEPS = 303, 302


class Decoding:
    """A sequence that is decoded token by token, and what its steps chose and gave."""

    def __init__(self, cold_dir):
        self.chosen, self.outputs = [], []
        self.runtime = Runtime(
            SHAPE,
            CHOSEN,
            staging_bytes(SHAPE, CHOSEN) + (1 << 20),
            cold_dir,
            observe_selected=lambda layer, length, sets: self.chosen.append(sets),
        )
        self.sequence = self.runtime.open_sequence()
        states = fill(self.runtime, self.sequence, PROMPT)
        for layer in range(SHAPE.layers):
            self.runtime.code_full_segments(layer, self.sequence, states[0, layer])
        for number in range(STEPS - 1):
            self.step(number)

    def step(self, number):
        self.runtime.begin_step()
        states = random_states(number, 1)
        query = torch.randn(4, 1, 6, generator=torch.Generator().manual_seed(number))
        for layer in range(SHAPE.layers):
            keys, values = states[:, layer]
            self.runtime.append(layer, self.sequence, keys, values)
            out = self.runtime.attend_selected(layer, self.sequence, query, None, 0.4)
            self.outputs.append(out.clone())

    def interrupt_step(self, event):
        """Begin the last step, have it break off where it makes room, and forget its token."""
        before = self.sequence.lengths[0]
        with pytest.raises(KeyboardInterrupt), interrupted(SelectedRows.__init__, event):
            self.step(STEPS - 1)
        self.runtime.truncate(self.sequence, before)


@pytest.fixture
def decoded(tmp_path, cold_dir):
    opened = []

    def make():
        opened.append(Decoding(cold_dir))
        return opened[-1]

    yield make
    for one in opened:
        one.runtime.close()


@pytest.mark.parametrize("event", ["call", "return"])
def test_a_step_that_broke_off_making_room_is_taken_again_as_it_was(decoded, event):
    broken, whole = decoded(), decoded()
    broken.interrupt_step(event)
    for one in (broken, whole):
        one.step(STEPS - 1)
    for own, other in zip(broken.chosen[-2:], whole.chosen[-2:], strict=True):
        np.testing.assert_array_equal(own, other)
        assert own[0].shape == (61,)
    for own, other in zip(broken.outputs[-2:], whole.outputs[-2:], strict=True):
        assert torch.equal(own, other)
    # The twin: another step chooses and gives something else.
    assert not torch.equal(whole.outputs[-1], whole.outputs[-3])
