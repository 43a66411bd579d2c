# SPDX-License-Identifier: Apache-2.0
"""The loop of forward calls gives what `generate` gives, on either cache."""

import pytest
import torch
from tiny_models import TinyModel
from transformers import DynamicCache

import hillinfer
from hillinfer.errors import CacheUseError, SettingsError
from hillinfer.generate.answering import Generation
from hillinfer.generate.tokens import Sampling, TokenChooser

IDS = [5 + i * i % 50 for i in range(150)]
GREEDY = Sampling()


@pytest.fixture
def model():
    return TinyModel().build()


def decoded(generation, count=20, sampling=GREEDY, stop_ids=frozenset()):
    return list(generation.decode(sampling, count, stop_ids))


def generated(model, cache, count=20, **options):
    out = model.generate(
        torch.tensor([IDS]), past_key_values=cache, max_new_tokens=count, do_sample=False, **options
    )
    return out[0, len(IDS) :].tolist()


def test_ordinary_cache(model):
    generation = Generation(model, DynamicCache(config=model.config), 64)
    generation.read(IDS)
    assert decoded(generation) == generated(
        model, DynamicCache(config=model.config), prefill_chunk_size=64
    )
    assert generation.statistics() is None


def test_hillinfer_cache(model, cold_dir):
    with hillinfer.attach(model, alpha=0.3, dram_budget="64MiB", cold_dir=cold_dir) as attachment:
        generation = Generation(model, attachment.new_cache(), 64)
        generation.read(IDS)
        tokens = decoded(generation)
        assert tokens == generated(model, attachment.new_cache(), prefill_chunk_size=64)
        assert generation.statistics().selected_tokens > 0
        # As after generate, everything but the last token is in the cache.
        assert generation.cache.get_seq_length() == len(IDS) + len(tokens) - 1
        generation.close()


@pytest.mark.parametrize("kind", ["hillinfer", "ordinary"])
def test_forks_go_on_by_themselves(model, cold_dir, kind):
    with hillinfer.attach(model, alpha=0.3, dram_budget="64MiB", cold_dir=cold_dir) as attachment:

        def cache():
            if kind == "hillinfer":
                return attachment.new_cache()
            return DynamicCache(config=model.config)

        def alone(question):
            generation = Generation(model, cache(), 64)
            generation.read(IDS)
            generation.read(question)
            return decoded(generation)

        document = Generation(model, cache(), 64)
        document.read(IDS)
        questions = ([7, 8, 9], [9, 30])
        forks = [document.fork() for _ in questions]
        for fork, question in zip(forks, questions, strict=True):
            fork.read(question)
        answers = [decoded(fork) for fork in forks]
        assert answers == [alone(question) for question in questions]
        assert answers[0] != answers[1]
        # The document itself was not touched by its forks.
        document.read(questions[0])
        assert decoded(document) == answers[0]


def test_progress_counts_tokens(model):
    seen = []
    generation = Generation(model, DynamicCache(config=model.config), 64)
    generation.read(IDS, seen.append)
    assert seen == [64, 128, 150]
    generation.read_singly([4, 5], seen.append)
    assert seen[3:] == [1, 2]
    assert generation.cache.get_seq_length() == 152


def test_stops_at_a_stop_token_which_is_given_too(model):
    generation = Generation(model, DynamicCache(config=model.config))
    generation.read(IDS)
    tokens = decoded(generation.fork())
    stop = tokens[5]
    first = tokens.index(stop)
    assert decoded(generation.fork(), stop_ids=frozenset({stop})) == tokens[: first + 1]
    assert decoded(generation, count=3) == tokens[:3]


def test_decoding_before_reading_is_refused(model):
    with pytest.raises(CacheUseError, match=r"call read\(\) with the prompt first"):
        decoded(Generation(model, DynamicCache(config=model.config)))
    with pytest.raises(SettingsError, match="prefill_chunk=0"):
        Generation(model, DynamicCache(config=model.config), 0)


def test_sampling_draws_what_transformers_would(model):
    sampling = Sampling(temperature=1.3, top_k=20, top_p=0.9, seed=5)
    generation = Generation(model, DynamicCache(config=model.config), 64)
    generation.read(IDS)
    torch.manual_seed(5)
    expected = model.generate(
        torch.tensor([IDS]),
        past_key_values=DynamicCache(config=model.config),
        prefill_chunk_size=64,
        max_new_tokens=20,
        do_sample=True,
        temperature=1.3,
        top_k=20,
        top_p=0.9,
    )
    assert decoded(generation, sampling=sampling) == expected[0, len(IDS) :].tolist()


def test_chooser_keeps_to_top_k():
    logits = torch.zeros(50)
    logits[[3, 17]] = 2.0
    chooser = TokenChooser(Sampling(temperature=3.0, top_k=2, seed=1), torch.device("cpu"))
    drawn = {chooser.choose(logits) for _ in range(60)}
    assert drawn == {3, 17}
    chooser = TokenChooser(Sampling(temperature=3.0, seed=1), torch.device("cpu"))
    assert len({chooser.choose(logits) for _ in range(60)}) > 10
