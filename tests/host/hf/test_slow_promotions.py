# SPDX-License-Identifier: Apache-2.0
"""Promotions that come late change no bit of what comes out and no byte of what is read.

Rows are promoted in the background, from buffers and tails that others want back, into slots that
others look at. Here every promotion takes longer than a forward pass, so whoever does not wait for
it sees rows that are not there yet, or that another row has taken the place of.
"""

import functools

import pytest
import torch
from generation_runs import attached, bits, run
from placement_cases import ALL_HOT, Case
from slow_promotions import slow_promotions
from tiny_models import TinyModel, prompts

SELECTION = {"alpha": 0.5, "kept_recent": 4, "block_rows": 48}
PREDICTED = SELECTION | {"query": "predicted"}
# The group is full some steps before and after memory is divided anew, which waits for all.
IDS, _ = prompts([186])
OTHER, _ = prompts([30], seed=5)


def a_group_is_filled(model, cache):
    """The open group is filled by single tokens and begun again."""
    return [run(model, cache, IDS, new_tokens=24)]


def rows_are_selected_again(model, cache):
    """Consecutive steps want much the same rows, which the step before let become hot."""
    return [run(model, cache, IDS, new_tokens=6)]


def groups_are_given_back(model, cache):
    """Full groups are cut off and filled with other tokens."""
    first = run(model, cache, IDS, new_tokens=14)
    cache.crop(-75)
    kept = first.sequences[:, : cache.get_seq_length()]
    again = run(model, cache, torch.cat([kept, OTHER, OTHER], dim=1), new_tokens=12)
    return [first, again]


def forks_take_turns(model, cache):
    """Two sequences that share groups go on side by side, and one of them ends."""
    first = run(model, cache, IDS, new_tokens=4)
    fork = cache.fork()
    outputs = [first]
    for part in (OTHER, OTHER[:, :9]):
        for number, one in enumerate((cache, fork)):
            kept = torch.tensor(one.token_ids)
            asked = torch.cat([kept, first.sequences[:, -1:], part[:, number:]], dim=1)
            outputs.append(run(model, one, asked, new_tokens=3))
    fork.close()
    kept = torch.tensor(cache.token_ids)
    outputs.append(run(model, cache, torch.cat([kept, OTHER, OTHER, OTHER], dim=1), new_tokens=3))
    return outputs


# A model, what may change the output, what happens, and the tokens of each sequence at the most.
SCENES = {
    "a group is filled": (TinyModel(), SELECTION, a_group_is_filled, (210,)),
    "rows are selected again": (TinyModel(), SELECTION, rows_are_selected_again, (192,)),
    "rows are read ahead": (TinyModel(layers=4), PREDICTED, rows_are_selected_again, (192,)),
    "groups are given back": (TinyModel(), SELECTION, groups_are_given_back, (202,)),
    "forks take turns": (TinyModel(), SELECTION, forks_take_turns, (336, 246)),
}
# A pool policy, and how much of all rows is hot beyond the least; None for all of them, which stay
# hot from the moment their group is full.
POOLS = {"all": ("decayed", None), "most": ("lru", 0.4), "few": ("counts", 0.15)}
CASES = [(scene, pool) for scene in SCENES for pool in ("most", "few")]
CASES += [("a group is filled", "all"), ("groups are given back", "all")]


def played(scene, cold_dir, **placement):
    """Return the bits of all logits, and what the drive and the selection had to do."""
    tiny, selection, play, lengths = SCENES[scene]
    model = tiny.build()
    with attached(model, cold_dir, **selection, **placement) as hill:
        cache = hill.new_cache(max(lengths), len(lengths))
        outputs = play(model, cache)
        statistics = cache.statistics()
        cache.close()
    assert statistics.dram_peak_bytes <= statistics.dram_budget_bytes
    return [bits(output) for output in outputs], statistics


@functools.cache
def all_hot(scene, cold_dir):
    """What comes out, and is counted, while all rows are hot and nothing is late."""
    return played(scene, cold_dir, dram_budget=ALL_HOT)


@pytest.mark.parametrize(("scene", "pool"), CASES)
def test_late_promotions_change_nothing(scene, pool, cold_dir, monkeypatch):
    tiny, selection, _, lengths = SCENES[scene]
    policy, share = POOLS[pool]
    expected, hot = all_hot(scene, cold_dir)
    placement, quick = {"dram_budget": ALL_HOT}, hot
    if share is not None:
        least = Case(tiny, lengths, None, 0, selection).least_bytes()
        placement = {"dram_budget": int(least + share * hot.kv_bytes), "pool_policy": policy}
        _, quick = played(scene, cold_dir, **placement)
    slow_promotions(monkeypatch)
    found, slow = played(scene, cold_dir, **placement)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    # Rows that are about to be hot are not read once more.
    for told in ("cold_useful_bytes", "hot_rows_read", "cold_rows_read", "promoted_rows"):
        assert getattr(slow, told) == getattr(quick, told), told
    assert (slow.promoted_rows > 0) == (share is not None)
