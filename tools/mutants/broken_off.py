# SPDX-License-Identifier: Apache-2.0
"""Faults in what is there once an error or an interrupt has broken something off."""

from __future__ import annotations

from mutants.mutant import Mutant

_APPENDS = "tests/host/kv/test_broken_appends.py"
_INTERRUPTED = "test_an_interrupt_leaves_rows_and_buffers_as_they_were"

BROKEN_OFF = (
    Mutant(
        "open-group-lost-to-an-error",
        "The open group is replaced before what may fail is done.",
        "host/hillinfer/kv/rows.py",
        "            promoting, elsewhere = None, None\n",
        "            promoting, elsewhere = None, None\n"
        "            if done + taken == tokens:\n"
        "                tail[:] = buffer[taken + filled - GROUP_TOKENS : taken + filled]\n",
        (f"{_APPENDS}::test_an_error_leaves_the_open_group_as_it_was",),
    ),
    Mutant(
        "open-group-lost-to-an-interrupt",
        "What was written is looked for in the open group, where others come meanwhile.",
        "host/hillinfer/kv/rows.py",
        "sequence.set_length(layer, length, length - is_last * GROUP_TOKENS)",
        "sequence.set_length(layer, length, sequence.held_starts[layer])",
        (f"{_APPENDS}::{_INTERRUPTED}[pack-110]",),
    ),
    Mutant(
        "buffer-lost-to-an-interrupt",
        "A buffer that an interrupt left unsent is given to nobody any more.",
        "host/hillinfer/kv/rows.py",
        "        return self._buffers[self._is_sent.index(False)]\n",
        "        which = self._is_sent.index(False)\n"
        "        self._is_sent[which] = True\n"
        "        return self._buffers[which]\n",
        (f"{_APPENDS}::{_INTERRUPTED}[append-92]",),
    ),
)
