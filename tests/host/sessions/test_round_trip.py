# SPDX-License-Identifier: Apache-2.0
"""What comes out of a session is what an unbroken run has, to the last bit."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from generation_runs import attached, attached_with, run
from session_runs import IDS, PROMPT, QUESTION, TINY, answer, feed, flip_bit, seal_checksums
from tiny_models import TinyModel, prompts

from hillinfer.drive.calls import DriveCalls
from hillinfer.engine.budget_growth import CachePlan
from hillinfer.errors import BudgetError, CacheUseError, SessionError

ROWS = 2 * 2176 * 64


def unbroken(attachment, ids=PROMPT):
    cache = attachment.new_cache()
    feed(attachment.model, cache, IDS)
    return answer(attachment.model, cache, ids)


@pytest.mark.parametrize(
    ("tiny", "shadow"),
    [
        (TinyModel(), "int8"),
        (TinyModel(), "int2"),
        (TinyModel(dtype=torch.bfloat16), "int4"),
        (TinyModel("opt", "mha"), "int4"),
    ],
    ids=str,
)
def test_answers_are_those_of_an_unbroken_run(tiny, shadow, cold_dir, tmp_path):
    model = tiny.build()
    with attached(model, cold_dir, shadow=shadow) as hill:
        cache = hill.new_cache()
        feed(model, cache, IDS)
        cache.save_session(tmp_path / "session")
        expected = answer(model, cache)
        resumed = hill.load_session(tmp_path / "session")
        assert resumed.get_seq_length() == IDS.shape[1]
        assert torch.equal(answer(model, resumed), expected)
        # The cache that was saved is not disturbed: it went on writing, and not into the session.
        assert torch.equal(answer(model, hill.load_session(tmp_path / "session")), expected)


def test_a_changed_row_that_passes_for_whole_changes_the_answer(attachment, saved):
    expected = answer(attachment.model, attachment.load_session(saved))
    rows = saved / "rows-0000.bin"
    data = np.fromfile(rows, np.uint16).reshape(-1, 32)
    data[:, 16] ^= 0x0400
    rows.write_bytes(data.tobytes())
    with pytest.raises(SessionError, match=r"rows-0000\.bin was changed"):
        attachment.load_session(saved)
    seal_checksums(saved)
    changed = answer(attachment.model, attachment.load_session(saved))
    assert not torch.equal(changed, expected)


def test_a_changed_code_that_passes_for_whole_changes_what_is_selected(attachment, saved):
    cache = attachment.load_session(saved)
    expected = answer(attachment.model, cache)
    shadow = np.fromfile(saved / "shadow.bin", np.uint8)
    shadow[0::3] ^= 0x11
    (saved / "shadow.bin").write_bytes(shadow.tobytes())
    seal_checksums(saved)
    assert not torch.equal(answer(attachment.model, attachment.load_session(saved)), expected)


def test_all_that_a_sequence_keeps_comes_back(attachment, tmp_path):
    cache = attachment.new_cache()
    feed(attachment.model, cache, IDS)
    run(attachment.model, cache, PROMPT, new_tokens=40)
    cache.save_session(tmp_path / "session")
    ours = cache.sequences[0]
    resumed = attachment.load_session(tmp_path / "session")
    theirs = resumed.sequences[0]
    assert theirs.token_ids == ours.token_ids
    assert theirs.lengths == ours.lengths
    filled = ours.lengths[0] % 64
    assert filled
    np.testing.assert_array_equal(theirs.tails[:, :filled], ours.tails[:, :filled])
    assert len(theirs.segments) == len(ours.segments) == 3
    for mine, own in zip(theirs.segments, ours.segments, strict=True):
        for one, other in zip(mine.layers, own.layers, strict=True):
            assert one.coded_tokens == other.coded_tokens > 0
            np.testing.assert_array_equal(one.shadow, other.shadow)
            np.testing.assert_array_equal(one.statistics.means, other.statistics.means)
            np.testing.assert_array_equal(one.statistics.exponents, other.statistics.exponents)
    for mine, own in zip(theirs.hits.counts, ours.hits.counts, strict=True):
        np.testing.assert_array_equal(mine[: len(ours.token_ids)], own[: len(ours.token_ids)])
        assert own.any()


def test_prefill_queries_that_were_not_counted_yet_come_back(cold_dir, tmp_path):
    model = TinyModel().build()
    with attached(model, cold_dir, pool_policy="paper") as hill:
        cache = hill.new_cache()
        feed(model, cache, IDS)
        ours = cache.sequences[0].observed
        assert all(queries is not None for queries in ours)
        cache.save_session(tmp_path / "session")
        resumed = hill.load_session(tmp_path / "session")
        theirs = resumed.sequences[0].observed
        for mine, own in zip(theirs, ours, strict=True):
            assert torch.equal(mine, own)


def test_an_open_segment_that_was_scored_goes_on_with_its_statistics(attachment, tmp_path):
    # Scored when it held a few tokens, the open segment keeps statistics of those only.
    ids, _ = prompts([1060], seed=5)
    later, _ = prompts([1060 + 500], seed=5)
    caches = [attachment.new_cache()]
    feed(attachment.model, caches[0], ids)
    feed(attachment.model, caches[0], QUESTION[:, :3], chunk=1)
    caches[0].save_session(tmp_path / "session")
    caches.append(attachment.load_session(tmp_path / "session"))
    caches.append(attachment.new_cache())
    both = torch.cat([ids, QUESTION[:, :3]], dim=1)
    feed(attachment.model, caches[2], both)
    for cache in caches:
        feed(attachment.model, cache, later[:, -500:])
    whole = torch.cat([both, later[:, -500:], QUESTION], dim=1)
    ours, theirs = (cache.sequences[0].segments[1].layers[0] for cache in caches[:2])
    assert ours.statistics is not None
    np.testing.assert_array_equal(ours.statistics.means, theirs.statistics.means)
    assert len(caches[2].sequences[0].segments) == 1
    expected = answer(attachment.model, caches[0], whole)
    assert torch.equal(answer(attachment.model, caches[1], whole), expected)


def test_forks_of_a_session_go_on_by_themselves(attachment, saved):
    expected = unbroken(attachment)
    cache = attachment.load_session(saved)
    forks = [cache.fork() for _ in range(3)]
    other, _ = prompts([40], seed=77)
    feed(attachment.model, forks[0], other)
    for fork in forks[1:]:
        assert torch.equal(answer(attachment.model, fork), expected)
        fork.close()
    assert torch.equal(answer(attachment.model, cache), expected)


def test_a_session_that_was_cut_and_read_on_equals_an_unbroken_run(attachment, saved):
    ids = torch.cat([IDS[:, :1500], PROMPT[:, 1000:1800]], dim=1)
    fresh = attachment.new_cache()
    feed(attachment.model, fresh, IDS)
    caches = [fresh, attachment.load_session(saved)]
    for cache in caches:
        cache.crop(1500 - IDS.shape[1])
    ours, theirs = (answer(attachment.model, cache, ids) for cache in caches)
    assert torch.equal(ours, theirs)


def test_saved_again_after_answers(attachment, saved, tmp_path):
    cache = attachment.load_session(saved)
    first = run(attachment.model, cache, PROMPT)
    result = cache.save_session(tmp_path / "again")
    assert result.copied_row_bytes == 2 * (cache.get_seq_length() // 64 * 64) * 64
    more = torch.cat([first.sequences, QUESTION], dim=1)
    expected = answer(attachment.model, cache, more)
    assert torch.equal(
        answer(attachment.model, attachment.load_session(tmp_path / "again"), more), expected
    )


def test_rows_are_given_a_name_and_not_written_again(attachment, tmp_path):
    cache = attachment.new_cache()
    feed(attachment.model, cache, IDS)
    written = cache.statistics().cold_write_bytes
    # Counted when it is queued, so the last writes may still be under way.
    store = cache.engine.runtime.parts.store
    for layer in range(len(store.files)):
        store.settle_all(layer)
    files = [os.fstat(file.descriptor) for file in store.files]
    result = cache.save_session(tmp_path / "session")
    assert result.copied_row_bytes == 0
    assert cache.statistics().cold_write_bytes == written == ROWS
    for layer, file in enumerate(files):
        named = (tmp_path / "session" / f"rows-{layer:04}.bin").stat()
        assert os.path.samestat(named, file)
        assert named.st_mtime_ns == file.st_mtime_ns
        assert named.st_mode & 0o777 == 0o600
    assert (tmp_path / "session").stat().st_mode & 0o777 == 0o700
    before = [file.read_bytes() for file in sorted((tmp_path / "session").iterdir())]
    run(attachment.model, cache, PROMPT, new_tokens=80)
    assert [file.read_bytes() for file in sorted((tmp_path / "session").iterdir())] == before


def test_loading_reads_rows_where_they_lie(attachment, saved):
    cache = attachment.load_session(saved)
    assert cache.statistics().cold_write_bytes == 0
    own = {os.fstat(file.descriptor).st_size for file in cache.engine.runtime.parts.store.files}
    assert own == {0}
    run(attachment.model, cache, PROMPT)
    statistics = cache.statistics()
    assert statistics.cold_write_bytes <= 2 * 2 * 64 * 64
    assert statistics.cold_read_bytes > 0


class NoLinks(DriveCalls):
    def link(self, descriptor, path):
        raise OSError(18, "Invalid cross-device link")


def test_linked_and_copied_sessions_hold_the_same(attachment, cold_dir, tmp_path):
    for name, given in (("linked", {}), ("copied", {"calls": NoLinks()})):
        with attached_with(TINY.build(), cold_dir, given) as hill:
            cache = hill.new_cache()
            feed(hill.model, cache, IDS)
            result = cache.save_session(tmp_path / name)
            cache.close()
        assert result.copied_row_bytes == (ROWS if name == "copied" else 0)
    names = sorted(file.name for file in (tmp_path / "linked").iterdir())
    for name in names:
        if name != "hits.bin":
            ours, theirs = ((tmp_path / one / name).read_bytes() for one in ("linked", "copied"))
            assert ours == theirs, name
    expected = answer(attachment.model, attachment.load_session(tmp_path / "linked"))
    assert torch.equal(
        answer(attachment.model, attachment.load_session(tmp_path / "copied")), expected
    )


def test_a_pool_that_holds_more_than_the_document_is_copied(attachment, tmp_path):
    cache = attachment.new_cache()
    feed(attachment.model, cache, IDS)
    fork = cache.fork()
    feed(attachment.model, fork, prompts([100], seed=3)[0])
    result = cache.save_session(tmp_path / "session")
    assert result.copied_row_bytes == ROWS
    expected = answer(attachment.model, cache)
    resumed = attachment.load_session(tmp_path / "session")
    assert torch.equal(answer(attachment.model, resumed), expected)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1024])
def test_documents_of_any_length(attachment, tmp_path, tokens):
    ids = IDS[:, :tokens]
    cache = attachment.new_cache()
    feed(attachment.model, cache, ids)
    cache.save_session(tmp_path / "session")
    whole = torch.cat([ids, QUESTION], dim=1)
    expected = answer(attachment.model, cache, whole)
    resumed = attachment.load_session(tmp_path / "session")
    assert torch.equal(answer(attachment.model, resumed, whole), expected)


def without_shadows(*given):
    return replace(CachePlan.of(*given), shadow_limit_bytes=0)


def test_shadows_without_room_in_memory_stay_in_the_session(attachment, cold_dir, saved, tmp_path):
    expected = answer(attachment.model, attachment.load_session(saved))
    with attached_with(TINY.build(), cold_dir, {"plan": without_shadows}) as hill:
        cache = hill.load_session(saved)
        assert torch.equal(answer(hill.model, cache), expected)
        statistics = cache.statistics()
        assert statistics.shadow_write_bytes == 0
        assert statistics.shadow_read_bytes > 0
        cache.crop(IDS.shape[1] - cache.get_seq_length())
        cache.save_session(tmp_path / "again")
        # The question's forward pass scored the open segment, which keeps its statistics.
        cache.crop(-200)
        ids = torch.cat([IDS[:, :2000], QUESTION], dim=1)
        found = answer(hill.model, cache, ids)
        cache.close()
    again = attachment.load_session(tmp_path / "again")
    again.crop(-200)
    assert torch.equal(answer(attachment.model, again, ids), found)


def test_another_process(attachment, saved, tmp_path, warm_python):
    here = Path(__file__).parent
    script = f"""
