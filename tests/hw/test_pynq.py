# SPDX-License-Identifier: Apache-2.0
"""PYNQ in front of the RTL on an emulated card: equal to golden, and gone when it fails."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from executions import pynq_execution
from launch_cases import SCORE_CASES, SHADOW_CASES, random_launch, random_shadow_launch
from launch_flips import visible_flip

from hillinfer.devices.xrt.xclbin import SectionKind, Xclbin, XclbinError, spec_record
from hillinfer.system.processes import processes_in
from hillinfer_hw.emulation import Engine, make_surrounding
from hillinfer_hw.emulation_image import PLATFORM
from hillinfer_hw.toolchain import MissingToolError, find_pynq_python
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.golden_launch import run_score_launch, run_shadow_launch
from hillinfer_model.kernel_spec import KernelSpec, ProductStyle
from hillinfer_model.memory_model import IDEAL, REALISTIC
from hillinfer_pynq.execution import PATIENCE_S, Card, PynqExecution
from hillinfer_pynq.front_process import FrontProcess, PynqError

# Two KV heads of one query head: nothing smaller has both.
SMALL = KernelSpec(
    64, 2, 1, key_mode=KeyMode.INT8, rule=Rule.RAW_SUM, segment_tokens=512, block_tokens=64
)
TOKENS = [512, 130, 0, 1, 63, 65]
# The same kernels by another name: their status beats say which one they are.
RENAMED = replace(SMALL, product_style=ProductStyle.LUT)
# Of a host that gives up soon, and the most that any test waits, however busy the machine.
PATIENCE, ENOUGH = 1.0, 120.0

# Tests of one spec run in one process, so that its kernels are built once.
pytestmark = pytest.mark.xdist_group(SMALL.digest().hex())


@pytest.fixture(scope="module")
def emulated():
    """The table's execution; its first launch builds the kernels."""
    execution = pynq_execution()
    execution.score(SMALL, random_launch(SMALL, Scope.LAYER, [3]))
    yield execution
    execution.close()


@pytest.fixture
def card(emulated):
    return emulated.card_of(SMALL)


@pytest.fixture
def own(emulated, card):
    """An execution that may be broken."""
    execution = PynqExecution(emulated.python, lambda spec: card)
    yield execution
    execution.close()


def same(one, other):
    return np.array_equal(one.output, other.output) and np.array_equal(one.status, other.status)


@pytest.mark.parametrize("case", ["random", "odd_counts", "no_segments", "wrong_scope"])
@pytest.mark.parametrize("scope", list(Scope))
def test_scores_are_goldens(emulated, scope, case):
    launch = SCORE_CASES[case](SMALL, scope, 130)
    assert same(emulated.score(SMALL, launch), run_score_launch(SMALL, launch))


@pytest.mark.parametrize("case", ["random", "odd_counts", "no_segments", "wrong_tokens"])
def test_shadows_are_goldens(emulated, case):
    launch = SHADOW_CASES[case](SMALL, 130)
    assert same(emulated.make_shadow(SMALL, launch), run_shadow_launch(SMALL, launch))


@pytest.mark.parametrize("scope", list(Scope))
def test_a_flipped_bit_of_the_scores_input_shows(emulated, scope):
    launch = random_launch(SMALL, scope, TOKENS)
    flip = visible_flip(SMALL, launch, run_score_launch, same)
    found = emulated.score(SMALL, flip)
    assert not same(found, run_score_launch(SMALL, launch))
    assert same(found, run_score_launch(SMALL, flip))


def test_a_flipped_bit_of_the_rows_shows(emulated):
    launch = random_shadow_launch(SMALL, TOKENS)
    flip = visible_flip(SMALL, launch, run_shadow_launch, same)
    found = emulated.make_shadow(SMALL, flip)
    assert not same(found, run_shadow_launch(SMALL, launch))
    assert same(found, run_shadow_launch(SMALL, flip))


