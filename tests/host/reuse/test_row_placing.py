# SPDX-License-Identifier: Apache-2.0
"""Rows that wait for a pass, where that breaks off in the middle of placing them."""

import threading
from types import SimpleNamespace

import pytest

from hillinfer.reuse.row_placing import RowPlacing

ENOUGH = 20


class BrokenOffError(Exception):
    pass


class Row:
    is_checked, layer = False, 0


class Offered:
    """Rows that no core was left for."""

    def __init__(self, strikes):
        self.strikes = strikes

    def place(self, threads):
        raise self.strikes

    def is_placed(self, seconds):
        return False

    def end(self, seconds):
        return True


@pytest.mark.parametrize(
    ("strikes", "told"), [(KeyboardInterrupt, InterruptedError), (BrokenOffError, BrokenOffError)]
)
def test_who_read_rows_learns_that_the_pass_broke_off(strikes, told):
    """A process that ends waits for the thread that reads, which must not wait for ever."""

    landed, found = [], []
    states = SimpleNamespace(offer=lambda rows, tokens: Offered(strikes))
    placing = RowPlacing(states, 64, landed.append, threading.Condition(), 2)
    placing.let_wait()
    own = Row()
    placing.take([own])
    with pytest.raises(strikes):
        placing.help(0)

    def settle():
        try:
            placing.settle([own])
        except Exception as error:
            found.append(type(error))

    reader = threading.Thread(target=settle, daemon=True)
    reader.start()
    reader.join(ENOUGH)
    assert found == [told]
    assert not landed
