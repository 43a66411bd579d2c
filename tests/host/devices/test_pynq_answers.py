# SPDX-License-Identifier: Apache-2.0
"""Which launch a PYNQ front's answer is of: an interrupt leaves one that nobody waits for."""

import signal
from contextlib import closing, contextmanager

import numpy as np
import pytest

from hillinfer_pynq.front_process import FrontProcess, PynqError

# In place of the environment's interpreter: it is called with -I, front.py, a folder and a
# descriptor. Scores are what the launch's are before.
SCRIPT = """#!/bin/bash
say() { echo "{\\"$1\\": \\"$2\\"}"; }
run() { cp $FOLDER/$1/in/scores.npy $FOLDER/$1/out/scores.npy; }
FOLDER=$3
say ready 1 >&$4
while read name; do
    %s
done
"""
SECONDS = 60.0


@pytest.fixture
def start(tmp_path):
    def start(loop):
        program = tmp_path / "python"
        program.write_text(SCRIPT % loop.replace("\n", "\n    "))
        program.chmod(0o700)
        return closing(FrontProcess(program, b"", "shell", "00" * 8, {}, SECONDS))

    return start


@contextmanager
def interrupts():
    """Have the signal that the program sends do what Ctrl-C does."""
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def scores(number):
    return np.full((2, 64), number, np.uint8)


def launch(front, number):
    (found,) = front.launch(
        "score_tokens", {"scores": scores(number)}, {"segment_count": 1}, ("scores",), SECONDS
    )
    return found


# The first launch is interrupted. Its answer comes long before the second one's, or with it.
EARLIER = """if [ $name = launch-0 ]; then kill -USR1 $PPID; fi
sleep 0.5
run $name
say done $name >&$4"""
TOGETHER = """run $name
if [ $name = launch-0 ]; then kill -USR1 $PPID; held=$(say done $name); continue; fi
if [ "$held" ]; then echo "$held"$'\\n'$(say done $name) >&$4; held=; continue; fi
say done $name >&$4"""


@pytest.mark.parametrize("loop", [EARLIER, TOGETHER], ids=["earlier", "together"])
def test_an_interrupted_launch_leaves_the_next_one_its_own_scores(start, loop):
    with start(loop) as front:
        with interrupts(), pytest.raises(KeyboardInterrupt):
            launch(front, 1)
        for number in (2, 3):
            assert np.array_equal(launch(front, number), scores(number))
        assert front.running
        assert not [*front.folder.glob("launch-*")]


def test_an_answer_to_a_launch_that_nobody_asked_for_ends_the_front(start):
    with start("run $name; say done launch-7 >&$4") as front:
        with pytest.raises(PynqError, match="could not run score_tokens: an answer to another"):
            launch(front, 1)
        assert not front.running
