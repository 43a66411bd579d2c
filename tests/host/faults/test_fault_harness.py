# SPDX-License-Identifier: Apache-2.0
"""A short selection of `make faults`, and proof that the harness sees what must not happen."""

import json
import subprocess
import textwrap
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from engine_cases import SKIP, kernel_permits_rings
from fault_scenarios import Scenario, StagingAttachment, StreamingAttachment
from faulty_calls import FAULTS, HARMLESS, KINDS, Fault, FaultyCalls, Injection, PlainFileSystem
from going_on import Witness
from io_faults import Outcome, injections, is_clear, run_io_faults, totals
from lives import DocumentLife, Places, SessionLife

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.files import aligned_buffer
from hillinfer.hf.cache import HillInferCache
from hillinfer.settings import IOChoice

HERE = Path(__file__).parent
FAULTS_TOOL = HERE.parents[2] / "tools" / "faults.py"
# Long enough that rows are read back.
SMALL = Scenario(document_tokens=450, new_tokens=3, alpha=0.2)
STAGED = Scenario(400, new_tokens=3, alpha=0.05, attachment=StagingAttachment, layers=3)
SHORT_STAGED = replace(STAGED, document_tokens=300)
STREAMED = Scenario(1021, new_tokens=3, alpha=0.05, attachment=StreamingAttachment)


@pytest.fixture
def places(tmp_path):
    places = Places(tmp_path / "cold", tmp_path / "sessions")
    places.cold_dir.mkdir()
    places.sessions.mkdir()
    return places


def assert_nothing_is_wrong(tally, runs):
    assert tally.wrong == []
    assert tally.runs == tally.outcomes.total() == runs
    assert set(tally.outcomes) <= {Outcome.RIGHT, Outcome.RECOVERED, Outcome.REFUSED}
    assert tally.outcomes[Outcome.RIGHT]
    assert tally.reached == tally.planned == runs
    assert (tally.leftovers, tally.open_files) == (0, 0)


def assert_all_is_right(tally, runs):
    assert_nothing_is_wrong(tally, runs)
    # A cache that fails is used again: at most once, and here often.
    assert 0 < tally.outcomes[Outcome.RECOVERED] <= tally.used_again < runs


def scenario(choice, chosen=SMALL):
    # Automatically, and not by name: where a ring is refused, threads read.
    if choice is IOChoice.AUTO and not kernel_permits_rings():
        pytest.skip(SKIP)
    return replace(chosen, io=choice)


def faults_of(life, places, below=None, **given):
    """Fail what a plan says, or calls of each kind, behind a run or two without a fault.

    Of two the lesser count of calls is always reached; `make faults` makes more of them.
    """
    clean_runs = 1 if "plan" in given else 2
    return run_io_faults(life, places, below or DriveCalls(), clean_runs=clean_runs, **given)


class Lying(FaultyCalls):
    """A drive that says nothing of a write that fails, and keeps something else in its place."""

    def pwrite(self, descriptor, data, offset):
        try:
            return super().pwrite(descriptor, data, offset)
        except OSError:
            other = aligned_buffer(len(data))
            other[:] = 0xEE
            return DriveCalls().pwrite(descriptor, other[: len(data)].data, offset)


class Believing(DocumentLife):
    """A life that learns of no failed write."""

    def live(self, model, places, calls, witness):
        return super().live(model, places, Lying(calls.injection), witness)


def dealt(*calls):
    """Return every fault of each kind of call once, dealt over the calls of that kind."""
    return [
        Injection(kind, indices[number % len(indices)], fault)
        for kind, *indices in calls
        for number, fault in enumerate(FAULTS[kind])
    ]


@pytest.mark.parametrize("below", [DriveCalls, PlainFileSystem])
@pytest.mark.usefixtures("threads_of_python")
def test_faults_give_right_tokens_or_clear_errors(places, below):
    tally = faults_of(DocumentLife(scenario(IOChoice.THREADS)), places, below(), most=12)
    assert_all_is_right(tally, 12)
    assert tally.possible > tally.runs
    # The budget is small enough that rows are read back.
    assert tally.calls["preadv"] > 20


def test_no_fault_of_native_reads_comes_to_light(places):
    failed = dealt(("land", 1), ("read_done", 5, 20))
    life = DocumentLife(scenario(IOChoice.THREADS))
    tally = faults_of(life, places, plan=failed)
    assert_nothing_is_wrong(tally, len(failed))
    assert tally.outcomes[Outcome.RIGHT] == len(failed)
    assert tally.calls["read_done"] > 20


def test_no_fault_of_a_ring_comes_to_light(places):
    failed = dealt(("ring_open", 0, 1), ("ring_enter", 0, 9), ("read_done", 5, 20))
    life = DocumentLife(scenario(IOChoice.AUTO))
    tally = faults_of(life, places, plan=failed)
    assert_nothing_is_wrong(tally, len(failed))
    assert tally.outcomes[Outcome.RIGHT] == len(failed)
    assert tally.calls["read_done"] > 20


