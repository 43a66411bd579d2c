# SPDX-License-Identifier: Apache-2.0
"""Sampling, beams and several answers to one prompt."""

import pytest
import torch
from generation_runs import attached, logits, ordinary, run
from tiny_models import TinyModel, prompts

TINY = TinyModel()
IDS, _ = prompts([150])
ROW_BYTES = 2 * 64  # Layers, bytes of a row of one layer.
GROUP_BYTES = 64 * ROW_BYTES


def test_seeded_sampling_equals_the_ordinary_cache(cold_dir):
    model = TINY.build()
    options = {"do_sample": True, "temperature": 1.5, "top_k": 20, "new_tokens": 20}
    with attached(model, cold_dir, alpha=1.0) as hill:
        cache = hill.new_cache()
        torch.manual_seed(11)
        found = run(model, cache, IDS, **options)
        cache.close()
    torch.manual_seed(11)
    expected = ordinary(model, IDS, **options)
    assert torch.equal(found.sequences, expected.sequences)
    torch.manual_seed(12)
    assert not torch.equal(found.sequences, ordinary(model, IDS, **options).sequences)


@pytest.mark.parametrize(
    ("family", "chunk", "lengths"),
    # Behind 70 tokens two beams lie closer than attention rounds.
    [("llama", 64, [150]), ("opt", None, [150]), ("llama", None, [150, 71])],
    ids=str,
)
def test_beams_equal_the_ordinary_cache(family, chunk, lengths, cold_dir):
    model = TinyModel(family, "mha" if family == "opt" else "gqa").build()
    ids, mask = prompts(lengths)
    options = {
        "num_beams": 3,
        "num_return_sequences": 2,
        "prefill_chunk_size": chunk,
        "new_tokens": 12,
        "output_scores": True,
    }
    with attached(model, cold_dir, alpha=1.0) as hill:
        cache = hill.new_cache()
        found = run(model, cache, ids, mask, **options)
        cache.close()
    expected = ordinary(model, ids, mask, **options)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(
        found.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    "options", [{"num_beams": 4}, {"do_sample": True}], ids=["beams", "samples"]
)
def test_identical_prompts_are_stored_once(options, cold_dir):
    model = TINY.build()
    with attached(model, cold_dir) as hill:
        cache = hill.new_cache()
        # 150 prompt tokens fill two groups; ten more stay in the open one.
        run(model, cache, IDS, num_return_sequences=4, new_tokens=10, **options)
        assert cache.batch_size == 4
        assert cache.statistics().cold_write_bytes == 2 * GROUP_BYTES
        # What parted lies in open groups: 159 tokens less two groups.
        open_bytes = cache.statistics().kv_bytes - 2 * GROUP_BYTES
        assert open_bytes in [apart * (159 - 128) * ROW_BYTES for apart in (1, 2, 3, 4)]
        cache.close()


def test_answers_that_part_write_their_own_rows_only(cold_dir):
    model = TINY.build()
    with attached(model, cold_dir) as hill:
        cache = hill.new_cache()
        torch.manual_seed(0)
        output = run(model, cache, IDS, num_return_sequences=3, do_sample=True, new_tokens=56)
        # 205 stored tokens are three full groups each; two of them hold nothing but the prompt.
        assert len({tuple(row[:170].tolist()) for row in output.sequences}) == 3
        assert cache.statistics().cold_write_bytes == (2 + 3) * GROUP_BYTES
        cache.close()


def test_a_batch_that_shares_a_beginning_stores_it_once(cold_dir):
    model = TINY.build()
    ids = IDS.repeat(2, 1)
    ids[1, 140:] = ids[1, 140:].flip(0)
    with attached(model, cold_dir, alpha=1.0) as hill:
        cache = hill.new_cache()
        found = run(model, cache, ids)
        assert cache.statistics().cold_write_bytes == 2 * GROUP_BYTES
        cache.close()
    assert torch.equal(found.sequences, ordinary(model, ids).sequences)


def test_copies_made_by_hand_can_answer_together(cold_dir):
    """The recipe of transformers for several answers to a prompt that was read before."""
    model = TINY.build()
    with attached(model, cold_dir, alpha=1.0) as hill:
        cache = hill.new_cache()
        with torch.no_grad():
            model(IDS[:, :-1], past_key_values=cache, logits_to_keep=1)
        cache.batch_repeat_interleave(3)
        torch.manual_seed(4)
        found = run(model, cache, IDS, do_sample=True, num_return_sequences=3)
        cache.close()
    torch.manual_seed(4)
    expected = ordinary(model, IDS, do_sample=True, num_return_sequences=3)
    assert torch.equal(found.sequences, expected.sequences)
    assert (logits(found) - logits(expected)).abs().max() < 1e-3


@pytest.mark.parametrize("masked", [True, False], ids=["with a mask", "padding found"])
def test_copies_of_a_padded_batch_keep_their_padding(masked, cold_dir):
    model = TINY.build()
    ids, mask = prompts([60, 35, 50])
    with attached(model, cold_dir, alpha=1.0) as hill:
        cache = hill.new_cache()
        talk = run(model, cache, ids, mask, new_tokens=2).sequences
        cache.batch_repeat_interleave(2)
        longer = torch.cat([mask, mask.new_ones(3, 2)], dim=1)
        copies = {"do_sample": True, "top_k": 1, "num_return_sequences": 2}
        found = run(model, cache, talk, longer if masked else None, **copies)
        cache.close()
    expected = ordinary(model, talk, longer)
    assert torch.equal(found.sequences, expected.sequences.repeat_interleave(2, dim=0))
