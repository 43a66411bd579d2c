# SPDX-License-Identifier: Apache-2.0
"""Several sessions and new caches at once: one engine, and each answers as it would alone."""

import gc
import itertools
import json
import os
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from faulty_calls import Fault, FaultyCalls, Injection
from generation_runs import attached, attached_with, bits, run
from interrupts import interrupted
from session_runs import TINY, feed, flip_bit
from tiny_models import prompts

from hillinfer.drive.regions import GroupTable, OtherFiles
from hillinfer.drive.shared_files import ReopenedFile, RowBase
from hillinfer.errors import BudgetError, CacheUseError, ColdPoolError, SessionError
from hillinfer.kv import opened_sequences
from hillinfer.kv.cold_store import ColdStore
from hillinfer.kv.sequence import Sequence

# With full segments and without, with whole groups and without.
LENGTHS = {"long": 1150, "short": 100, "whole": 192}
DOCUMENTS = {name: prompts([length], seed=length)[0] for name, length in LENGTHS.items()}
QUESTION, _ = prompts([40], seed=8)


def asked(hill, cache, new_tokens=6):
    """Return the bits of an answer on a cache itself, which goes on from there."""
    ids = torch.cat([torch.tensor(cache.token_ids), QUESTION], dim=1)
    return bits(run(hill.model, cache, ids, new_tokens=new_tokens))


def on_a_fork(hill, cache):
    """Return the bits of an answer; the cache is as before then."""
    fork = cache.fork()
    found = asked(hill, fork)
    fork.close()
    return found


def steps(hill, cache):
    """Yield the logits of steps that go on from a document, one at a time."""
    for at in range(6):
        with torch.no_grad():
            out = hill.model(input_ids=QUESTION[:, at : at + 1], past_key_values=cache)
        yield out.logits.view(torch.int32).clone()


def open_files():
    return {link.name for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}


def files_of(folder):
    """Return the files in a folder that are open."""
    targets = [os.readlink(f"/proc/self/fd/{name}") for name in open_files()]  # noqa: PTH115
    return sorted(target for target in targets if target.startswith(str(folder)))


@pytest.fixture(scope="module")
def places(attachment, tmp_path_factory):
    """A session of each document."""
    folder = tmp_path_factory.mktemp("places")
    for name, ids in DOCUMENTS.items():
        cache = attachment.new_cache()
        feed(attachment.model, cache, ids)
        cache.save_session(folder / name)
        cache.close()
    return {name: folder / name for name in DOCUMENTS}


@pytest.fixture(scope="module")
def expected(attachment, places):
    """The answer of each session alone."""
    answers = {}
    for name, place in places.items():
        cache = attachment.load_session(place)
        answers[name] = asked(attachment, cache)
        cache.close()
    return answers


@pytest.fixture
def own(places, tmp_path):
    """The sessions, to be damaged."""
    return {
        name: Path(shutil.copytree(place, tmp_path / "own" / name))
        for name, place in places.items()
    }


@pytest.fixture
def cold(cold_dir):
    """HillInfer with so little memory that rows are read from the drive at every step."""
    with attached(TINY.build(), cold_dir, dram_budget="10%") as hill:
        yield hill


@pytest.fixture
def faulty(cold_dir):
    """The same with a drive that fails where it is told to, and that drive."""
    calls = FaultyCalls()
    with attached_with(TINY.build(), cold_dir, {"calls": calls}, dram_budget="10%") as hill:
        yield hill, calls


