# SPDX-License-Identifier: Apache-2.0
"""What a store evicts, admits and writes, asked through the tables of policies."""

import hashlib
import json
from dataclasses import replace

import pytest

from hillinfer.errors import SettingsError
from hillinfer.store.eviction import (
    ADMISSIONS,
    DEFAULT_ADMISSION,
    DEFAULT_EVICTION,
    EVICTION_POLICIES,
    HITS_HALF_LIFE,
    AdaptiveAdmission,
    ChunkFacts,
    GhostStore,
    SeenOnce,
    Turns,
    WriteBudget,
    hits_after,
    make_admission,
    make_eviction_policy,
)

FACTS = ChunkFacts(position=3, hits=1.0, turn=1, cost=2.0, last=90.0, now=100.0)
# What makes a chunk worth more to each policy; nothing else does.
MORE = {
    "saved": {"hits": 2.0, "cost": 3.0, "turn": 2},
    "gdsf": {"hits": 2.0, "cost": 3.0},
    "lru": {"now": 101.0},
    "lfu": {"hits": 2.0},
}
DAY = 86_400


def key(number):
    return hashlib.sha256(str(number).encode()).digest()


def keys(*numbers):
    return [key(number) for number in numbers]


def learned_turns():
    """Return turns after which one of four conversations went on once and then no more."""
    turns = Turns()
    for number in range(400):
        turns.of(keys(number))
        if number % 4 == 0:
            turns.of(keys(number, f"{number} goes on"))
            turns.of(keys(number, f"{number} goes on", f"{number} ends"))
    return turns


def test_every_policy_and_admission_has_its_cases():
    assert MORE.keys() == EVICTION_POLICIES.keys()
    assert DEFAULT_EVICTION in EVICTION_POLICIES
    assert DEFAULT_ADMISSION in ADMISSIONS


@pytest.mark.parametrize("name", EVICTION_POLICIES)
@pytest.mark.parametrize("fact", ["hits", "cost", "turn", "now", "position", "last"])
def test_a_policy_ranks_by_what_it_says_and_by_nothing_else(name, fact):
    policy = make_eviction_policy(name, learned_turns())
    larger = MORE[name].get(fact, {"position": 4, "last": 95.0, "now": 101.0}.get(fact, 2))
    more = policy.worth(replace(FACTS, **{fact: larger}), 5.0)
    if fact in MORE[name]:
        assert more > policy.worth(FACTS, 5.0)
    else:
        assert more == policy.worth(FACTS, 5.0)


@pytest.mark.parametrize("name", ["saved", "gdsf"])
def test_what_is_used_now_outlives_what_was_worth_more_once(name):
    policy = make_eviction_policy(name)
    dear = policy.worth(replace(FACTS, hits=8.0), 0.0)
    assert policy.worth(FACTS, 0.0) < dear
    assert policy.worth(FACTS, dear) > dear


@pytest.mark.parametrize(
    "make", [make_eviction_policy, lambda name: make_admission(name, 1, None, None)]
)
def test_a_name_that_is_not_there_is_told_which_are(make):
    with pytest.raises(SettingsError, match="choose one of"):
        make("best")


def test_hits_fade_by_half_in_their_half_life():
    assert hits_after(0.0, 0.0) == 1
    assert hits_after(4.0, HITS_HALF_LIFE) == 3
    assert hits_after(4.0, -5.0) == 5


def test_a_prompt_that_begins_with_a_whole_earlier_one_is_its_next_turn():
    turns = Turns()
    assert turns.of(keys(1, 2)) == 1
    assert turns.of(keys(1, 2, 3, 4)) == 2
    assert turns.of(keys(1, 2, 3, 4)) == 3
    # Another one that only begins alike, and one that leaves the conversation before its end.
    assert turns.of(keys(1, 9)) == 1
    assert turns.of(keys(1, 2, 3, 7)) == 1
    assert turns.of([]) == 1


def test_what_many_prompts_begin_with_is_no_conversation():
    turns = Turns()
    turns.of(keys("system"))
    assert [turns.of(keys("system", number)) for number in range(20)] == [2] + [1] * 19


def test_the_chance_of_another_turn_is_learned_and_unknown_turns_are_first_ones():
    turns = learned_turns()
    assert turns.chance(1) == pytest.approx(0.25, abs=0.02)
    assert turns.chance(2) > 0.9
    assert turns.chance(3) < 0.1
    assert turns.chance(0) == turns.chance(1)
    assert turns.chance(10_000) == turns.chance(16) == 0.5


def test_only_the_newest_ends_are_remembered():
    turns = Turns(most_ends=2)
    for number in range(3):
        turns.of(keys(number))
    assert turns.of(keys(0, "more")) == 1
    assert turns.of(keys(2, "more")) == 2


# --- Admission ---


def asked(admission, numbers, now=0.0, cost=1.0):
    return [admission.admits(key(number), 1, 0, cost, now) for number in numbers]


