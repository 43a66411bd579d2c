# SPDX-License-Identifier: Apache-2.0
"""Batches with left padding: every sequence is served as if it were alone."""

import pytest
import torch
from generation_runs import (
    LOGIT_TOLERANCE,
    SETTINGS,
    SelectionLog,
    attached,
    logits,
    ordinary,
    run,
)
from tiny_models import TinyModel, prompts

from hillinfer.errors import CacheUseError
from hillinfer_model.selection import selected_count

TINY = TinyModel()
# With chunks of 64 the two short ones have chunks that are padding from end to end.
LENGTHS = [150, 90, 33, 5]
KEPT = SETTINGS["kept_sinks"] + SETTINGS["kept_recent"]


@pytest.mark.parametrize("scope", ["layer", "kv_head"])
def test_each_sequence_gets_the_tokens_and_sets_it_gets_alone(scope, cold_dir):
    model = TINY.build()
    ids, mask = prompts(LENGTHS)

    def answered(*prompt):
        log = SelectionLog()
        with log.attached(model, cold_dir, scope=scope) as hill:
            cache = hill.new_cache()
            output = run(model, cache, *prompt)
            cache.close()
        return output, log

    found, together = answered(ids, mask)
    for number, length in enumerate(LENGTHS):
        expected, alone = answered(ids[number : number + 1, -length:])
        own = together.sets[number :: len(LENGTHS)]
        difference = logits(found)[:, number] - logits(expected)[:, 0]
        assert difference.abs().max() < LOGIT_TOLERANCE[TINY.dtype]
        assert torch.equal(found.sequences[number, 150:], expected.sequences[0, length:])
        assert together.lengths[number :: len(LENGTHS)] == alone.lengths
        # Batch size may change the last bit of a key and so, rarely, a neighbour in rank.
        apart = [
            set(mine) ^ set(others)
            for ours, theirs in zip(own, alone.sets, strict=True)
            for mine, others in zip(ours, theirs, strict=True)
        ]
        assert sum(len(one) for one in apart) <= len(apart) // 10


def test_the_share_selected_follows_each_sequences_own_length(cold_dir):
    model = TINY.build()
    ids, mask = prompts(LENGTHS)
    log = SelectionLog()
    with log.attached(model, cold_dir, alpha=0.3) as hill:
        cache = hill.new_cache()
        run(model, cache, ids, mask, new_tokens=4)
        cache.close()
    steps = range(3)
    expected = [length + 1 + step for step in steps for _ in range(2) for length in LENGTHS]
    assert log.lengths == expected
    for sets, length in zip(log.sets, log.lengths, strict=True):
        assert [len(one) for one in sets] == [selected_count(length, 0.3, KEPT, None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("chunk", [64, 16, None])
def test_a_padded_batch_equals_the_ordinary_cache_when_everything_is_selected(
    family, chunk, dtype, cold_dir
):
    model = TinyModel(family, "mha" if family == "opt" else "gqa", dtype).build()
    ids, mask = prompts(LENGTHS)
    with attached(model, cold_dir, alpha=1.0) as hill:
        cache = hill.new_cache()
        found = run(model, cache, ids, mask, new_tokens=3, prefill_chunk_size=chunk)
        cache.close()
    expected = ordinary(model, ids, mask, new_tokens=3, prefill_chunk_size=chunk)
    # Up to where rounding first chose another token, logits must agree.
    same = (found.sequences == expected.sequences).all(0)[150:]
    steps = int(same.cumprod(0).sum())
    assert steps >= 1
    difference = (logits(found) - logits(expected))[: steps + 1]
    assert difference.abs().max() <= LOGIT_TOLERANCE[dtype]
    assert dtype == torch.bfloat16 or steps == 3


def test_a_padded_prompt_needs_its_mask_at_every_step(cold_dir):
    model = TINY.build()
    ids, mask = prompts([40, 20])
    with attached(model, cold_dir) as hill, torch.no_grad():
        cache = hill.new_cache()
        model(ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(CacheUseError, match="every forward pass needs the full attention mask"):
            model(ids[:, :1], past_key_values=cache)
        cache.close()


def test_padding_may_not_change_later(cold_dir):
    model = TINY.build()
    ids, mask = prompts([40, 20])
    longer = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
    longer[1, :25] = 0
    with attached(model, cold_dir) as hill, torch.no_grad():
        cache = hill.new_cache()
        model(ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(CacheUseError, match="sequence 1 was padded by 20 tokens, now by 25"):
            model(ids[:, :1], attention_mask=longer, past_key_values=cache)
        cache.close()


def test_padding_of_a_row_without_tokens_may_grow_but_not_become_tokens(cold_dir):
    """What the cache was not given cannot be attended to."""
    model = TINY.build()
    ids, mask = prompts([40, 15])
    forgotten = mask.clone()
    forgotten[1, 10:] = 1
    with attached(model, cold_dir) as hill, torch.no_grad():
        cache = hill.new_cache()
        model(ids[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
        with pytest.raises(CacheUseError, match="sequence 1 was padded by 20 tokens, now by 10"):
            model(ids[:, 20:], attention_mask=forgotten, past_key_values=cache)
        model(ids[:, 20:], attention_mask=mask, past_key_values=cache)
        assert [len(row) for row in cache.token_ids] == [40, 15]
        cache.close()


def test_generate_goes_on_where_a_row_of_the_cache_has_no_tokens_yet(cold_dir):
    model = TINY.build()
    ids, mask = prompts([40, 15])
    with attached(model, cold_dir) as hill, torch.no_grad():

        def answered(known, padding):
            cache = hill.new_cache()
            if known:
                model(ids[:, :known], attention_mask=mask[:, :known], past_key_values=cache)
            given = {"attention_mask": padding, "past_key_values": cache}
            try:
                out = model.generate(ids, **given, do_sample=False, max_new_tokens=4)
                return out, [len(row) for row in cache.token_ids]
            finally:
                cache.close()

        whole, lengths = answered(0, mask)
        for known in (20, 25):
            out, held = answered(known, mask)
            assert torch.equal(out, whole)
            assert held == lengths == [43, 18]
        # The twin: padding that would have become tokens, and tokens that would be lost.
        for known, pad in ((20, 10), (30, 35)):
            other = mask.clone()
            other[1] = torch.arange(40) >= pad
            with pytest.raises(CacheUseError, match=r"what the cache holds \(sequence 1\)"):
                answered(known, other)
