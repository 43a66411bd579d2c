# SPDX-License-Identifier: Apache-2.0
"""Hand-written loops, second turns and prefill chunks: many ways to the same tokens."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from generation_runs import LOGIT_TOLERANCE, attached, bits, logits, ordinary, run
from tiny_models import TinyModel, prompts

TINY = TinyModel()
IDS, _ = prompts([150])
CHUNKS = (64, None)


@torch.no_grad()
def written_by_hand(model, cache, ids, new_tokens, chunk):
    tokens, steps = [], []
    for part in torch.split(ids, chunk, dim=1):
        out = model(input_ids=part, past_key_values=cache, logits_to_keep=1)
    while True:
        steps.append(out.logits[:, -1])
        tokens.append(steps[-1].argmax(-1, keepdim=True))
        if len(tokens) == new_tokens:
            return torch.cat([ids, *tokens], dim=1), torch.stack(steps)
        out = model(input_ids=tokens[-1], past_key_values=cache, logits_to_keep=1)


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_a_loop_written_by_hand_is_generate(alpha, cold_dir):
    model = TINY.build()
    with attached(model, cold_dir, alpha=alpha) as hill:
        first, second = hill.new_cache(), hill.new_cache()
        expected = run(model, first, IDS)
        sequences, steps = written_by_hand(model, second, IDS, 10, 64)
        assert second.get_seq_length() == first.get_seq_length() == 150 + 10 - 1
        first.close()
        second.close()
    assert torch.equal(sequences, expected.sequences)
    assert torch.equal(steps.view(torch.int32), bits(expected))


def test_positional_arguments_are_understood(cold_dir):
    """A mask given by position must not be overlooked: padding would count as tokens."""
    model = TINY.build()
    ids, mask = prompts([60, 25])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with attached(model, cold_dir) as hill, torch.no_grad():
        caches = [hill.new_cache() for _ in range(3)]
        expected = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=caches[0]
        )
        found = model(ids, mask, positions, caches[1])
        mixed = model(ids, mask, positions, past_key_values=caches[2])
        for cache in caches:
            cache.close()
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(mixed.logits, expected.logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_in_one_piece_or_in_chunks(dtype, cold_dir):
    model = TinyModel(dtype=dtype).build()
    with attached(model, cold_dir, alpha=1.0) as hill:
        outputs = []
        for chunk in (None, 32, 50):
            cache = hill.new_cache()
            outputs.append(run(model, cache, IDS, prefill_chunk_size=chunk))
            cache.close()
    for output in outputs[1:]:
        assert torch.equal(output.sequences, outputs[0].sequences)
        difference = logits(output) - logits(outputs[0])
        assert difference.abs().max() <= LOGIT_TOLERANCE[dtype]


@pytest.mark.parametrize("first_chunk", CHUNKS)
@pytest.mark.parametrize("second_chunk", CHUNKS)
@pytest.mark.parametrize("only_new_ids", [False, True])
def test_a_second_turn_goes_on_where_the_first_ended(
    first_chunk, second_chunk, only_new_ids, cold_dir
):
    model = TINY.build()
    question, _ = prompts([70], seed=5)
    with attached(model, cold_dir, alpha=1.0) as hill:
        cache = hill.new_cache()
        answer = run(model, cache, IDS, prefill_chunk_size=first_chunk).sequences
        conversation = torch.cat([answer, question], dim=1)
        given = conversation[:, cache.get_seq_length() :] if only_new_ids else conversation
        found = run(
            model,
            cache,
            given,
            torch.ones_like(conversation),
            prefill_chunk_size=second_chunk,
        )
        cache.close()
    expected = ordinary(model, conversation)
    new = found.sequences[:, given.shape[1] :]
    assert torch.equal(new, expected.sequences[:, conversation.shape[1] :])
    assert (logits(found) - logits(expected)).abs().max() <= LOGIT_TOLERANCE[TINY.dtype]


def test_a_second_turn_of_a_padded_batch(cold_dir):
    model = TINY.build()
    ids, mask = prompts([130, 75, 20])
    question, _ = prompts([40, 40, 40], seed=6)
    with attached(model, cold_dir, alpha=1.0) as hill:
        cache = hill.new_cache()
        answer = run(model, cache, ids, mask).sequences
        conversation = torch.cat([answer, question], dim=1)
        new_mask = conversation.new_ones(3, conversation.shape[1] - 130)
        longer_mask = torch.cat([mask, new_mask], dim=1)
        found = run(model, cache, conversation, longer_mask)
        cache.close()
    expected = ordinary(model, conversation, longer_mask)
    assert torch.equal(found.sequences, expected.sequences)
    assert (logits(found) - logits(expected)).abs().max() <= LOGIT_TOLERANCE[TINY.dtype]


def test_padding_that_generate_finds_by_itself(cold_dir):
    """Ids with padding and no mask: transformers makes the mask from the padding token."""
    model = TINY.build()
    ids, mask = prompts([60, 35])
    question, _ = prompts([20, 20], seed=6)
    with attached(model, cold_dir, alpha=1.0) as hill:
        cache = hill.new_cache()
        answer = run(model, cache, ids).sequences
        conversation = torch.cat([answer, question], dim=1)
        found = run(model, cache, conversation)
        cache.close()
    longer_mask = torch.cat([mask, mask.new_ones(2, 30)], dim=1)
    expected = ordinary(model, conversation, longer_mask)
    assert torch.equal(found.sequences, expected.sequences)


def test_two_threads_with_a_cache_each_on_one_model(cold_dir):
    model = TINY.build()
    texts = [prompts([150], seed)[0] for seed in (1, 2)]

    def one(hill, ids):
        torch.set_num_threads(1)
        cache = hill.new_cache()
        output = run(model, cache, ids)
        cache.close()
        return bits(output)

    with attached(model, cold_dir) as hill:
        alone = [one(hill, ids) for ids in texts]
        with ThreadPoolExecutor(2) as pool:
            together = list(pool.map(one, [hill, hill], texts))
    assert not torch.equal(alone[0], alone[1])
    for expected, found in zip(alone, together, strict=True):
        assert torch.equal(found, expected)
