# SPDX-License-Identifier: Apache-2.0
"""A session is saved whole or not at all, and nothing of the run is lost by it."""

import signal
import subprocess
from pathlib import Path

import pytest
import torch
from faulty_calls import FAULTS, HARMLESS, Fault, FaultyCalls, Injection
from generation_runs import attached_with, run
from interrupts import interrupted
from session_runs import PROMPT, TINY, answer, feed
from tiny_models import prompts

from hillinfer.drive.files import sweep
from hillinfer.drive.regions import GroupTable, OtherFiles
from hillinfer.errors import ColdPoolError, HillInferError, SessionError
from hillinfer.kv.cold_store import ColdStore
from hillinfer.sessions.opening import SavedSession
from hillinfer.sessions.writing import SessionWriter, prepare_target

SHORT, _ = prompts([130], seed=4)


def entries(directory):
    return sorted(entry.name for entry in directory.iterdir())


def open_descriptors():
    """Return what this process has open."""
    return [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]


def sizes_of_open_files(folder):
    """Return the sizes of the nameless files in a folder that this process has open, by inode."""
    files = [link for link in open_descriptors() if str(link.readlink()).startswith(str(folder))]
    return {file.stat().st_ino: file.stat().st_size for file in files}


@pytest.fixture
def cache(attachment):
    made = attachment.new_cache()
    feed(attachment.model, made, SHORT)
    yield made
    made.close()


@pytest.fixture
def faulty(tmp_path_factory):
    """HillInfer on a drive that fails where it is told to, a cache like that, and the drive."""
    calls = FaultyCalls(delay_seconds=0.001)
    given, place = {"calls": calls}, tmp_path_factory.mktemp("faulty")
    with attached_with(TINY.build(), place, given) as hill, hill.new_cache() as made:
        feed(hill.model, made, SHORT)
        yield hill, made, calls


@pytest.fixture
def coding(tmp_path_factory):
    """The same with codes of values, which its sessions keep."""
    calls = FaultyCalls(delay_seconds=0.001)
    given, place = {"calls": calls}, tmp_path_factory.mktemp("coding")
    coded = {"exact": 0.02, "exact_floor": 10}
    with attached_with(TINY.build(), place, given, **coded) as hill, hill.new_cache() as made:
        # The last token is ranked, so there are statistics of values.
        feed(hill.model, made, SHORT[:, :-1])
        feed(hill.model, made, SHORT[:, -1:])
        yield hill, made, calls


def test_an_empty_directory_and_missing_parents_are_fine(cache, tmp_path):
    (tmp_path / "empty").mkdir(mode=0o755)
    cache.save_session(tmp_path / "empty")
    assert (tmp_path / "empty").stat().st_mode & 0o777 == 0o700
    cache.save_session(tmp_path / "a" / "b" / "c")
    for place in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        with SavedSession(place) as saved:
            saved.verify()


def taken_by_a_file(place):
    place.write_text("mine")


def taken_by_something_in_it(place):
    place.mkdir()
    (place / "note.txt").write_text("mine")


def taken_by_a_link(place):
    place.symlink_to("elsewhere")


@pytest.mark.parametrize("take", [taken_by_a_file, taken_by_something_in_it, taken_by_a_link])
def test_nothing_is_overwritten(cache, tmp_path, take):
    take(tmp_path / "session")
    before = entries(tmp_path)
    for refused in (prepare_target, cache.save_session):
        with pytest.raises(SessionError, match="choose another directory with --save-session"):
            refused(tmp_path / "session")
    assert entries(tmp_path) == before


def test_a_place_that_cannot_be_written_to(cache, tmp_path):
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file" / "session", Path("/proc/session"), tmp_path / ("x" * 300)):
        for refused in (prepare_target, cache.save_session):
            with pytest.raises(SessionError, match="choose another"):
                refused(place)
    assert entries(tmp_path) == ["file"]


def test_a_place_that_can_be_written_to_is_left_as_it_was(tmp_path):
    prepare_target(tmp_path / "session")
    assert entries(tmp_path) == []


def outcome(cache, place):
    """Save and return the error, None where it went well."""
    try:
        cache.save_session(place / "session")
    except (SessionError, ColdPoolError) as error:
        return error
    return None