def test_seen_once_admits_at_second_sight_and_forgets_the_oldest():
    seen = SeenOnce(4)
    assert asked(seen, [1, 2, 1, 2]) == [False, False, True, True]
    assert asked(seen, range(10, 20)) == [False] * 10
    assert asked(seen, [1, 19]) == [False, True]


def adaptive(chunks=100, budget=None):
    return AdaptiveAdmission(chunks, make_eviction_policy("lru"), budget)


def once_and_again(length, kept):
    """Yield new numbers with `kept` old ones between, which come again and again."""
    for number in range(length):
        yield number + 10**6
        yield number % kept


def test_adaptive_admits_all_where_there_is_room_for_all():
    admission = adaptive()
    for _ in range(40):
        asked(admission, range(90))
    assert not admission.selective
    assert asked(admission, ["new"]) == [True]


def test_adaptive_selects_where_what_comes_once_would_evict_what_comes_again():
    admission = adaptive()
    asked(admission, once_and_again(4000, kept=80))
    assert admission.selective
    assert asked(admission, ["new", "new"]) == [False, True]
    # Where all comes twice and no more, selecting finds nothing.
    asked(admission, [f"{number // 2}" for number in range(8000)])
    assert not admission.selective


def test_near_the_cap_only_what_was_seen_is_admitted():
    budget = WriteBudget(1000)
    admission = adaptive(budget=budget)
    assert asked(admission, ["a"]) == [True]
    budget.wrote(800, 0.0)
    assert asked(admission, ["b", "b"]) == [False, True]
    assert asked(admission, ["c"], now=2 * DAY) == [True]


def test_a_ghost_evicts_what_is_worth_least_and_counts_what_it_saves():
    ghost = GhostStore(2, make_eviction_policy("lru"))
    for number, now in ((1, 0.0), (2, 1.0)):
        ghost.store(number, replace(FACTS, now=now))
    assert ghost.finds(1, replace(FACTS, now=2.0))
    ghost.store(3, replace(FACTS, now=3.0))
    assert [ghost.finds(number, replace(FACTS, now=4.0)) for number in (1, 2, 3)] == [
        True,
        False,
        True,
    ]
    assert ghost.saved == 3 * FACTS.cost


# --- Writing ---


def test_a_day_of_writes_never_exceeds_the_cap():
    budget, written = WriteBudget(24_000), []
    for minute in range(4 * 24 * 60):
        now = 60.0 * minute
        if budget.allows(100, now):
            budget.wrote(100, now)
            written.append(now)
    for end in range(0, 4 * DAY, 600):
        assert 100 * sum(end - DAY < one <= end for one in written) <= 24_000
    # It is used up all the same, day by day.
    assert len(written) >= 3 * 240


def test_without_a_cap_everything_may_be_written():
    budget = WriteBudget()
    budget.wrote(10**15, 0.0)
    assert budget.allows(10**15, 1.0)
    assert not budget.pressed(1.0)
    with pytest.raises(SettingsError):
        WriteBudget(-1)


# --- States ---


def learned():
    """Return one of everything that learns, and a fresh one of the same kind."""
    budget, seen, many = WriteBudget(5000), SeenOnce(50), adaptive()
    budget.wrote(700, 5 * DAY)
    asked(seen, range(70))
    asked(many, once_and_again(4000, kept=80))
    return {
        "turns": (learned_turns(), Turns()),
        "budget": (budget, WriteBudget(5000)),
        "seen": (seen, SeenOnce(50)),
        "adaptive": (many, adaptive()),
        "always": (
            make_admission("always", 1, None, None),
            make_admission("always", 1, None, None),
        ),
    }


@pytest.mark.parametrize("name", learned())
def test_what_is_learned_survives_as_json_of_numbers(name):
    old, new = learned()[name]
    told = json.loads(json.dumps(old.state(), allow_nan=False))
    if told:
        assert new.state() != told
    new.resume(told)
    assert new.state() == told


def test_what_was_learned_is_used_again():
    (old, new), (_, fresh) = learned()["turns"], learned()["turns"]
    new.resume(old.state())
    assert new.chance(2) == old.chance(2) != fresh.chance(2)
    old, new = learned()["adaptive"]
    new.resume(old.state())
    assert asked(new, ["new"]) == [False]


# None of what is refused below changes them.
LEARNED = learned()
BAD = [None, "x", [None], [True], [float("nan")], [10**400], [[1]], {"a": 1}]


@pytest.mark.parametrize("bad", BAD, ids=repr)
@pytest.mark.parametrize(
    ("name", "field"),
    [(name, field) for name, (old, _) in LEARNED.items() for field in old.state()],
)
def test_a_state_that_is_none_is_refused_and_nothing_of_it_taken(name, field, bad):
    old, new = LEARNED[name]
    before = new.state()
    with pytest.raises(ValueError):  # noqa: PT011
        new.resume({**old.state(), field: bad})
    assert new.state() == before