import sys
sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]
import torch
torch.set_num_threads(1)
from session_runs import TINY, answer
from generation_runs import attached
model = TINY.build()
with attached(model, {str(tmp_path)!r}) as hill:
    torch.save(answer(model, hill.load_session({str(saved)!r})), {str(tmp_path / "bits")!r})
"""
    done = subprocess.run([*warm_python, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "bits"), unbroken(attachment))


def test_a_budget_that_cannot_hold_a_session_is_refused_at_once(cold_dir, saved):
    model = TinyModel().build()
    with attached(model, cold_dir, dram_budget=300_000) as hill, pytest.raises(BudgetError):
        hill.load_session(saved, expected_tokens=2300)
    with attached(model, cold_dir, dram_budget="2000%") as hill:
        cache = hill.load_session(saved, expected_tokens=2300)
        run(model, cache, PROMPT)
        statistics = cache.statistics()
        assert statistics.dram_peak_bytes <= statistics.dram_budget_bytes == 20 * 2300 * 128


def test_several_sequences_and_padding_are_refused(attachment, tmp_path):
    ids, mask = prompts([40, 50], seed=1)
    cache = attachment.new_cache()
    run(attachment.model, cache, ids, mask)
    with pytest.raises(CacheUseError, match="holds 2: save one document at a time"):
        cache.save_session(tmp_path / "session")
    cache.batch_select_indices(torch.tensor([0]))
    with pytest.raises(CacheUseError, match="10 tokens of it"):
        cache.save_session(tmp_path / "session")
    cache.reset()
    with pytest.raises(CacheUseError, match="holds 0"):
        cache.save_session(tmp_path / "session")
    assert not (tmp_path / "session").exists()


def test_identical_rows_are_one_sequence(attachment, tmp_path):
    cache = attachment.new_cache()
    feed(attachment.model, cache, IDS[:, :100].repeat(3, 1))
    cache.save_session(tmp_path / "session")
    resumed = attachment.load_session(tmp_path / "session")
    assert resumed.batch_size == 1
    assert resumed.get_seq_length() == 100


def test_another_prompt_on_a_session_is_refused(attachment, saved):
    cache = attachment.load_session(saved)
    other = PROMPT.clone()
    other[0, 5] = other[0, 5] % 60 + 1
    with pytest.raises(CacheUseError, match="does not continue"):
        run(attachment.model, cache, other)


def test_flipping_without_checksum_is_seen_at_any_place(attachment, saved):
    size = (saved / "rows-0001.bin").stat().st_size
    for place in (0, size // 2, size - 1):
        flip_bit(saved / "rows-0001.bin", place)
        with pytest.raises(SessionError, match=r"rows-0001\.bin was changed"):
            attachment.load_session(saved)
        flip_bit(saved / "rows-0001.bin", place)
    attachment.load_session(saved).close()