@pytest.mark.parametrize("kind", FAULTS)
def test_every_call_that_fails_leaves_all_or_nothing(coding, tmp_path, kind):
    attachment, cache, calls = coding
    ids = torch.cat([SHORT, PROMPT[:, -20:]], dim=1)

    def answered(cache):
        return answer(attachment.model, cache, ids, new_tokens=3)

    # What has a name then is not linked again.
    cache.save_session(tmp_path / "first")
    assert (tmp_path / "first" / "codes.bin").stat().st_size > 0
    calls.begin()
    cache.save_session(tmp_path / "counted")
    count = calls.counts[kind]
    expected = answered(attachment.load_session(tmp_path / "counted"))
    for index in {0, count // 2, count - 1} if count else ():
        for fault in FAULTS[kind]:
            place = tmp_path / f"{index}-{fault}"
            place.mkdir()
            calls.begin(Injection(kind, index, fault))
            error = outcome(cache, place)
            assert calls.hits == 1
            calls.begin()
            assert error is None or fault not in HARMLESS
            sweep(place)
            if error is None or "may not outlast a power failure" in str(error):
                resumed = attachment.load_session(place / "session")
                assert torch.equal(answered(resumed), expected)
                resumed.close()
            else:
                assert entries(place) == []
    # The run itself was not disturbed by any of it.
    assert torch.equal(answered(cache), expected)


def test_a_file_that_had_a_name_once_is_not_written_to_again(faulty, tmp_path):
    attachment, cache, calls = faulty
    calls.begin(Injection("rename", 0, Fault.EIO))
    with pytest.raises(SessionError, match="cannot move it to its place"):
        cache.save_session(tmp_path / "session")
    assert entries(tmp_path) == []
    named = sizes_of_open_files(attachment.settings.cold_dir)
    assert sorted(named.values()) == [0, 0, 2 * 64 * 64, 2 * 64 * 64]
    feed(attachment.model, cache, prompts([100], seed=9)[0])
    # What is read was written.
    run(attachment.model, cache.fork(), torch.cat([torch.tensor(cache.token_ids), SHORT], dim=1))
    sizes = sizes_of_open_files(attachment.settings.cold_dir)
    for inode, size in named.items():
        # A group has the place of its number, wherever those before it lie.
        assert sizes[inode] == (size or 5 * 64 * 64)
    calls.begin()
    assert cache.save_session(tmp_path / "session").copied_row_bytes == 2 * 3 * 64 * 64


@pytest.mark.parametrize(
    ("function", "event"),
    [
        (GroupTable.seal, "call"),
        (GroupTable.seal, "return"),
        (ColdStore.freeze, "call"),
        (OtherFiles.add_base, "call"),
        (OtherFiles.place_in_all, "call"),
        (OtherFiles.place_in_all, "return"),
        (ColdStore.freeze, "return"),
        (SessionWriter.finish, "call"),
    ],
)
def test_what_saving_leaves_where_ctrl_c_breaks_it_off_is_a_pool_for_all(
    attachment, tmp_path, function, event
):
    """Numbers of groups that lie in what was to be the session are written to by the next."""
    model, ids = attachment.model, torch.cat([SHORT, PROMPT[:, -20:]], dim=1)
    others, open_before = prompts([130], seed=5)[0], len(open_descriptors())
    with attachment.new_cache() as calm:
        feed(model, calm, SHORT)
        expected = answer(model, calm, ids, new_tokens=3)
    with attachment.new_cache() as calm:
        of_others = answer(model, calm, others, new_tokens=3)
    with attachment.new_cache() as kept:
        own = attachment.new_cache()
        feed(model, own, SHORT)
        with pytest.raises(KeyboardInterrupt), interrupted(function, event):
            own.save_session(tmp_path / "broken")
        assert entries(tmp_path) == []
        own.save_session(tmp_path / "whole")
        with own.fork() as fork:
            assert torch.equal(answer(model, fork, ids, new_tokens=3), expected)
        with attachment.load_session(tmp_path / "whole") as loaded:
            assert torch.equal(answer(model, loaded, ids, new_tokens=3), expected)
        own.close()
        found = answer(model, kept, others, new_tokens=3)
        assert torch.equal(found, of_others)
        # The twin: rows of the one that was saved would be seen.
        assert not torch.equal(found, expected)
    assert len(open_descriptors()) == open_before


def test_a_cache_goes_on_while_its_failed_saving_is_still_held(faulty, tmp_path):
    attachment, cache, calls = faulty
    more, _ = prompts([70], seed=9)
    held = []
    # Each of the first writes is of another part.
    store = cache.engine.runtime.parts.store
    for index in range(6):
        # Else it is a write of the tokens before that fails.
        for layer in range(TINY.layers):
            store.settle_all(layer)
        calls.begin(Injection("pwrite", index, Fault.EIO))
        # With its traceback, as by whoever reports it later: nothing in it may hold the cache.
        held.append(outcome(cache, tmp_path))
        calls.begin()
        feed(attachment.model, cache, more)
    assert all(held)
    assert cache.token_ids == torch.cat([SHORT, *[more] * 6], dim=1).tolist()


SAVING = """
import sys, time
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
from session_runs import TINY, IDS, feed
from generation_runs import attached
from hillinfer.sessions.writing import SessionWriter
left = {files}
add = SessionWriter.add
def slow(self, name, pieces):
    global left
    if left == 0:
        print("now", flush=True)
        time.sleep(600)
    left -= 1
    add(self, name, pieces)
SessionWriter.add = slow
model = TINY.build()
with attached(model, {cold!r}) as hill:
    cache = hill.new_cache()
    feed(model, cache, IDS[:, :200])
    cache.save_session({target!r})
"""


@pytest.mark.parametrize("files", [0, 7])
def test_a_kill_in_the_middle_leaves_no_session(attachment, cold_dir, tmp_path, files, warm_python):
    here = Path(__file__).parent
    target = tmp_path / "session"
    script = SAVING.format(
        paths=[str(here), str(here.parent)], files=files, cold=str(cold_dir), target=str(target)
    )
    process = subprocess.Popen([*warm_python, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"now\n"
    # What a living process writes is not swept.
    assert sweep(tmp_path) == []
    assert len(entries(tmp_path)) == 1
    process.send_signal(signal.SIGKILL)
    # It has ended where nobody can write there any more.
    process.communicate(timeout=120)
    assert not target.exists()
    cache = attachment.new_cache()
    feed(attachment.model, cache, SHORT)
    cache.save_session(target)
    assert entries(tmp_path) == ["session"]


def test_two_writers_of_one_place(tmp_path, saved):
    with SavedSession(saved) as session:
        manifest = session.manifest
    with SessionWriter(tmp_path / "one") as first, SessionWriter(tmp_path / "one") as second:
        first.finish(manifest)
        with pytest.raises(SessionError, match="cannot move it to its place"):
            second.finish(manifest)
    assert entries(tmp_path) == ["one", "session"]


def test_an_empty_cache_is_refused(attachment, tmp_path):
    with pytest.raises(HillInferError, match="holds 0"):
        attachment.new_cache().save_session(tmp_path / "session")
    assert entries(tmp_path) == []