def test_a_ring_that_says_what_it_did_not_do_is_seen(places, without_checksums):
    life = DocumentLife(scenario(IOChoice.AUTO))
    failed = [Injection("read_done", index, Fault.LOST) for index in (1, 2, 3)]
    # With checksums no token would come of it.
    assert not faults_of(life, places, plan=failed).outcomes[Outcome.WRONG]
    without_checksums()
    assert faults_of(life, places, plan=failed).outcomes[Outcome.WRONG] > 0


@pytest.mark.usefixtures("threads_of_python")
def test_faults_while_a_session_is_saved_and_used(places):
    life = SessionLife(scenario(IOChoice.THREADS))
    assert_all_is_right(faults_of(life, places, most=12), 12)


def test_a_store_that_ignores_a_failed_write_is_seen(places, without_checksums):
    # The first write only tries the drive.
    failed = [Injection("pwrite", index, Fault.EIO) for index in (1, 2, 3)]
    without_checksums()
    tally = faults_of(Believing(SMALL), places, plan=failed, tries=1)
    assert tally.outcomes[Outcome.WRONG] > 0
    assert len(tally.wrong) >= tally.outcomes[Outcome.WRONG]


def test_a_leftover_and_an_open_file_are_seen(places):
    class Leaking(DriveCalls):
        def close(self, descriptor):
            (places.cold_dir / "left").write_bytes(b"1")

    tally = faults_of(DocumentLife(SMALL), places, Leaking(), most=2)
    assert tally.leftovers >= 2
    assert tally.open_files > 0


def test_an_error_that_is_no_error_of_ours_is_seen(places):
    life = DocumentLife(SMALL)

    class Broken(DocumentLife):
        def live(self, model, places, calls, witness):
            if calls.injection is not None:
                raise RuntimeError("a defect")
            return life.live(model, places, calls, witness)

    tally = faults_of(Broken(SMALL), places, most=3)
    assert tally.outcomes == {Outcome.UNCLEAR: 3}
    assert "a defect" in tally.wrong[0]


@pytest.mark.parametrize("choice", [IOChoice.THREADS, IOChoice.AUTO])
def test_faults_while_a_shadow_is_streamed(places, choice):
    life = DocumentLife(scenario(choice, STREAMED))
    tally = faults_of(life, places, most=6)
    assert_nothing_is_wrong(tally, 6)
    assert tally.shadow_write_bytes > 0
    assert tally.shadow_read_bytes > 0


@pytest.mark.parametrize("choice", [IOChoice.THREADS, IOChoice.AUTO])
def test_faults_while_a_prompt_is_read_in_stages(places, choice):
    life = DocumentLife(scenario(choice, STAGED))
    assert_nothing_is_wrong(faults_of(life, places, most=6), 6)


@pytest.mark.usefixtures("threads_of_python")
def test_every_write_of_a_prompt_in_stages_may_fail(places):
    """States at the first cut and between the bands, and rows of all of them, one by one."""
    life, counts = DocumentLife(scenario(IOChoice.THREADS, SHORT_STAGED)), FaultyCalls()
    life.live(life.scenario.model(), places, counts, Witness())
    # The first one only tries the drive, and the last ones come in some runs alone.
    failed = [
        Injection("pwrite", index, (Fault.EIO, Fault.ENOSPC)[index % 2])
        for index in range(1, counts.counts["pwrite"] - 2)
    ]
    tally = faults_of(life, places, plan=failed)
    assert tally.wrong == []
    # How many of them wait, and are made again, depends on when threads get to write.
    assert tally.outcomes[Outcome.RECOVERED] > len(failed) // 5 >= 2
    assert (tally.leftovers, tally.open_files) == (0, 0)


@pytest.mark.usefixtures("threads_of_python")
def test_states_that_were_not_written_and_are_believed_are_seen(places, monkeypatch):
    monkeypatch.setattr("hillinfer.pruning.states._sum", lambda memory: 0)
    # Rows are written by another thread: which of these writes are of states is its doing.
    failed = [Injection("pwrite", index, Fault.EIO) for index in range(3, 17)]
    life = Believing(scenario(IOChoice.THREADS, SHORT_STAGED))
    assert faults_of(life, places, plan=failed, tries=1).outcomes[Outcome.WRONG]


def test_a_shadow_file_that_could_not_be_made_once(places):
    # After the file that tries the drive and one of each layer.
    failed = [Injection("open", 3, fault) for fault in (Fault.EIO, Fault.ENOSPC)]
    tally = faults_of(DocumentLife(STREAMED), places, plan=failed)
    assert tally.wrong == []
    assert (tally.reached, tally.used_again) == (2, 2)


def test_a_life_that_streams_no_shadow_is_seen(places):
    class Short(DocumentLife):
        def live(self, model, places, calls, witness):
            return DocumentLife(SMALL).live(model, places, calls, witness)

    with pytest.raises(AssertionError, match="streams no shadow"):
        faults_of(Short(STREAMED), places, most=1)


