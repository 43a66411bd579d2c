# SPDX-License-Identifier: Apache-2.0
"""Patterns of pauses for a bus channel: endless sequences of true (pause) and false, by cycle."""

import random


def at_random(seed, share=0.3):
    """Each cycle by itself."""
    generator = random.Random(seed)
    while True:
        yield generator.random() < share


def toggling():
    """Every other cycle."""
    while True:
        yield True
        yield False


def long_pauses(seed, longest, most_free):
    """Pauses of up to `longest` cycles, and between them up to `most_free` without one."""
    generator = random.Random(seed)
    while True:
        yield from [True] * generator.randint(1, longest)
        yield from [False] * generator.randint(1, most_free)


def bunches(pause, free):
    """Nothing for `pause` cycles, then everything that waits."""
    while True:
        yield from [True] * pause
        yield from [False] * free