def test_both_kernels_work_on_one_card_with_buffers_that_grow_and_shrink(own):
    for tokens in ([1], TOKENS, [40], [512] * 4, [7]):
        launch = random_launch(SMALL, Scope.KV_HEAD, tokens)
        assert same(own.score(SMALL, launch), run_score_launch(SMALL, launch))
        made = random_shadow_launch(SMALL, tokens)
        assert same(own.make_shadow(SMALL, made), run_shadow_launch(SMALL, made))


def test_two_fronts_work_at_once(emulated, own):
    launches = [random_launch(SMALL, Scope.LAYER, TOKENS, seed) for seed in (1, 50)]
    for launch in launches:
        for execution in (emulated, own):
            assert same(execution.score(SMALL, launch), run_score_launch(SMALL, launch))
    assert emulated.front.folder != own.front.folder


def test_realistic_memory_changes_cycles_and_no_score(emulated, tmp_path):
    """The card that `make hw_emu` generates with; the twin is the ideal one.

    The card counts a thousand cycles at a time, so there is work for many thousands.
    """
    launch = random_launch(SMALL, Scope.LAYER, [512] * 16)
    cycles = {}
    for memory in (IDEAL, REALISTIC):
        made = make_surrounding(SMALL, Engine.RTL, tmp_path / memory.name, memory)
        log = tmp_path / f"{memory.name}.log"
        variables = made.environment | made.for_process() | {"HILLINFER_EMULATION_LOG": str(log)}
        card = Card(made.xclbin, PLATFORM, variables)
        own = PynqExecution(emulated.python, lambda spec, card=card: card)
        try:
            assert same(own.score(SMALL, launch), run_score_launch(SMALL, launch))
        finally:
            own.close()
        cycles[memory.name] = sum(
            json.loads(line)["cycles"] for line in log.read_text().splitlines()
        )
    assert cycles["realistic"] > cycles["ideal"]


# What is refused


def test_an_xclbin_of_another_spec_is_refused(own):
    other = replace(SMALL, rule=Rule.WEIGHT_SUM)
    with pytest.raises(XclbinError, match="rule='raw_sum' instead of 'weight_sum'"):
        own.score(other, random_launch(other, Scope.LAYER, [3]))


def test_an_xclbin_for_another_platform_is_refused(emulated, card):
    other = PynqExecution(emulated.python, lambda spec: replace(card, platform="xilinx_u50"))
    with pytest.raises(XclbinError, match="the card has 'xilinx_u50'"):
        other.score(SMALL, random_launch(SMALL, Scope.LAYER, [3]))


def changed_card(card, folder, **changes):
    path = folder / "changed.xclbin"
    path.write_bytes(replace(Xclbin.read(card.xclbin), **changes).pack())
    return Card(path, changes.get("platform", card.platform), card.environment)


def test_a_card_with_another_platform_is_refused(emulated, card, tmp_path):
    changed = changed_card(card, tmp_path, platform="xilinx_u50")
    other = PynqExecution(emulated.python, lambda spec: changed)
    with pytest.raises(PynqError, match=r"platform is 'xilinx_u2_.*', not 'xilinx_u50'"):
        other.score(SMALL, random_launch(SMALL, Scope.LAYER, [3]))


def card_called(card, name, folder):
    """The card under another name: XRT's driver takes it from emconfig.json."""
    there = Path(card.environment["EMCONFIG_PATH"]) / "emconfig.json"
    text = there.read_text()
    assert text.count(f'"{card.platform}"') == 1
    (folder / there.name).write_text(text.replace(f'"{card.platform}"', f'"{name}"'))
    return replace(card, environment={**card.environment, "EMCONFIG_PATH": str(folder)})


def test_a_card_that_names_its_shell_is_worked_with(emulated, card, tmp_path):
    """Cards say `..._gc_base_2`; the twin: another version of the shell."""
    launch = random_launch(SMALL, Scope.LAYER, [130, 3])
    named = card_called(card, "xilinx_u2_gen3x4_xdma_gc_base_2", tmp_path)
    own = PynqExecution(emulated.python, lambda spec: named)
    try:
        assert same(own.score(SMALL, launch), run_score_launch(SMALL, launch))
        assert own.front.running
    finally:
        own.close()
    other = card_called(card, "xilinx_u2_gen3x4_xdma_gc_base_1", tmp_path)
    refused = PynqExecution(emulated.python, lambda spec: other)
    with pytest.raises(PynqError, match=r"is '.*_base_1', not '.*_2_202110_1' or '.*_base_2'"):
        refused.score(SMALL, launch)


