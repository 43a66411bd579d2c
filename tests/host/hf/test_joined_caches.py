# SPDX-License-Identifier: Apache-2.0
"""Caches of different lengths take steps together, and come and go; each row answers as alone."""

import pytest
import torch
from generation_runs import attached, run
from test_cache_operations import feed
from tiny_models import FAMILIES, TinyModel, prompts
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

from hillinfer.engine.joined_step import JoinedStep
from hillinfer.errors import CacheUseError, UnsupportedFeatureError

TINY = TinyModel(layers=3)
LENGTHS = (150, 70, 1100, 33)


class RowByRow(TorchFunctionMode):
    """Multiplies a row of the batch at a time, so that products round as they do alone."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear and args[0].ndim >= 3 and len(args[0]) > 1:
            return torch.cat([func(one, *args[1:], **kwargs) for one in args[0].split(1)])
        return func(*args, **kwargs)


@pytest.fixture
def row_by_row():
    with RowByRow():
        yield


def documents(lengths=LENGTHS):
    return [prompts([length], seed=length)[0] for length in lengths]


def read(hill, document):
    cache = hill.new_cache()
    feed(hill.model, cache, document, 256)
    return cache


@torch.no_grad()
def alone(model, cache, ids):
    """Return the logits of tokens given one by one, (tokens, vocabulary)."""
    steps = [model(one, past_key_values=cache).logits[0] for one in ids.split(1, dim=1)]
    return torch.cat(steps)


@torch.no_grad()
def step(hill, caches, ids):
    """Let caches take one token each together; return (caches, vocabulary)."""
    joined = hill.join(caches)
    return hill.model(**joined.inputs(ids)).logits[:, -1]


# Where everything is selected no query decides.
@pytest.mark.parametrize(("alpha", "query"), [(0.2, "true"), (0.2, "predicted"), (1.0, "true")])
def test_every_row_selects_and_answers_as_alone(row_by_row, cold_dir, alpha, query):
    """Bit by bit, where products round alike: so every set of tokens is the same too."""
    turns, _ = prompts([12] * len(LENGTHS), seed=3)
    # Who takes part in each step: they come and go, and change places.
    parts = [(0, 1), (0, 1, 2), (2, 0, 1, 3), (3,), (1, 3), (3, 1, 0, 2)]
    with attached(TINY.build(), cold_dir, alpha=alpha, query=query) as hill:
        expected = []
        for document, turn in zip(documents(), turns, strict=True):
            cache = read(hill, document)
            expected.append(alone(hill.model, cache, turn[None]))
            cache.close()
        caches = [read(hill, document) for document in documents()]
        done, found = [0] * len(caches), [[] for _ in caches]
        for part in parts:
            ids = torch.stack([turns[i, done[i] : done[i] + 1] for i in part])
            for i, logits in zip(part, step(hill, [caches[i] for i in part], ids), strict=True):
                found[i].append(logits)
                done[i] += 1
            # One that goes on by itself in between.
            found[0].append(alone(hill.model, caches[0], turns[:1, done[0] : done[0] + 1])[0])
            done[0] += 1
        assert [len(cache.token_ids[0]) for cache in caches] == [
            length + count for length, count in zip(LENGTHS, done, strict=True)
        ]
        for cache in caches:
            cache.close()
    for own, wanted, count in zip(found, expected, done, strict=True):
        assert torch.equal(torch.stack(own), wanted[:count])
    assert not torch.equal(found[1][0], expected[0][0])


CODED = {"alpha": 0.3, "exact": 0.04, "exact_floor": 20}


@pytest.mark.parametrize("query", ["true", "predicted"])
@pytest.mark.parametrize("place", [{}, {"dram_budget": "2800KiB"}])
def test_rows_with_coded_tokens_answer_as_alone(row_by_row, cold_dir, monkeypatch, query, place):
    """Bit by bit too, in one call a layer: whatever of it was kept as codes, and counted alike."""
    calls = []
    call = JoinedStep._call
    monkeypatch.setattr(
        JoinedStep, "_call", lambda own, layer: calls.append(layer) or call(own, layer)
    )
    lengths, steps = LENGTHS[:3], 4
    turns, _ = prompts([steps] * len(lengths), seed=3)
    with attached(TINY.build(), cold_dir, query=query, **(CODED | place)) as hill:
        expected, counted = [], []
        for document, turn in zip(documents(lengths), turns, strict=True):
            cache = read(hill, document)
            expected.append(alone(hill.model, cache, turn[None]))
            counted.append(coded_counts(cache.statistics()))
            cache.close()
        caches = [read(hill, document) for document in documents(lengths)]
        found = [step(hill, caches, turns[:, i : i + 1]) for i in range(steps)]
        assert [coded_counts(cache.statistics()) for cache in caches] == counted
        # Of the small budget some rows are read, by whichever way.
        assert (hill.statistics().cold_rows_read > 0) is bool(place)
        for cache in caches:
            cache.close()
    assert torch.equal(torch.stack(found, 1), torch.stack(expected))
    assert not torch.equal(found[0][0], expected[0][1])
    assert min(coded for *_, coded in counted) > 0
    assert 0 in calls
    # Where rows are on the drive, predicted queries choose before the layer's turn, each by itself.
    assert len(calls) >= (steps - 1) * TINY.layers or (place and query == "predicted")


def coded_counts(statistics):
    return (*counts(statistics), statistics.coded_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_products_differ_by_rounding_alone(cold_dir, family):
    heads = "mha" if family == "opt" else "gqa"
    turn, _ = prompts([3, 3, 3], seed=5)
    with attached(TinyModel(family, heads).build(), cold_dir, alpha=1.0) as hill:
        caches = [read(hill, document) for document in documents((150, 40, 90))]
        forks = [cache.fork() for cache in caches]
        expected = [
            alone(hill.model, fork, ids[None]) for fork, ids in zip(forks, turn, strict=True)
        ]
        found = torch.stack([step(hill, caches, ids) for ids in turn.split(1, dim=1)], dim=1)
        for cache in (*caches, *forks):
            cache.close()
    assert (found - torch.stack(expected)).abs().max() <= 1e-3


def test_several_tokens_at_once_and_generate(row_by_row, cold_dir):
    question, _ = prompts([9, 9], seed=6)
    with attached(TINY.build(), cold_dir) as hill, torch.no_grad():
        caches = [read(hill, document) for document in documents((150, 70))]
        forks, more = [one.fork() for one in caches], [one.fork() for one in caches]
        expected = [
            hill.model(ids[None], past_key_values=fork).logits[0]
            for fork, ids in zip(forks, question, strict=True)
        ]
        found = hill.model(**hill.join(caches).inputs(question)).logits
        assert torch.equal(found, torch.stack(expected))
        # `generate` takes a padded batch of whole texts, as it does without HillInfer.
        joined = hill.join(more)
        texts = [[*own, *ids.tolist()] for own, ids in zip(joined.token_ids, question, strict=True)]
        longest = max(map(len, texts))
        ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts])
        mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
        # Its chunks: none, so that the question comes in one piece.
        together = run(hill.model, joined, ids, mask, 5, prefill_chunk_size=None)
        for number, (cache, text) in enumerate(zip(caches, texts, strict=True)):
            cache.crop(-9)
            own = run(hill.model, cache, torch.tensor([text]), None, 5, prefill_chunk_size=None)
            assert torch.equal(own.sequences[0, -5:], together.sequences[number, -5:])
        for cache in (*caches, *forks, *more):
            cache.close()


def test_generate_goes_on_from_new_tokens_alone(row_by_row, cold_dir):
    """With a mask of all; caches of different lengths, and tokens that are fewer than that."""
    new, lengths = prompts([4, 4], seed=5)[0], (150, 90)
    mask = torch.cat([prompts(lengths)[1], torch.ones_like(new)], dim=1)
    found = []
    with attached(TINY.build(), cold_dir) as hill:
        for is_joined in (True, False):
            caches = [read(hill, document) for document in documents(lengths)]
            given = [(hill.join(caches), new, mask)] if is_joined else []
            for cache, row, own, length in zip(caches, new, mask, lengths, strict=True):
                given += [] if is_joined else [(cache, row[None], own[None, 150 - length :])]
            for cache, ids, own in given:
                out = run(hill.model, cache, ids, own, prefill_chunk_size=None)
                found.append(torch.stack(out.logits, dim=1))
            for cache in caches:
                cache.close()
    assert torch.equal(found[0], torch.cat(found[1:]))


def test_a_batch_of_several_rows_is_joined_whole(row_by_row, cold_dir):
    ids, mask = prompts([90, 40])
    turn, _ = prompts([2, 2, 2], seed=7)
    with attached(TINY.build(), cold_dir, alpha=1.0) as hill, torch.no_grad():
        pair, single = hill.new_cache(), read(hill, documents((130,))[0])
        hill.model(ids, attention_mask=mask, past_key_values=pair)
        joined = hill.join([pair, single])
        assert joined.batch_size == 3
        given = joined.inputs(turn[:, :1])
        assert given["position_ids"].tolist() == [[90], [40], [130]]
        assert given["attention_mask"].sum(1).tolist() == [91, 41, 131]
        found = hill.model(**given).logits
        longer = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        for cache in (pair, single):
            cache.crop(-1)
        positions = longer.sum(1, keepdim=True) - 1
        expected = hill.model(
            turn[:2, :1], attention_mask=longer, position_ids=positions, past_key_values=pair
        ).logits
        assert torch.equal(found[:2], expected)
        assert torch.equal(found[2], alone(hill.model, single, turn[2:, :1]))
        for cache in (pair, single):
            cache.close()


def test_caches_without_tokens_read_their_prompts_by_themselves(cold_dir):
    texts = [prompts([length], seed=length)[0] for length in (150, 70, 2, 33)]
    ids = torch.zeros(4, 150, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, -text.shape[1] :], mask[row, -text.shape[1] :] = text, 1
    with attached(TINY.build(), cold_dir, alpha=1.0) as hill:
        expected = []
        for text in texts:
            cache = hill.new_cache()
            expected.append(run(hill.model, cache, text, new_tokens=5).sequences[0, -5:])
            cache.close()
        caches = [hill.new_cache() for _ in texts]
        joined = hill.join(caches)
        together = run(hill.model, joined, ids, mask, new_tokens=5)
        assert torch.equal(together.sequences[:, -5:], torch.stack(expected))
        assert not torch.equal(expected[0], expected[1])
        assert [len(row) for row in joined.token_ids] == [154, 74, 6, 37]
        for cache in caches:
            cache.close()
        # A pass of one's own brings each of them as many tokens.
        caches = [hill.new_cache() for _ in range(2)]
        joined = hill.join(caches)
        with torch.no_grad():
            logits = hill.model(**joined.inputs(ids[:2, -60:])).logits
        assert logits.shape[:2] == (2, 60)
        assert [cache.get_seq_length() for cache in caches] == [60, 60]
        for cache in caches:
            cache.close()


def test_a_prompt_beside_one_new_token_is_refused_and_nothing_is_lost(row_by_row, cold_dir):
    """Its last token would select, which alone it does not."""
    model = TINY.build()
    (talk, _), (prompt, _) = prompts([150]), prompts([140], seed=2)
    mask = torch.ones(2, 150, dtype=torch.long)
    mask[1, :10] = 0
    ids = torch.zeros(2, 150, dtype=torch.long)
    ids[0], ids[1, 10:] = talk[0], prompt[0]

    def begun(tokens):
        caches = [hill.new_cache(), hill.new_cache()]
        feed(model, caches[0], talk[:, :-tokens])
        return caches

    with attached(model, cold_dir, alpha=0.1) as hill:
        alone = run(model, hill.new_cache(), prompt, new_tokens=3)
        caches = begun(1)
        with pytest.raises(CacheUseError, match="prompt of 140 tokens"):
            run(model, hill.join(caches), ids, mask, new_tokens=3)
        assert [one.get_seq_length() for one in caches] == [149, 0]
        # As the error says: two new tokens, or the prompt by itself.
        two = run(model, hill.join(begun(2)), ids, mask, new_tokens=3)
        assert torch.equal(two.sequences[1, 10:], alone.sequences[0])
        feed(model, caches[1], prompt[:, :-1])
        expected = [
            run(model, one.fork(), own, new_tokens=3).sequences[0, -3:]
            for one, own in zip(caches, (talk, prompt), strict=True)
        ]
        found = run(model, hill.join(caches), ids, mask, new_tokens=3)
        assert torch.equal(found.sequences[:, -3:], torch.stack(expected))


def test_a_step_that_breaks_off_leaves_every_cache_as_it_was(row_by_row, cold_dir):
    turn, _ = prompts([1, 1, 1], seed=8)
    with attached(TINY.build(), cold_dir, alpha=0.3) as hill:
        caches = [read(hill, document) for document in documents((150, 70, 40))]
        forks = [cache.fork() for cache in caches]
        expected = step(hill, forks, turn)

        def strike(*_):
            raise KeyboardInterrupt

        hook = hill.model.model.layers[1].register_forward_hook(strike)
        with pytest.raises(KeyboardInterrupt):
            step(hill, caches, turn)
        hook.remove()
        assert [cache.get_seq_length() for cache in caches] == [150, 70, 40]
        one = alone(hill.model, caches[1], turn[1:2])[-1]
        assert torch.equal(one, expected[1])
        caches[1].crop(-1)
        assert torch.equal(step(hill, caches, turn), expected)
        for cache in (*caches, *forks):
            cache.close()


def test_loaded_sessions_and_new_caches_take_steps_together(row_by_row, cold_dir, tmp_path):
    turn, _ = prompts([2] * 3, seed=3)
    with attached(TINY.build(), cold_dir) as hill:
        caches = [read(hill, document) for document in documents((1100, 70, 150))]
        caches[0].save_session(tmp_path / "first")
        caches[1].save_session(tmp_path / "second")
        expected = [
            alone(hill.model, one.fork(), ids[None]) for one, ids in zip(caches, turn, strict=True)
        ]
        for number, name in enumerate(("first", "second")):
            caches[number].close()
            caches[number] = hill.load_session(tmp_path / name)
        found = torch.stack([step(hill, caches, ids) for ids in turn.split(1, dim=1)], dim=1)
        assert torch.equal(found, torch.stack(expected))
        assert not torch.equal(found[0], found[1])
        for cache in caches:
            cache.close()


def test_what_cannot_be_joined_is_named(cold_dir):
    first, second = documents((80, 40))
    with attached(TINY.build(), cold_dir) as hill, attached(TINY.build(), cold_dir) as other:
        cache, strange = read(hill, first), read(other, second)
        fork = cache.fork()
        for given, message in [
            ([], "no caches were given"),
            ([cache, cache], "cache 1 is there twice: join cache.fork()"),
            (
                [cache, strange],
                r"cache 1 and cache 0 belong to two engines .*: <HillInferCache of 40 tokens, made "
                r"for LlamaForCausalLM> \(open caches of its engine: 1\), <HillInferCache of 80 "
                r"tokens, .*> \(2\): join caches of one attachment",
            ),
            ([cache, DynamicCache(config=hill.model.config)], "cache 1 is DynamicCache"),
        ]:
            with pytest.raises(CacheUseError, match=message):
                hill.join(given)
        for one in (cache, fork, strange):
            one.close()


def test_caches_of_a_model_that_was_attached_again_are_named(cold_dir):
    model = TINY.build()
    first, second = documents((80, 40))
    with attached(model, cold_dir) as hill:
        old = read(hill, first)
    with attached(model, cold_dir) as hill:
        new = read(hill, second)
        with pytest.raises(CacheUseError, match=r"two engines .*or was attached again"):
            hill.join([old, new])
        # The old one goes on all the same.
        assert hill.join([old]).batch_size == 1
        new.close()
    old.close()


def test_a_joined_batch_that_is_misused_is_told_so_and_goes_on(row_by_row, cold_dir):
    turn, _ = prompts([2, 2], seed=9)
    with attached(TINY.build(), cold_dir) as hill, torch.no_grad():
        caches = [read(hill, document) for document in documents((80, 40))]
        joined, model = hill.join(caches), hill.model
        with pytest.raises(CacheUseError, match=r"call the model with \*\*joined\.inputs"):
            model(turn[:, :1], past_key_values=joined)
        given = joined.inputs(turn[:, :1])
        for wrong in (None, given["position_ids"] + 1, given["position_ids"].flip(0)):
            with pytest.raises(CacheUseError, match=r"begin at positions \[80, 40\].*begin at"):
                model(**given | {"position_ids": wrong})
        with pytest.raises(CacheUseError, match="hold 2 rows but 1 were given"):
            model(turn[:1, :1], past_key_values=joined)
        for refused in (
            joined.reset,
            lambda: joined.crop(-1),
            lambda: joined.reorder_cache(torch.tensor([1, 0])),
            lambda: joined.batch_repeat_interleave(2),
            lambda: joined.batch_select_indices(torch.tensor([0])),
        ):
            with pytest.raises(UnsupportedFeatureError, match="do it with each cache"):
                refused()
        forks = [cache.fork() for cache in caches]
        expected = [
            alone(model, fork, ids[None, :1]) for fork, ids in zip(forks, turn, strict=True)
        ]
        assert torch.equal(model(**given).logits, torch.stack(expected))
        assert joined.statistics().scored_tokens == (81 + 41) * TINY.layers
        # Of its fork, alone, and of the step together.
        assert caches[0].statistics().scored_tokens == 2 * 81 * TINY.layers
        assert hill.statistics().scored_tokens == 2 * (81 + 41) * TINY.layers
        caches[1].close()
        with pytest.raises(CacheUseError, match="this cache is closed"):
            model(**joined.inputs(turn[:, 1:]))
        assert caches[0].get_seq_length() == 81
        for cache in (caches[0], *forks):
            cache.close()


# --- what caches count of steps together ----------------------------------------------------

# The last one fills a group on its way.
COUNTED_LENGTHS = (150, 1100, 62)
# Rows of 1 KiB, of which the budget holds most.
WIDE, MOST_ROWS = TinyModel(heads="mha", head_dim=64, layers=3), "7MiB"
# Counted where rows are, so that the shares of all caches are all there is.
SHARED = (
    "scored_tokens", "selected_tokens", "hot_rows_read", "cold_rows_read", "promoted_rows",
    "demoted_rows", "cold_reads", "cold_read_bytes", "cold_useful_bytes", "cold_write_bytes",
)  # fmt: skip


def counts(statistics):
    """Return what a cache counts whoever is beside it: which rows are hot depends on all."""
    rows = statistics.hot_rows_read + statistics.cold_rows_read
    return statistics.scored_tokens, statistics.selected_tokens, rows


def counted_together(hill, turns, parts):
    """Let caches take steps together; return the statistics of each, and those of all."""
    caches = [read(hill, document) for document in documents(COUNTED_LENGTHS)]
    done = [0] * len(caches)
    for part in parts:
        ids = torch.stack([turns[i, done[i] : done[i] + 1] for i in part])
        step(hill, [caches[i] for i in part], ids)
        for i in part:
            done[i] += 1
    found = [cache.statistics() for cache in caches], hill.statistics()
    for cache in caches:
        cache.close()
    return found


@pytest.mark.parametrize("query", ["true", "predicted"])
def test_each_cache_counts_its_own_rows_of_steps_together(cold_dir, query):
    turns, _ = prompts([5] * len(COUNTED_LENGTHS), seed=10)
    everyone = (0, 1, 2)
    with attached(WIDE.build(), cold_dir, query=query, dram_budget=MOST_ROWS) as hill:
        expected = []
        for document, turn in zip(documents(COUNTED_LENGTHS), turns, strict=True):
            cache = read(hill, document)
            alone(hill.model, cache, turn[None])
            expected.append(counts(cache.statistics()))
            cache.close()
        # They change places, and the last step is of one alone.
        parts = [everyone, (2, 0, 1), everyone, (1, 2, 0), (1, 0), (2,)]
        own, whole = counted_together(hill, turns, parts)
        assert [counts(one) for one in own] == expected
        assert whole.cold_rows_read > 0
        assert whole.promoted_rows > 0
        for name in SHARED:
            assert sum(getattr(one, name) for one in own) == getattr(whole, name), name
        assert min(rate for one in own for rate in one.layer_hit_rates) < 1
        # The twin: one that leaves a step out counts less, and nobody else does.
        own, _ = counted_together(hill, turns, [*parts[:4], (0,), (2,)])
        assert [counts(one) == wanted for one, wanted in zip(own, expected, strict=True)] == [
            True,
            False,
            True,
        ]
