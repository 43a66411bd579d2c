# SPDX-License-Identifier: Apache-2.0
"""A pass simulated moment by moment: a drive and a processor that know nothing of a recurrence."""

from dataclasses import dataclass


@dataclass
class Simulated:
    """When things happened, in ticks."""

    rows: list
    attends: list
    through: list


def simulate(work, buffers, wrong=0):
    """Run a pass tick by tick.

    Work is a list of (pre, attend, post, read) in whole ticks. The drive reads layers in order and
    starts one only where fewer than `buffers` layers lie in memory that are not through yet; with
    none it starts when the processor asks. `wrong` ticks are added to each read: the twin.
    """
    count = len(work)
    rows, attends, through = [None] * count, [None] * count, [None] * count
    now, reading, read_left = 0, 0, None
    layer, stage, left = 0, 0, None
    wanted = [False] * count
    while None in through:
        # Whatever takes no time happens at once, in any order, until nothing moves.
        moved = True
        while moved:
            moved = False
            if read_left is None and reading < count:
                held = reading - sum(one is not None for one in through[:reading])
                if (held < buffers) if buffers else wanted[reading]:
                    read_left, moved = work[reading][3] + wrong, True
            if read_left == 0:
                rows[reading], read_left, moved = now, None, True
                reading += 1
            if layer < count and left is None:
                left, moved = work[layer][stage], True
            if layer < count and left == 0:
                if stage == 0:
                    moved, wanted[layer] = moved or not wanted[layer], True
                    if rows[layer] is not None:
                        attends[layer], stage, left, moved = now, 1, None, True
                elif stage == 1:
                    stage, left, moved = 2, None, True
                else:
                    through[layer], layer, stage, left, moved = now, layer + 1, 0, None, True
        now += 1
        if read_left:
            read_left -= 1
        if left:
            left -= 1
    return Simulated(rows, attends, through)
