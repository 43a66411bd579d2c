# SPDX-License-Identifier: Apache-2.0
"""A short selection of `make attack`, and proof that it sees what must not be."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ATTACK = ROOT / "tools" / "attack.py"
LINE = "hillinfer: error: no: give another"


@pytest.fixture
def ended():
    from attacks.commands import Ended

    def make(code, err="", orphans=0):
        return Ended(code, "", err, orphans, 1.0)

    return make


@pytest.mark.parametrize(
    ("code", "err", "orphans", "sent", "wrong"),
    [
        (0, "", 0, None, ""),
        (2, LINE, 0, None, ""),
        (1, f"prefill: 1/1\n{LINE}", 0, None, ""),
        (130, "hillinfer: interrupted", 0, signal.SIGINT, ""),
        (-9, "", 0, signal.SIGKILL, ""),
        (-9, "", 0, None, "crash: SIGKILL"),
        (-11, "", 0, signal.SIGKILL, "crash: SIGSEGV"),
        (None, "", 0, None, "hang"),
        (
            1,
            "Traceback (most recent call last):\nKeyError: 'a'",
            0,
            None,
            "traceback: Traceback (most recent call last): KeyError",
        ),
        (0, "Exception ignored in: <a>\nOSError", 0, None, "traceback"),
        (2, f"thread 'main' panicked at src/lib.rs:1:2:\nno\n{LINE}", 0, None, "traceback"),
        (2, f"stack backtrace:\n{LINE}", 0, None, "traceback"),
        (0, "", 2, None, "leak: 2 processes"),
        (120, "", 0, None, "exit 120"),
        (2, "", 0, None, "message"),
        (2, f"{LINE}\n{LINE}", 0, None, "message"),
        (2, f"{LINE}\x1b[2J", 0, None, "message"),
        (2, LINE * 200, 0, None, "message"),
    ],
)
def test_what_is_wrong_with_how_a_command_ended(ended, code, err, orphans, sent, wrong):
    found = ended(code, err, orphans).wrong(sent)
    assert found.startswith(wrong)
    assert bool(found) is bool(wrong)


def test_the_tables_are_as_long_as_the_attack_was():
    from attacks.hostile_folders import Fate, hostile_folders
    from fuzzing.session_target import hostile_manifests

    hostile = hostile_folders()
    names = [one.name for one in hostile]
    assert len(set(names)) == len(names) >= 121
    assert sum(one.fate is Fate.REFUSED for one in hostile) > 100
    assert len(hostile_manifests()) >= 257


ONE = """
import json, sys, tempfile
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from fuzzing.preloaded import preload
preload()
from attacks.commands import Commands
from attacks.files import folders
from attacks.hostile_folders import Fate, Hostile
from attacks.part import Ground, Part
from attacks import files
from fuzzing.model_folders import tiny_folder

whole = tiny_folder()
files.hostile_folders = lambda: [
    Hostile("whole", Fate.SAME, whole),
    # What must be refused, and is not: a folder with nothing wrong.
    Hostile("taken", Fate.REFUSED, whole),
    Hostile("empty", Fate.REFUSED, {}),
]
with tempfile.TemporaryDirectory() as folder, Commands() as commands:
    ground = Ground(Path(folder), Path(folder, "kept"), commands)
    part = Part("folders")
    folders(ground, part, None)
    running = commands.start(ground.generate(), ground.setting())
    running.send(11)
    killed = running.wait()
    hung = commands.run(ground.generate(), ground.setting(), seconds=0.01)
    full = commands.run(["models"], ground.setting(stdout="/dev/full"))
    closed = commands.run(["models"], ground.setting(stdout="closed"))
    (ground.cold_dir / "left").write_text("1")
    print(json.dumps({
        "part": part.as_json(),
        "killed": [killed.wrong(), killed.wrong(11)],
        "hung": hung.wrong(),
        "closed": closed.out,
        "left": ground.leftovers(),
        "text": ground.text,
    }))
"""


def test_commands_of_the_attack_are_real_and_what_is_wrong_is_seen(warm_python):
    done = subprocess.run(
        [*warm_python, "-c", ONE, ROOT / "tools"],
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    told = json.loads(done.stdout)
    part = told["part"]
    assert (part["tried"], part["refused"], part["harmless"], part["wrong"]) == (3, 1, 1, 1)
    assert part["found"][0]["what"].startswith("taken, with the answer")
    assert "--replay" in part["found"][0]["again"]
    assert told["killed"] == ["crash: SIGSEGV", ""]
    assert told["hung"].startswith("hang")
    assert told["closed"] == ""
    assert told["left"] == "leftover: cold/left"
    assert len(told["text"]) > 1
