# SPDX-License-Identifier: Apache-2.0
"""The device `xrt` behind the real XRT: equal to golden, and replaced by the host when it fails."""

import gc
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
import zipfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from emulated_cards import ONE_PROCESS, SMALL, surround

from hillinfer.devices.device import DeviceSegment, ResidentShadow, StoredShadow
from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.opening import GoldenScorer, open_xrt
from hillinfer.devices.xrt.device import CHUNK_BYTES
from hillinfer.devices.xrt.process import Deadlines, WorkerProcess
from hillinfer.devices.xrt.xclbin import SectionKind, Xclbin, XclbinError, spec_record
from hillinfer.drive.files import PAGE_BYTES, round_up
from hillinfer.errors import DeviceError, HillInferWarning, SettingsError
from hillinfer.scoring.native import NativeScorer
from hillinfer.scoring.scorer import SegmentShadow
from hillinfer.settings import DeviceOptions
from hillinfer.system.files import user_cache_dir
from hillinfer.system.processes import processes_in
from hillinfer_hw.emulation import Engine
from hillinfer_hw.emulation_image import emulation_image
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import ProductStyle

SCALING = 0.3
# Shadows that a card's memory is taken for at once.
CHUNK_SLOTS = CHUNK_BYTES // round_up(SMALL.segment_bytes, PAGE_BYTES)
# How long an impatient host waits, and the most that any test waits, however busy the machine.
PATIENCE, ENOUGH = 1.0, 120.0

pytestmark = ONE_PROCESS


@dataclass
class Keys:
    """A sequence's keys, a query, and the segments' shadows."""

    query: torch.Tensor
    segments: list

    @classmethod
    def random(cls, tokens, seed=0):
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randn(tokens, 2, 64, generator=generator).half()
        query = torch.randn(2, 64, generator=generator)
        scorer, segments, before = GoldenScorer(SMALL, Scope.LAYER), [], None
        for base in range(0, tokens, 512):
            own = keys[base : base + 512]
            before = scorer.statistics(own, base, before)
            shadow = np.zeros((SMALL.segment_beats, 64), np.uint8)
            scorer.encode(own, before, shadow, 0)
            segments.append(SegmentShadow(base, len(own), shadow, before))
        return cls(query, segments)

    def codes(self, scorer, segments=None):
        """The score code of every token and set, by position."""
        return scorer.tuples(self.query, SCALING, segments or self.segments) >> 16

    def resident(self, scorer, change=lambda shadow: shadow, passed_over=0):
        """The segments with their full groups on a scorer's device and no whole copy here.

        So many slots stay empty before each.
        """
        made = []
        for number, one in enumerate(self.segments):
            for _ in range(passed_over):
                scorer.shadows.room(number)
            held = scorer.shadows.take(number)
            scorer.shadows.update(held, change(one.shadow), one.tokens)
            made.append(
                ResidentShadow(
                    one.base_position, one.tokens, one.statistics, held.slot, held.tokens,
                    held.probes, None, lambda own=one: own.shadow,
                )
            )  # fmt: skip
        return made

    def golden(self, scope):
        return self.codes(GoldenScorer(SMALL, scope))


class HeardWorker(WorkerProcess):
    """A worker that is given no more time than the test has, and may be interrupted.

    `asked` has the names of the calls.
    """

    patience = sys.maxsize
    interrupts = False

    def __init__(self, *given):
        self.asked = []
        super().__init__(*given)

    def send(self, what, *given, **others):
        self.asked.append(what)
        super().send(what, *given, **others)

    def receive(self, what, seconds):
        if self.interrupts:
            raise KeyboardInterrupt
        return super().receive(what, min(seconds, self.patience))


WORKERS = WeakKeyDictionary()