def test_thirty_sessions_of_a_deep_model_need_few_descriptors(tmp_path, warm_python):
    """With other files in the place of some while they are read: only those fail."""
    done = subprocess.run(
        [*warm_python, Path(__file__).with_name("thirty_sessions.py"), tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["together"][::5] == told["alone"]
    # Codes have files, too.
    assert told["coded"] > 0
    assert told["filed"] > 0
    assert len({*told["together"]}) == 30
    # A quarter of 256, and what one session takes.
    assert told["asked"][0] <= told["counts"][0][0] + 64
    assert told["asked"][1] <= told["counts"][0][1] + 2
    assert told["held"]
    assert told["after"] == told["before"]
    for number, found in enumerate(told["changed"]):
        if number in (1, 2, 3, 4):
            what = {2: "is another file now", 3: "is not there any more"}.get(number, "written to")
            assert f"session-{number} was changed while a cache reads it: rows-0007.bin" in found
            assert what in found
        else:
            assert found == told["together"][number]


def test_sessions_and_a_new_cache_that_take_turns(attachment, places):
    alone = {}
    for name, place in places.items():
        cache = attachment.load_session(place)
        alone[name] = list(steps(attachment, cache))
        cache.close()
    new = attachment.new_cache()
    caches = {name: attachment.load_session(place) for name, place in places.items()}
    assert len({id(cache.engine) for cache in (new, *caches.values())}) == 1
    feed(attachment.model, new, DOCUMENTS["long"])
    going_on = [steps(attachment, cache) for cache in (new, *caches.values())]
    found = list(zip(*zip(*going_on, strict=True), strict=True))
    for own, expected in zip(found, (alone["long"], *alone.values()), strict=True):
        assert all(map(torch.equal, own, expected))
    assert not torch.equal(found[0][0], found[2][0])
    for cache in caches.values():
        assert cache.statistics().cold_write_bytes <= 128 * 64
    assert new.statistics().cold_write_bytes > 128 * 1024
    for cache in (new, *caches.values()):
        cache.close()


ORDERS = list(itertools.permutations(range(4)))


@pytest.mark.parametrize("order", ORDERS[::4], ids=str)
def test_caches_that_are_closed_in_any_order(cold, places, expected, order):
    gc.collect()
    before = open_files(), threading.active_count()
    caches = [cold.load_session(places["long"]), cold.load_session(places["short"])]
    caches += [caches[0].fork(), cold.new_cache()]
    names = ["long", "short", "long", "whole"]
    feed(cold.model, caches[3], DOCUMENTS["whole"])
    for number, index in enumerate(order):
        if number % 2:
            caches[index].close()
        caches[index] = None
        for name, cache in zip(names, caches, strict=True):
            if cache is not None:
                assert torch.equal(on_a_fork(cold, cache), expected[name])
        cache = None
    assert cold.statistics() is None
    assert (open_files(), threading.active_count()) == before


def test_one_that_is_cut_below_its_session_leaves_the_others(cold, places, expected):
    first, second = cold.load_session(places["long"]), cold.load_session(places["whole"])
    twin = cold.load_session(places["long"])
    first.crop(-900)
    feed(cold.model, first, DOCUMENTS["short"])
    first.reset()
    feed(cold.model, first, DOCUMENTS["short"])
    assert torch.equal(asked(cold, first), expected["short"])
    assert torch.equal(asked(cold, second), expected["whole"])
    assert torch.equal(asked(cold, twin), expected["long"])
    for cache in (first, second, twin):
        cache.close()


@pytest.mark.parametrize("function", [OtherFiles.drop_base, OtherFiles.leave, RowBase.close])
def test_numbers_of_a_session_that_ctrl_c_left_half_closed_are_nobodys_before_it_is_closed(
    cold, places, expected, function
):
    """Else what the next prompt writes lies elsewhere than where it is read."""
    kept, session = cold.new_cache(), cold.load_session(places["long"])
    assert torch.equal(on_a_fork(cold, session), expected["long"])
    with pytest.raises(KeyboardInterrupt), interrupted(function, "call"):
        session.close()
    feed(cold.model, kept, DOCUMENTS["long"])
    found = asked(cold, kept)
    with (
        attached(TINY.build(), cold.settings.cold_dir, dram_budget="10%") as calm,
        calm.new_cache() as alone,
    ):
        feed(calm.model, alone, DOCUMENTS["long"])
        assert torch.equal(found, asked(calm, alone))
    assert not torch.equal(found, expected["short"])
    kept.close()
    assert files_of(places["long"]) == []


@pytest.mark.parametrize(
    ("function", "event", "caller"),
    [
        (ReopenedFile.share, "call", None),
        (ColdStore.add_base, "call", None),
        (ColdStore.add_base, "return", None),
        (Sequence.append_groups, "call", None),
        (Sequence.append_groups, "return", None),
        (GroupTable.let_go, "call", opened_sequences.__file__),
    ],
)
def test_a_session_whose_loading_ctrl_c_broke_off_is_loaded_again(
    cold, places, expected, function, event, caller
):
    kept = cold.new_cache()
    rows = kept.engine.runtime.parts.rows
    before, files = (rows.tokens, len(rows.sequences)), files_of(places["long"])
    with pytest.raises(KeyboardInterrupt), interrupted(function, event, caller):
        cold.load_session(places["long"])
    assert (rows.tokens, len(rows.sequences)) == before
    assert files_of(places["long"]) == files
    with cold.load_session(places["long"]) as session:
        # The twin: one that is loaded is known.
        assert rows.tokens > before[0]
        found = on_a_fork(cold, session)
    assert torch.equal(found, expected["long"])
    feed(cold.model, kept, DOCUMENTS["short"])
    assert torch.equal(asked(cold, kept), expected["short"])
    assert not torch.equal(found, expected["short"])
    kept.close()


def test_two_caches_of_one_session_share_its_rows(attachment, places, expected):
    first = attachment.load_session(places["long"])
    alone, files = attachment.statistics().kv_bytes, open_files()
    second = attachment.load_session(places["long"])
    open_rows = LENGTHS["long"] % 64 * 128
    assert attachment.statistics().kv_bytes == alone + open_rows
    assert open_files() == files
    answer = asked(attachment, first)
    read = second.statistics().cold_read_bytes
    assert torch.equal(asked(attachment, second), answer)
    assert torch.equal(answer, expected["long"])
    # Whatever the first one had read is in memory.
    assert second.statistics().cold_read_bytes - read < first.statistics().cold_read_bytes
    first.close()
    assert torch.equal(asked(attachment, attachment.load_session(places["long"])), expected["long"])
    second.close()


def test_a_copy_of_a_session_is_another_one(attachment, places, own, expected):
    first, copy = attachment.load_session(places["long"]), attachment.load_session(own["long"])
    shutil.rmtree(own["long"])
    for cache in (first, copy):
        assert torch.equal(asked(attachment, cache), expected["long"])
        cache.close()


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_file_that_is_damaged_in_use_fails_its_caches_alone(cold, own, expected, damage):
    caches = {name: cold.load_session(place) for name, place in own.items()}
    rows = own["long"] / "rows-0001.bin"
    if damage == "cut":
        os.truncate(rows, 4096)
    else:
        with rows.open("r+b") as file:
            file.write(bytes(byte ^ 4 for byte in rows.read_bytes()))
    for _ in range(2):
        with pytest.raises((ColdPoolError, SessionError), match=r"rows-0001\.bin of the session"):
            asked(cold, caches["long"])
        for name in ("short", "whole"):
            assert torch.equal(on_a_fork(cold, caches[name]), expected[name])
    # What does not need its rows is possible still.
    caches["long"].reset()
    feed(cold.model, caches["long"], DOCUMENTS["whole"])
    assert torch.equal(asked(cold, caches["long"]), expected["whole"])
    for cache in caches.values():
        cache.close()


def test_a_session_that_cannot_be_loaded_leaves_nothing_behind(cold, own, expected):
    flip_bit(own["long"] / "rows-0001.bin", 70)
    (own["whole"] / "tails.bin").unlink()
    calm = cold.load_session(own["short"])
    tokens, kv, files = calm.token_ids, cold.statistics().kv_bytes, open_files()
    for name in ("long", "whole"):
        with pytest.raises(SessionError, match=r"rows-0001\.bin was changed|tails\.bin is missing"):
            cold.load_session(own[name])
    assert cold.statistics().kv_bytes == kv
    assert open_files() == files
    assert calm.token_ids == tokens
    assert torch.equal(asked(cold, calm), expected["short"])
    calm.close()


@pytest.mark.parametrize("kind", ["open", "preadv", "close"])
def test_every_call_that_fails_while_loading_beside_others(faulty, places, expected, kind):
    cold, calls = faulty
    calm = cold.load_session(places["long"])
    folder, kv = places["long"].parent, cold.statistics().kv_bytes
    files = files_of(folder)
    assert len(files) == 2
    calls.begin()
    cold.load_session(places["whole"]).close()
    count = calls.counts[kind]
    assert count > 8
    for index in {0, 1, count // 4, count // 3, count // 2, 3 * count // 4, count - 1}:
        calls.begin(Injection(kind, index, Fault.EIO))
        try:
            cache = cold.load_session(places["whole"])
        except SessionError:
            pass
        else:
            assert torch.equal(asked(cold, cache), expected["whole"])
            cache.close()
        assert calls.hits == 1
        assert files_of(folder) == files
        assert cold.statistics().kv_bytes == kv
    assert torch.equal(on_a_fork(cold, calm), expected["long"])
    calm.close()


def test_many_sessions_one_after_another_leave_nothing_behind(attachment, places):
    def loaded(name):
        cache = attachment.load_session(places[name])
        asked(attachment, cache, new_tokens=1)
        cache.close()

    calm = attachment.new_cache()
    feed(attachment.model, calm, DOCUMENTS["short"])
    told = []
    for turn in range(3):
        for _ in range(4 + 8 * turn):
            loaded("whole")
            loaded("short")
        statistics = attachment.statistics()
        told.append((open_files(), threading.active_count(), statistics.dram_peak_bytes))
    assert told[1] == told[2]
    assert statistics.kv_bytes == LENGTHS["short"] * 128
    calm.close()


def test_a_loaded_cache_is_saved_beside_others(attachment, places, expected, tmp_path):
    other = attachment.load_session(places["short"])
    cache = attachment.load_session(places["long"])
    with pytest.raises(SessionError, match="it is not empty, and nothing is overwritten"):
        cache.save_session(places["long"])
    cache.save_session(tmp_path / "again")
    for name in ("rows-0000.bin", "shadow.bin", "tokens.bin"):
        ours = (tmp_path / "again" / name).read_bytes()
        assert ours == (places["long"] / name).read_bytes()
    again = attachment.load_session(tmp_path / "again")
    for one, name in ((cache, "long"), (other, "short"), (again, "long")):
        assert torch.equal(asked(attachment, one), expected[name])
        one.close()


def test_more_sessions_than_a_budget_holds(cold_dir, places, expected, least_budget):
    with attached(TINY.build(), cold_dir, dram_budget=least_budget(TINY, 1250, 2)) as hill:
        caches = [hill.load_session(places[name], 1250) for name in ("long", "short")]
        with pytest.raises(
            BudgetError,
            match=r"3 caches of this model share one DRAM budget, and 3750 tokens in 3 sequences "
            r"are expected.*or close a cache first",
        ):
            hill.load_session(places["long"], 1250)
        assert torch.equal(asked(hill, caches[0]), expected["long"])
        caches[0].close()
        caches[0] = hill.load_session(places["whole"], 1250)
        assert torch.equal(asked(hill, caches[0]), expected["whole"])
        assert torch.equal(asked(hill, caches[1]), expected["short"])
        for cache in caches:
            cache.close()


def test_a_session_with_another_shadow_than_the_caches_that_are_open(cold_dir, places, tmp_path):
    with attached(TINY.build(), cold_dir, shadow="int8") as hill:
        cache = hill.new_cache()
        feed(hill.model, cache, DOCUMENTS["long"])
        cache.save_session(tmp_path / "wide")
        answer = asked(hill, cache)
        hill.settings = replace(hill.settings, shadow=None)
        # Other settings are another engine's, which takes the session's shadow.
        loaded = hill.load_session(tmp_path / "wide")
        assert loaded.engine is not cache.engine
        assert torch.equal(asked(hill, loaded), answer)
        cache.close()
        with pytest.raises(
            SessionError,
            match=r"long does not fit: shadow is int4 in the session and int8 in the caches of "
            r"this model that are open.*close them first, or open all of them with --shadow int4",
        ):
            hill.load_session(places["long"])
        # Those that are open rule.
        feed(hill.model, cache := hill.new_cache(), DOCUMENTS["long"])
        assert torch.equal(asked(hill, cache), answer)
        cache.close()
        loaded.close()
        hill.load_session(places["long"]).close()


def test_threads_load_and_answer_at_once(cold, places, expected):
    def use(name):
        for _ in range(3):
            cache = cold.load_session(places[name])
            answer = asked(cold, cache)
            cache.close()
            assert torch.equal(answer, expected[name])

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(use, name) for name in (*places, "long")]:
            done.result(300)
    assert cold.statistics() is None


def test_a_session_is_not_loaded_in_the_middle_of_a_pass(attachment, places):
    cache = attachment.new_cache()
    seen = []

    def load(*_):
        try:
            attachment.load_session(places["short"])
        except CacheUseError as error:
            seen.append(str(error))

    hook = attachment.model.model.layers[1].register_forward_hook(load)
    feed(attachment.model, cache, DOCUMENTS["short"])
    hook.remove()
    assert len(seen) == 1
    assert "a forward pass is under way in this thread" in seen[0]
    attachment.load_session(places["short"]).close()
    cache.close()


def test_a_process_that_forks_keeps_its_sessions(attachment, places, expected):
    cache = attachment.load_session(places["long"])
    child = os.fork()
    if child == 0:
        # The child leaves alone what its parent goes on using.
        cache.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(asked(attachment, cache), expected["long"])
    cache.close()
