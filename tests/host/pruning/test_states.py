# SPDX-License-Identifier: Apache-2.0
"""States on the drive come back as they were, in pieces through a small buffer."""

import pytest
import torch

from hillinfer.drive.files import PAGE_BYTES, ColdFile, aligned_buffer, probe_io_mode
from hillinfer.errors import BudgetError, ColdPoolError
from hillinfer.memory_budget import Accountant, Part
from hillinfer.pruning.states import BUFFER_BYTES, StatesFile, gathered_states

# Of one piece, of several with odd rows, of rows that are more than the buffer, and of a batch.
SHAPES = [(1, 20, 32), (1, 1000, 289), (1, 3, BUFFER_BYTES // 4 + 5), (2, 500, 576)]


@pytest.fixture
def file(cold_dir):
    return ColdFile(cold_dir, probe_io_mode(cold_dir))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_states_of_many_pieces_come_back_as_they_were(shape, dtype, file):
    accountant = Accountant(2 * BUFFER_BYTES)
    written = StatesFile(file, accountant)
    given = [torch.randn(shape).to(dtype) for _ in range(2)]
    pieces = [written.add(one) for one in given]
    assert sum(accountant.held().values()) == 0
    row_bytes = shape[2] * dtype.itemsize
    most = max(BUFFER_BYTES, row_bytes + PAGE_BYTES)
    assert min(row_bytes, BUFFER_BYTES) < accountant.peak()[Part.STAGING] <= most
    joined = torch.cat(given, 1)
    for places in (torch.arange(2 * shape[1]), torch.arange(shape[1] // 3, 2 * shape[1], 7)):
        assert torch.equal(gathered_states(pieces, places), joined[:, places])
    first = pieces[1].first(2)
    assert first.byte_count == 2 * row_bytes * shape[0]
    assert torch.equal(first.take(torch.tensor([1])), given[1][:, 1:2])
    assert sum(accountant.held().values()) == 0


def test_a_piece_that_changed_is_an_error_and_others_are_not(file):
    written = StatesFile(file, Accountant(BUFFER_BYTES))
    given = torch.randn(1, 1000, 256)
    states = written.add(given)
    # 256 tokens are a piece.
    file.write(aligned_buffer(PAGE_BYTES).data, 256 * 1024)
    others = torch.cat([torch.arange(256), torch.arange(512, 1000)])
    assert torch.equal(states.take(others), given[:, others])
    with pytest.raises(ColdPoolError, match="262144 bytes at 262144"):
        states.take(torch.tensor([300]))


def test_states_that_the_budget_has_no_buffer_for_are_refused(file):
    accountant = Accountant(BUFFER_BYTES)
    states = StatesFile(file, accountant).add(torch.randn(1, 1000, 256))
    accountant.take(Part.OTHER, PAGE_BYTES)
    with pytest.raises(BudgetError, match="raise --dram-budget"):
        states.take(torch.tensor([0]))
    accountant.give(Part.OTHER, PAGE_BYTES)
    assert states.take(torch.tensor([0])).shape == (1, 1, 256)