@pytest.fixture
def opened():
    """Opens a card for a test and sees that nothing of it is left."""
    scorers = []

    def of(surrounding, scope=Scope.LAYER, spec=SMALL):
        workers = []

        def start(*given):
            workers.append(HeardWorker(*given))
            return workers[-1]

        options = DeviceOptions(xclbin=surrounding.xclbin)
        scorers.append(open_xrt(spec, scope, options, start=start))
        (WORKERS[scorers[-1]],) = workers
        return scorers[-1]

    yield of
    for scorer in scorers:
        folder = worker_of(scorer).folder
        scorer.shadows.close()
        assert not folder.exists()
        assert processes_in(folder) == []


def worker_of(scorer):
    return WORKERS[scorer]


def impatient(scorer, seconds=PATIENCE):
    worker_of(scorer).patience = seconds


@pytest.mark.parametrize("engine", Engine)
@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("tokens", [70, 600, 1300])
def test_scores_are_goldens(cards, opened, engine, scope, tokens):
    keys = Keys.random(tokens, seed=tokens)
    scorer = opened(cards(engine), scope)
    expected = keys.golden(scope)
    segments = keys.resident(scorer)
    for _ in range(2):
        np.testing.assert_array_equal(keys.codes(scorer, segments), expected)
    assert scorer.shadows.launches == 2
    assert scorer.shadows.scored_tokens == 2 * (tokens // 64 * 64)
    assert not scorer.shadows.lost


SEGMENTS = 12


class Heard:
    """A card's shadows, and in a list what parts of segments came from them."""

    def __init__(self, shadows, parts):
        self._shadows, self._parts = shadows, parts

    def __getattr__(self, name):
        return getattr(self._shadows, name)

    def score(self, *given):
        for found in self._shadows.score(*given):
            self._parts.append((found.segment, found.first_token, found.tuples.shape[1]))
            yield found


@pytest.mark.parametrize("scope", Scope)
def test_blocks_of_a_segment_are_merged_as_they_come(cards, opened, scope):
    """A look at the status of a simulated kernel finds segments that are under way."""
    keys = Keys.random(SEGMENTS * 512)
    scorer = opened(cards(Engine.RTL), scope)
    segments, parts = keys.resident(scorer), []
    heard = DeviceScorer(NativeScorer(SMALL, scope), Heard(scorer.shadows, parts))
    # So a busy machine, too, finds the card at work.
    for rest in RESTS:
        parts.clear()
        with resting(scorer, rest):
            found = keys.codes(heard, segments)
        tell(device_process(scorer), signal.SIGCONT)
        np.testing.assert_array_equal(found, keys.golden(scope))
        for number in range(SEGMENTS):
            own = [(first, count) for segment, first, count in parts if segment == number]
            # In order, whole blocks, nothing twice and nothing left out.
            assert [first for first, _ in own] == [*accumulate([0, *(n for _, n in own)])][:-1]
            assert sum(count for _, count in own) == 512
            assert all(count % SMALL.block_tokens == 0 for _, count in own)
        if len(parts) > SEGMENTS:
            return
    pytest.fail("each segment came whole")


def test_a_flipped_bit_of_a_shadow_shows(cards, opened):
    keys = Keys.random(600)
    scorer = opened(cards(Engine.HLS))

    def flip(shadow):
        wrong = shadow.copy()
        wrong[SMALL.kv_heads, 5] ^= 0x40
        return wrong

    found = keys.codes(scorer, keys.resident(scorer, flip))
    assert not np.array_equal(found, keys.golden(Scope.LAYER))


def test_shadows_are_read_back(cards, opened):
    keys = Keys.random(1024)
    scorer = opened(cards(Engine.HLS))
    for number, one in enumerate(keys.segments):
        held = scorer.shadows.take(number)
        scorer.shadows.update(held, one.shadow, 200)
        scorer.shadows.update(held, one.shadow, 512)
        into = np.zeros_like(one.shadow)
        assert scorer.shadows.read(held, into)
        np.testing.assert_array_equal(into, one.shadow)


def test_shadows_come_from_a_file_past_the_host(cards, opened, tmp_path):
    keys = Keys.random(1024)
    scorer = opened(cards(Engine.HLS))
    size = -(-SMALL.segment_bytes // 4096) * 4096
    path = tmp_path / "shadows"
    path.write_bytes(b"".join(one.shadow.tobytes().ljust(size, b"\0") for one in keys.segments))
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    slots = scorer.shadows.staging
    assert len(slots) == 16
    stored = [StoredShadow(slots[number], file, number * size) for number in range(3)]
    scorer.shadows.load(stored[:2])
    for number, one in enumerate(keys.segments):
        into = np.zeros_like(one.shadow)
        scorer.shadows.device.read(slots[number], into)
        np.testing.assert_array_equal(into, one.shadow)
    with pytest.raises(DeviceError, match=f"ends at byte {2 * size}"):
        scorer.shadows.load(stored[1:])
    os.close(file)


def test_slots_of_several_chunks_are_scored_in_one_launch(cards, opened):
    keys = Keys.random(5 * 512)
    scorer = opened(cards(Engine.HLS))
    # The first chunk is there already, for shadows from the drive.
    asked = worker_of(scorer).asked
    assert asked.count("chunk") == 1
    segments = keys.resident(scorer, passed_over=CHUNK_SLOTS // 2)
    assert asked.count("chunk") == 3
    np.testing.assert_array_equal(keys.codes(scorer, segments), keys.golden(Scope.LAYER))


def test_a_launch_that_nobody_listens_to_does_not_disturb_the_next(cards, opened):
    keys = Keys.random(600)
    scorer = opened(cards(Engine.RTL))
    segments = keys.resident(scorer)
    given = [DeviceSegment(one.slot, one.base_position, one.device_tokens) for one in segments]
    queries = scorer.start(keys.query, SCALING, segments).query_blocks(range(len(segments)))
    next(iter(scorer.shadows.score(Scope.LAYER, queries, given)))
    np.testing.assert_array_equal(keys.codes(scorer, segments), keys.golden(Scope.LAYER))


def test_two_cards_at_once(cards, opened):
    keys = Keys.random(600)
    first, second = opened(cards(Engine.HLS)), opened(cards(Engine.HLS), Scope.KV_HEAD)
    held = keys.resident(first), keys.resident(second)
    for _ in range(2):
        np.testing.assert_array_equal(keys.codes(first, held[0]), keys.golden(Scope.LAYER))
        np.testing.assert_array_equal(keys.codes(second, held[1]), keys.golden(Scope.KV_HEAD))


def test_a_card_is_closed_and_opened_again(cards, opened):
    keys = Keys.random(600)
    for _ in range(2):
        scorer = opened(cards(Engine.HLS))
        np.testing.assert_array_equal(
            keys.codes(scorer, keys.resident(scorer)), keys.golden(Scope.LAYER)
        )
        scorer.shadows.close()
        scorer.shadows.close()


@pytest.mark.parametrize("engine", Engine)
def test_a_card_is_let_go_before_anything_is_killed(cards, opened, engine, tmp_path, monkeypatch):
    """The program that plays the card writes what it did when it is let go."""
    log = tmp_path / "card.log"
    monkeypatch.setenv("HILLINFER_EMULATION_LOG", str(log))
    keys = Keys.random(600)
    for count in (1, 2):
        scorer = opened(cards(engine))
        keys.codes(scorer, keys.resident(scorer))
        scorer.shadows.close()
        assert [json.loads(line)["launches"] for line in log.read_text().splitlines()] == [
            1
        ] * count


# --- faults ------------------------------------------------------------------------------------


def device_process(scorer):
    """The process that plays the card."""
    worker = worker_of(scorer)
    (own,) = [pid for pid in processes_in(worker.folder) if pid != worker.pid]
    return own


def kill_card(scorer):
    os.kill(device_process(scorer), signal.SIGKILL)


def stop_card(scorer):
    os.kill(device_process(scorer), signal.SIGSTOP)


def kill_worker(scorer):
    os.kill(worker_of(scorer).pid, signal.SIGKILL)


def stop_worker(scorer):
    os.kill(worker_of(scorer).pid, signal.SIGSTOP)


FAULTS = [kill_card, stop_card, kill_worker, stop_worker]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_host_goes_on_where_the_card_fails_between_launches(cards, opened, fault):
    keys = Keys.random(600)
    scorer = opened(cards(Engine.HLS))
    segments = keys.resident(scorer)
    impatient(scorer)
    fault(scorer)
    start = time.monotonic()
    with pytest.warns(HillInferWarning, match="the host goes on scoring"):
        found = keys.codes(scorer, segments)
    # Sooner than a patient host would have been.
    assert time.monotonic() - start < Deadlines().progress
    np.testing.assert_array_equal(found, keys.golden(Scope.LAYER))
    assert scorer.shadows.lost
    # And for good.
    np.testing.assert_array_equal(keys.codes(scorer, segments), keys.golden(Scope.LAYER))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_host_goes_on_where_the_card_fails_in_a_launch(cards, opened, fault):
    keys = Keys.random(100 * 512)
    golden = keys.golden(Scope.LAYER)[0]
    for rest in RESTS:
        scorer = opened(cards(Engine.RTL))
        segments = keys.resident(scorer)
        found, is_in_time = with_fault_at_first_block(scorer, keys, segments, fault, rest)
        np.testing.assert_array_equal(found, golden)
        if is_in_time:
            return
        # Of a card that stands still closing would wait for ten seconds.
        for process in processes_in(worker_of(scorer).folder):
            tell(process, signal.SIGCONT)
    pytest.fail("no fault came in the middle of a launch")


# Seconds that a card rests after every few milliseconds, so that on a busy machine it has not
# told of all before the host hears the first; a longer rest for each further attempt.
RESTS = [0.05, 0.1, 0.2, 0.4]


def tell(process, what):
    """Send a process a signal, if it is there."""
    with suppress(ProcessLookupError):
        os.kill(process, what)


@contextmanager
def resting(scorer, rest):
    """A card that works a tenth of the time that it rests, until it is told to stay at rest."""
    card, stay = device_process(scorer), threading.Event()

    def take_turns():
        tell(card, signal.SIGSTOP)
        while not stay.wait(rest):
            tell(card, signal.SIGCONT)
            stay.wait(rest / 10)
            tell(card, signal.SIGSTOP)

    turns = threading.Thread(target=take_turns)
    turns.start()

    def stay_at_rest():
        stay.set()
        turns.join()

    try:
        yield stay_at_rest
    finally:
        stay_at_rest()


class FaultAtFirst:
    """A card's shadows, with which something happens once the first part of a launch has come."""

    def __init__(self, shadows, happen):
        self._shadows, self._happen = shadows, happen

    def __getattr__(self, name):
        return getattr(self._shadows, name)

    def score(self, *given):
        for number, found in enumerate(self._shadows.score(*given)):
            if number == 0:
                self._happen()
            yield found


def with_fault_at_first_block(scorer, keys, segments, fault, rest):
    """The codes of a launch, and whether the host went on without a card that failed amid it."""
    failed = []
    with warnings.catch_warnings(record=True) as told, resting(scorer, rest) as stay:
        warnings.simplefilter("always")

        def happen():
            # A busy machine may take its time to the first block, but must get there.
            impatient(scorer)
            stay()
            # Nobody waits for ever for one that gets no time.
            if not scorer.shadows.lost:
                card = device_process(scorer)
                failed.append(card)
                fault(scorer)
                if fault is not stop_card:
                    tell(card, signal.SIGCONT)

        shadows = FaultAtFirst(scorer.shadows, happen)
        (found,) = keys.codes(DeviceScorer(NativeScorer(SMALL, Scope.LAYER), shadows), segments)
    ours = [one for one in told if issubclass(one.category, HillInferWarning)]
    assert all("the host goes on scoring" in str(one.message) for one in ours)
    return found, bool(failed) and bool(ours)


def test_a_kernel_that_says_it_is_another_is_refused_at_the_first_launch(cards, opened, tmp_path):
    """Its metadata fits; only what it writes gives it away."""
    renamed = replace(SMALL, product_style=ProductStyle.LUT)
    surrounding = with_record(cards(Engine.HLS), renamed, tmp_path)
    keys = Keys.random(600)
    scorer = opened(surrounding, spec=renamed)
    with pytest.warns(HillInferWarning, match="another kernel: its spec hash"):
        found = keys.codes(scorer, keys.resident(scorer))
    np.testing.assert_array_equal(found, keys.golden(Scope.LAYER))


def with_record(surrounding, spec, folder):
    """A surrounding whose xclbin says that its kernels are of a spec."""
    own = Xclbin.read(surrounding.xclbin)
    sections = dict(own.sections)
    del sections[SectionKind.USER_METADATA]
    sections[SectionKind.USER_METADATA] = spec_record(spec, sections)
    return changed(surrounding, folder, replace(own, sections=sections).pack())


def changed(surrounding, folder, content):
    """A surrounding with another xclbin."""
    surround(folder, surrounding)
    path = folder / "kernels.xclbin"
    path.write_bytes(content)
    return replace(surrounding, xclbin=path)


def opening(surrounding, spec=SMALL, **given):
    return open_xrt(spec, Scope.LAYER, DeviceOptions(xclbin=surrounding.xclbin), **given)


def with_start_script(surrounding, folder, script):
    """A surrounding whose card is started by another script; None leaves it without one."""
    own = Xclbin.read(surrounding.xclbin)
    archive = own.sections[SectionKind.BITSTREAM]
    if script is None:
        sections = dict(own.sections) | {
            SectionKind.BITSTREAM: archive.replace(b"simulate.sh", b"simulate.no")
        }
        del sections[SectionKind.USER_METADATA]
        sections[SectionKind.USER_METADATA] = spec_record(SMALL, sections)
        return changed(surrounding, folder, replace(own, sections=sections).pack())
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        contents = {Path(name).name: files.read(name) for name in files.namelist()}
    contents["simulate.sh"] = script.encode()
    return changed(surrounding, folder, emulation_image(SMALL, contents).pack())


# Connects as the card does, and answers the first call with bytes that mean nothing.
GARBAGE = f"""#!{sys.executable}
import os, socket, sys, time
folder = "/tmp/" + os.environ["USER"] + "/"
own = os.environ["EMULATION_SOCKETID"]
def connect(name):
    while True:
        one = socket.socket(socket.AF_UNIX)
        try:
            one.connect(folder + name)
            return one
        except OSError:
            time.sleep(0.01)
calls, host = connect(own), connect("D2X_unix_sock_" + own)
calls.recv(14)
calls.sendall(b"garbage of the card " * 1000)
time.sleep(600)
"""


# Garbage comes of a program that has to start first.
@pytest.mark.parametrize(
    ("script", "seconds"), [(None, 2.0), ("#!/bin/sh\nexit 1\n", 2.0), (GARBAGE, 4.0)]
)
def test_a_card_that_does_not_come_up_is_an_error_in_time(cards, tmp_path, script, seconds):
    surrounding = with_start_script(cards(Engine.HLS), tmp_path, script)
    folders = []

    def seen(*given):
        worker = WorkerProcess(*given)
        folders.append(worker.folder)
        return worker

    start = time.monotonic()
    with pytest.raises(SettingsError, match="device=xrt: the card could not open"):
        opening(surrounding, start=seen, wait=Deadlines(load=seconds))
    assert time.monotonic() - start < Deadlines().load
    (folder,) = folders
    assert not folder.exists()
    assert processes_in(folder) == []


def test_an_xclbin_that_does_not_fit_is_refused_with_the_reason(cards, tmp_path):
    surrounding = cards(Engine.HLS)
    content = surrounding.xclbin.read_bytes()
    with pytest.raises(XclbinError, match="cut short"):
        opening(changed(surrounding, tmp_path, content[:-100]))
    damaged = bytearray(content)
    damaged[-3000] ^= 1
    with pytest.raises(XclbinError, match="damaged"):
        opening(changed(surrounding, tmp_path, bytes(damaged)))
    with pytest.raises(XclbinError, match="head_dim=64 instead of 80"):
        opening(surrounding, replace(SMALL, head_dim=80))
    own = Xclbin.read(surrounding.xclbin)
    with pytest.raises(XclbinError, match="was built for the platform 'u50'"):
        opening(changed(surrounding, tmp_path, replace(own, platform="u50").pack()))
    with pytest.raises(XclbinError, match="cannot read"):
        opening(replace(surrounding, xclbin=tmp_path / "nothing"))


def test_no_xclbin_is_an_error_that_names_the_fix():
    with pytest.raises(SettingsError, match="--xclbin FILE"):
        open_xrt(SMALL, Scope.LAYER, DeviceOptions())


def test_nothing_is_left_where_the_host_is_killed(cards, tmp_path):
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from hillinfer.devices.xrt.process import WorkerProcess\n"
        "from hillinfer.devices.xrt.process import environment_of\n"
        "xclbin = Path(sys.argv[1])\n"
        "worker = WorkerProcess(environment_of(xclbin), 1 << 20, 60)\n"
        "worker.ask('open', 60, xclbin=str(xclbin), index=0)\n"
        "print(worker.folder, flush=True)\n"
        "time.sleep(600)\n"
    )
    host = subprocess.Popen(
        [sys.executable, "-c", program, str(cards(Engine.HLS).xclbin)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        folder = Path(host.stdout.readline().strip())
        assert len(processes_in(folder)) == 2
    finally:
        host.kill()
        host.wait()
    end = time.monotonic() + ENOUGH
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert processes_in(folder) == []
    assert not folder.exists()


def test_a_worker_without_pyxrt_says_so(monkeypatch):
    with warnings.catch_warnings(), pytest.raises(DeviceError, match="cannot import pyxrt"):
        WorkerProcess({"PYTHONPATH": "/nonexistent"}, 1 << 20, 30)


@pytest.mark.parametrize("call", ["write", "read", "load", "has_room", "score"])
def test_an_interrupted_call_leaves_no_answer_to_the_next(cards, opened, tmp_path, call):
    """Ctrl-C while the host waits for the worker; later calls must not get an earlier answer."""
    keys = Keys.random(600)
    scorer = opened(cards(Engine.HLS))
    segments = keys.resident(scorer)
    impatient(scorer)
    device, worker = scorer.shadows.device, worker_of(scorer)
    path = tmp_path / "shadows"
    path.write_bytes(bytes(1 << 20))
    file = os.open(path, os.O_RDONLY)
    calls = {
        "write": lambda: device.write(1, 0, keys.segments[0].shadow),
        "read": lambda: device.read(segments[0].slot, np.zeros_like(keys.segments[0].shadow)),
        "load": lambda: device.load([StoredShadow(0, file, 0)]),
        "has_room": lambda: device.has_room(2 * CHUNK_SLOTS),
        "score": lambda: keys.codes(scorer, segments),
    }
    worker.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        calls[call]()
    worker.interrupts = False
    with pytest.raises(DeviceError, match="it was let go, as a call to it was interrupted"):
        device.read(segments[0].slot, np.zeros_like(keys.segments[0].shadow))
    with pytest.warns(HillInferWarning, match="the host goes on scoring"):
        found = keys.codes(scorer, segments)
    np.testing.assert_array_equal(found, keys.golden(Scope.LAYER))
    os.close(file)


def test_a_card_that_is_forgotten_gives_its_memory_back(cards):
    before = claimed()
    scorer = opening(cards(Engine.HLS))
    assert claimed() > before
    del scorer
    gc.collect()
    assert claimed() == before


def claimed():
    """What this process has claimed of all cards' memory."""
    files = (user_cache_dir("cards")).glob("*.json")
    own = f"{os.getpid()} "
    return sum(
        size
        for file in files
        for name, size in json.loads(file.read_text() or "{}").items()
        if name.startswith(own)
    )
