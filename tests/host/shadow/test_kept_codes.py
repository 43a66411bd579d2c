# SPDX-License-Identifier: Apache-2.0
"""Under which numbers codes of values are kept, and when they are kept once."""

import numpy as np
import pytest

from hillinfer.memory_budget import Accountant
from hillinfer.shadow.kept_codes import KeptCodes
from hillinfer.shadow.values import ValueCodes
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import KernelSpec

SPEC = KernelSpec(64, 3, 3, segment_tokens=512)
ROWS = np.arange(128, 256)


def statistics(mean=7):
    exponents = np.full((3, 64), -3, np.int8)
    return ChannelStatistics(exponents, np.full((3, 64), mean, np.int32))


@pytest.fixture
def kept():
    accountant = Accountant(16 << 20)
    return KeptCodes(ValueCodes(SPEC, 2, accountant, lambda: 0, lambda _: None), None)


def test_the_same_rows_with_the_same_statistics_have_the_same_codes(kept):
    own = kept.numbered(1, ROWS, statistics())
    assert kept.numbered(1, ROWS[:64], statistics()) is own
    for layer, rows, other in (
        (0, ROWS, statistics()),
        (1, ROWS + 64, statistics()),
        (1, ROWS, statistics(8)),
        # Rows of an open group have no numbers yet, so nobody knows whose they are.
        (1, ROWS[:0], statistics()),
    ):
        assert kept.numbered(layer, rows, other).number != own.number


def test_what_nobody_has_any_more_is_not_known(kept):
    number = kept.numbered(1, ROWS, statistics()).number
    assert kept.numbered(1, ROWS, statistics()).number != number


def test_codes_that_came_once_are_not_read_again(kept):
    own, reads = kept.numbered(1, ROWS, statistics()), []

    def read():
        reads.append(1)
        return np.zeros((len(ROWS), 99), np.uint8)

    kept.bring(1, ROWS, own, read)
    # It does not lack any.
    assert not reads
    for _ in range(2):
        kept.lack(own)
        kept.bring(1, ROWS, own, read)
    assert len(reads) == 1


def test_nothing_lacks_codes_that_nobody_has_any_more(kept):
    own = kept.numbered(1, ROWS, statistics())
    kept.lack(own)
    assert list(kept.lacking) == [own.number]
    del own
    assert not kept.lacking