def test_kernels_that_answer_with_another_hash_are_refused(emulated, card, tmp_path):
    """The xclbin's record says one spec, its kernels are of another."""
    sections = dict(Xclbin.read(card.xclbin).sections)
    del sections[SectionKind.USER_METADATA]
    sections[SectionKind.USER_METADATA] = spec_record(RENAMED, sections)
    changed = changed_card(card, tmp_path, sections=sections)
    other = PynqExecution(emulated.python, lambda spec: changed)
    with pytest.raises(PynqError, match="kernels of another spec"):
        other.score(RENAMED, random_launch(RENAMED, Scope.LAYER, [3]))


def test_without_xrts_version_nothing_is_started(emulated, card, tmp_path):
    """PYNQ would start kernels by itself then, which is wrong for these."""
    (tmp_path / "lib").symlink_to(Path(card.environment["XILINX_XRT"]) / "lib")
    changed = replace(card, environment={**card.environment, "XILINX_XRT": str(tmp_path)})
    other = PynqExecution(emulated.python, lambda spec: changed)
    with pytest.raises(PynqError, match=r"has no version\.json"):
        other.score(SMALL, random_launch(SMALL, Scope.LAYER, [3]))


# What fails


def front_and_device(execution):
    """The process of the front, and the one that plays its card."""
    front = execution.front
    pids = processes_in(front.folder)
    assert len(pids) == 2
    assert front.pid in pids
    return front.pid, next(pid for pid in pids if pid != front.pid)


def is_there(pid):
    """Whether a process runs; one that only waits to be counted by its parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def all_gone(pids):
    end = time.monotonic() + ENOUGH
    while any(map(is_there, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(is_there, pids))


FAULTS = {
    "device-killed": (1, signal.SIGKILL, "no answer"),
    "device-hangs": (1, signal.SIGSTOP, "no answer"),
    "front-killed": (0, signal.SIGKILL, "it has ended"),
    "front-hangs": (0, signal.SIGSTOP, "no answer"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_in_an_error_and_nothing_is_left(own, fault):
    which, number, said = FAULTS[fault]
    launch = random_launch(SMALL, Scope.LAYER, TOKENS)
    own.grace = PATIENCE
    own.score(SMALL, launch)
    pids, folder = front_and_device(own), own.front.folder
    own.patience = PATIENCE
    os.kill(pids[which], number)
    start = time.monotonic()
    with pytest.raises(PynqError, match=f"could not run score_tokens: {said}"):
        own.score(SMALL, launch)
    # Sooner than a patient host would have been.
    assert time.monotonic() - start < PATIENCE_S
    assert all_gone(pids)
    assert not folder.exists()
    own.patience = ENOUGH
    assert same(own.score(SMALL, launch), run_score_launch(SMALL, launch))


def test_a_kernel_that_does_not_end_in_time_is_named(own):
    # It is the front that says so, however long it takes to get there.
    own.grace = ENOUGH
    own.score(SMALL, random_launch(SMALL, Scope.LAYER, [1]))
    pids = front_and_device(own)
    own.patience = 1e-3
    with pytest.raises(PynqError, match=r"score_tokens has not ended after 0\.001 s"):
        own.score(SMALL, random_launch(SMALL, Scope.LAYER, [512] * 8))
    assert all_gone(pids)


def test_closing_ends_both_processes_and_removes_their_folder(own):
    own.score(SMALL, random_launch(SMALL, Scope.LAYER, [1]))
    pids, folder = front_and_device(own), own.front.folder
    own.close()
    assert all_gone(pids)
    assert not folder.exists()


def test_the_folder_is_its_owners_only(own):
    own.score(SMALL, random_launch(SMALL, Scope.LAYER, [1]))
    folder = own.front.folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.stat().st_uid == os.getuid()


def stand_in(tmp_path, script):
    """A program in place of the environment's interpreter: it is called with -I, front.py,
    a folder and two descriptors."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/bash\n{script}\n")
    program.chmod(0o700)
    return program


