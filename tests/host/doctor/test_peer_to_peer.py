# SPDX-License-Identifier: Apache-2.0
"""What the driver's `config` node says of P2P, in its own words."""

import pytest

from hillinfer.doctor.cards import P2PState, PeerToPeer

GIB = 1 << 30
SMALL = 256 << 20


def config(*lines):
    return "".join(f"{line}\n" for line in lines)


@pytest.mark.parametrize(
    ("lines", "state"),
    [
        ((f"bar:{4 * GIB}", f"exp_bar:{4 * GIB}", f"rbar:{4 * GIB}"), P2PState.ENABLED),
        ((f"bar:{4 * GIB}", f"exp_bar:{4 * GIB}", f"remap:{4 * GIB}"), P2PState.ENABLED),
        ((f"bar:{4 * GIB}", f"exp_bar:{4 * GIB}", "remap:0"), P2PState.ENABLED),
        ((f"bar:{SMALL}", f"exp_bar:{4 * GIB}", f"rbar:{SMALL}"), P2PState.DISABLED),
        ((f"bar:{SMALL}", f"exp_bar:{4 * GIB}"), P2PState.DISABLED),
        ((f"bar:{SMALL}",), P2PState.DISABLED),
        ((f"bar:{SMALL}", f"exp_bar:{4 * GIB}", f"rbar:{4 * GIB}"), P2PState.REBOOT),
        ((f"bar:{4 * GIB}", f"exp_bar:{4 * GIB}", f"remap:{2 * GIB}"), P2PState.WRONG),
        # A reboot comes first, as it changes the rest.
        ((f"bar:{SMALL}", f"rbar:{4 * GIB}", f"remap:{GIB}"), P2PState.REBOOT),
        ((f"exp_bar:{4 * GIB}", f"max_bar:{4 * GIB}"), P2PState.UNSUPPORTED),
        ((), P2PState.UNSUPPORTED),
        (("bar:unreadable", f"exp_bar:{4 * GIB}"), P2PState.UNSUPPORTED),
    ],
)
def test_states(lines, state):
    assert PeerToPeer.of_config(config(*lines)).state is state


def test_the_window_needed_is_told_where_the_driver_tells_it():
    assert PeerToPeer.of_config(config(f"bar:{SMALL}", f"exp_bar:{4 * GIB}")).needed_bytes == (
        4 * GIB
    )
    assert PeerToPeer.of_config(config(f"bar:{SMALL}")).needed_bytes is None


def test_lines_of_memory_banks_are_no_sizes():
    """They are index, tag and size; the driver's default bank has no tag."""
    lines = [f"bar:{SMALL}", f"exp_bar:{4 * GIB}", f"0::{4 * GIB}", f"1:bar:{4 * GIB}"]
    assert PeerToPeer.of_config(config(*lines)) == PeerToPeer(P2PState.DISABLED, 4 * GIB)