def test_a_call_that_no_run_reaches_is_seen(places):
    beyond = [Injection("pwrite", 10_000, Fault.EIO)]
    tally = faults_of(DocumentLife(SMALL), places, plan=beyond, tries=2)
    assert (tally.planned, tally.reached) == (1, 0)
    assert dict(totals([tally]))["unreached"] == 1


@pytest.mark.usefixtures("threads_of_python")
def test_a_cache_that_goes_on_with_a_broken_pass_is_seen(places, monkeypatch):
    def forgets_nothing(self):
        self.end_forward()

    monkeypatch.setattr(HillInferCache, "_recover", forgets_nothing)
    life = DocumentLife(scenario(IOChoice.THREADS))
    failed = [Injection("preadv", index, Fault.EIO) for index in (3, 10, 20)]
    tally = faults_of(life, places, plan=failed)
    assert tally.outcomes[Outcome.WRONG] + tally.outcomes[Outcome.UNCLEAR] > 0


def test_every_call_has_a_turn_and_every_kind_its_faults():
    assert set(FAULTS) == set(KINDS)
    counts = Counter(pwrite=5, preadv=100, close=2)
    every = injections(counts, 5)
    assert {(one.kind, one.index) for one in every} == {
        (kind, index) for kind, count in counts.items() for index in range(count)
    }
    assert {one.fault for one in every if one.kind == "pwrite"} == set(FAULTS["pwrite"])
    dealt = Counter(one.fault for one in every if one.kind == "preadv")
    assert set(dealt) == set(FAULTS["preadv"])
    assert max(dealt.values()) - min(dealt.values()) <= 1
    assert len(every) == 5 * len(FAULTS["pwrite"]) + 100 + 2 * len(FAULTS["close"])
    assert len(injections(counts, 0)) == counts.total()
    assert len(injections(counts, 5, 50)) == 50
    assert {one.kind for one in injections(counts, 5, 50)} == set(counts)


CLEAR = "could not read 4096 bytes at 8192 of rows in {}: Input/output error; check the drive"


@pytest.mark.parametrize(
    ("message", "clear"),
    [
        (CLEAR, True),
        (CLEAR.replace("4096 bytes at 8192 of rows", "something"), False),
        (CLEAR.replace("{}", "somewhere"), False),
        (CLEAR.replace("Input/output error", "failed"), False),
        (CLEAR.replace("; check the drive", ""), False),
    ],
)
def test_clear_errors(places, message, clear):
    said = message.format(places.cold_dir)
    assert is_clear(said, Injection("preadv", 0, Fault.EIO), places) is clear
    # What a drive may do at any time is no reason to refuse.
    assert not any(is_clear(said, Injection("preadv", 0, fault), places) for fault in HARMLESS)


def test_processes_killed_at_random_moments(tmp_path, warm_python):
    """In a process of its own, because only one without other threads may fork."""
    out = tmp_path / "kills.json"
    subprocess.run(
        [
            *(*warm_python, FAULTS_TOOL, "--part", "kills", "--kills", "5"),
            *("--drive", tmp_path / "drive", "--out", out),
        ],
        check=True,
        timeout=300,
    )
    lives = json.loads(out.read_text())["lives"]
    assert sum(one["kills"] for one in lives) == 5
    for one in lives:
        assert (one["wrong_tokens"], one["leftovers"], one["failures"]) == (0, 0, [])
        assert one["ended_before"] < one["kills"]
    assert list((tmp_path / "drive").iterdir()) == []


def test_what_must_not_be_after_a_kill_is_seen(tmp_path, warm_python):
    program = textwrap.dedent(
        """
        import json, sys
        from pathlib import Path
        sys.path[:0] = sys.argv[1:3]
        import torch
        torch.set_num_threads(1)
        from fault_scenarios import Scenario, StreamingAttachment
        from kills import run_kills
        from lives import DocumentLife, Places

        class Careless(DocumentLife):
            def restart(self, model, places, witness):
                (places.cold_dir / "left").write_bytes(b"1")
                return [(one + 1) % 61 for one in super().restart(model, places, witness)]

        places = Places(Path(sys.argv[3]), Path(sys.argv[4]))
        scenario = Scenario(document_tokens=130, new_tokens=3)
        deaths = run_kills(Careless(scenario), scenario.model(), places, 2, 1)
        print(json.dumps([deaths.wrong_tokens, deaths.leftovers]))
        """
    )
    for name in ("cold", "sessions"):
        (tmp_path / name).mkdir()
    done = subprocess.run(
        [
            *(*warm_python, "-c", program, HERE.parent, HERE),
            *(tmp_path / "cold", tmp_path / "sessions"),
        ],
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    wrong, leftovers = json.loads(done.stdout)
    assert wrong == 2
    assert leftovers >= 2