def start(program, card, patience=ENOUGH):
    return FrontProcess(
        program, card.xclbin.read_bytes(), card.platform, "00" * 8, card.environment, patience
    )


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo no json >&$4", "an answer that cannot be read: b'no json"),
        ("echo '[1]' >&$4", r"\[1\]"),
        ("echo '{\"done\": 1}' >&$4", "{'done': 1}"),
        ("echo lost its way >&2; exit 3", "it has ended\nlost its way"),
        ("printf half >&$4; sleep 1000", "no answer after"),
        ("setsid sleep 1000 & echo $! >> $PIDS; exec sleep 1000", "no answer after"),
    ],
    ids=["no-json", "no-object", "other-answer", "ends", "half-an-answer", "left-its-session"],
)
def test_a_front_that_starts_wrongly_is_ended(card, tmp_path, script, said):
    place, pids = tmp_path / "place", tmp_path / "pids"
    program = stand_in(tmp_path, f"PIDS={pids}; pwd > {place}; echo $$ > $PIDS; {script}")
    # Where the program hangs its host gives up, but not before a busy machine has started it.
    for patience in (PATIENCE, 10 * PATIENCE, ENOUGH) if "sleep" in script else (ENOUGH,):
        with pytest.raises(PynqError, match=f"could not load the card: {said}"):
            start(program, card, patience)
        if pids.exists():
            break
    assert all_gone(pids.read_text().split())
    assert not Path(place.read_text().strip()).exists()


def test_an_environment_that_is_not_there_is_named(card, tmp_path):
    with pytest.raises(PynqError, match=r"cannot start .*/nowhere: No such file"):
        start(tmp_path / "nowhere", card)
    with pytest.raises(MissingToolError, match="is missing: make pynq-env"):
        find_pynq_python(tmp_path)
    (tmp_path / "installed").write_text("pynq==2.7.0\n")
    with pytest.raises(MissingToolError, match="is of another lock file: make pynq-env"):
        find_pynq_python(tmp_path)


# A host: it loads a card, says where, and launches when told.
HOST = """
import sys
from pathlib import Path
from emulated_cards import SMALL
from launch_cases import random_launch
from hillinfer_pynq.execution import Card, PynqExecution
from hillinfer_model.choices import Scope
python, xclbin, platform = sys.argv[1:]
execution = PynqExecution(Path(python), lambda spec: Card(Path(xclbin), platform, {}))
execution.load(SMALL)
print(execution.front.pid, execution.front.folder, flush=True)
sys.stdin.readline()
execution.score(SMALL, random_launch(SMALL, Scope.LAYER, [3]))
"""


@pytest.mark.parametrize("doing", ["waits", "hangs"])
def test_a_front_ends_when_its_parent_is_killed(doing, emulated, card):
    """Nobody is left to end it then; one that hangs in XRT reads nothing and hears no timer."""
    command = [sys.executable, "-c", HOST, emulated.python, card.xclbin, card.platform]
    environment = {**os.environ, **card.environment, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as host:
        front, place = host.stdout.readline().split()
        folder = Path(place)
        pids = processes_in(folder)
        assert len(pids) == 2
        if doing == "hangs":
            os.kill(next(pid for pid in pids if pid != int(front)), signal.SIGSTOP)
            host.stdin.write("\n")
            host.stdin.flush()
            # Until the front has taken the launch and waits for the card.
            time.sleep(2)
        host.kill()
    end = time.monotonic() + ENOUGH
    while processes_in(folder) and time.monotonic() < end:
        time.sleep(0.01)
    left = processes_in(folder)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
    end = time.monotonic() + ENOUGH
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not folder.exists()
