# SPDX-License-Identifier: Apache-2.0
"""Where a store is named, every prompt of an attached model is looked up in it and stored."""

import copy
import os
import time

import pytest
import torch
from generation_runs import attached, bits, run
from stored_ways import NEW_TOKENS, WAYS, ids_of
from tiny_models import FAMILIES, TinyModel, prompts
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

import hillinfer
from hillinfer.drive.calls import DriveCalls
from hillinfer.errors import SettingsError
from hillinfer.generate.answering import Generation
from hillinfer.generate.tokens import Sampling
from hillinfer.native.library import Variant, native_library
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.secrecy.key_sources import KeyFile, PassphraseFile
from hillinfer.secrecy.library import SecrecyError
from hillinfer.store.keys import Reuse
from hillinfer.store.maintenance import chains
from hillinfer.store.pool_files import StoreError
from hillinfer.store.store import Store

MIB = 1 << 20

# What a way finds of its prompts of 150 tokens, where it is not 128.
FOUND = {
    # Behind 128 the last pass of 21 tokens would be one of a single token: it would select.
    "chunks that end oddly": 64,
    # Of three rows, one is padded by 60 and stored to its 64th token, column 124.
    "padded batch": 124 + 64 + 124,
    "padded batch in chunks": 124 + 64 + 124,
    "joined batch": 128 + 64 + 128,
}


@pytest.fixture
def place(tmp_path):
    Store.create(tmp_path / "store", 64 * MIB)
    return tmp_path / "store"


@pytest.fixture
def store(place):
    with Store(place) as opened:
        yield opened


class Struck(TorchFunctionMode):
    """Ctrl-C at the first product."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def tiny(family="llama", **changes):
    return TinyModel(family, **({"heads": "mha"} if family == "opt" else {}) | changes)


def held(store, model, ids, **changes):
    """Return how many tokens of a prompt a store holds."""
    found = store.find(StoredPrompts(store, model, **changes).namespace, ids)
    if found is None:
        return 0
    with found:
        return found.tokens


def test_a_directory_that_is_encrypted_takes_the_key_that_a_variable_names(
    tmp_path, cold_dir, monkeypatch
):
    key, place = KeyFile(tmp_path / "key"), tmp_path / "sealed"
    Store.create(place, 64 * MIB, key=key)
    model = tiny().build()
    with pytest.raises(SecrecyError, match="--key-file"), attached(model, cold_dir, store=place):
        pass
    PassphraseFile(tmp_path / "words").path.write_text("not the key")
    (tmp_path / "words").chmod(0o600)
    monkeypatch.setenv("HILLINFER_STORE_PASSPHRASE_FILE", str(tmp_path / "words"))
    with pytest.raises(SecrecyError), attached(model, cold_dir, store=place):
        pass
    monkeypatch.delenv("HILLINFER_STORE_PASSPHRASE_FILE")
    monkeypatch.setenv("HILLINFER_STORE_KEY_FILE", str(key.path))
    with attached(model, cold_dir, store=place) as hill:
        first, again = WAYS["generate"](hill), WAYS["generate"](hill)
    assert (first.found, again.found) == (0, 128)
    assert torch.equal(first.tokens, again.tokens)


# A way differs by what it passes to a model, and so does OPT, which has positions of its own: all
# ways meet one family of each kind. Of the others each way meets one.
ROTATED = ("mistral", "qwen2", "qwen3")
FAMILIES_AND_WAYS = [
    pytest.param(family, way, id=f"{family}-{way}")
    for at, way in enumerate(WAYS)
    for family in ("llama", "opt", ROTATED[at % len(ROTATED)])
]


@pytest.fixture(scope="module")
def models():
    """One of each family, for tests that leave it as it is."""
    return {family: tiny(family).build() for family in FAMILIES}


@pytest.fixture(scope="module")
def changed_answers(models, tmp_path_factory):
    """What each family answers to another prompt."""
    said = {}
    for family, model in models.items():
        with attached(model, tmp_path_factory.mktemp("changed")) as hill:
            cache = hill.new_cache()
            out = run(model, cache, ids_of(seed=9), new_tokens=NEW_TOKENS)
            said[family] = out.sequences[0, 150:]
            cache.close()
    return said


@pytest.mark.parametrize(("family", "way"), FAMILIES_AND_WAYS)
def test_every_way_answers_alike_and_finds_what_it_stored(
    store, cold_dir, family, way, models, changed_answers
):
    model = models[family]
    with attached(model, cold_dir) as hill:
        plain = WAYS[way](hill)
    assert plain.found == 0
    with attached(model, cold_dir, store=store) as hill:
        first = WAYS[way](hill)
        again = WAYS[way](hill)
    # Rows that begin alike take what the first of them stored.
    assert first.found == (128 if way == "joined batch" else 0)
    assert again.found == FOUND.get(way, 128)
    assert first.failures == again.failures == []
    for other in (first, again):
        assert torch.equal(other.tokens, plain.tokens)
    # The twin: another prompt has another answer.
    assert not torch.equal(changed_answers[family], plain.tokens[0])


@pytest.mark.parametrize("chunk", [128, 96, 320])
def test_exact_has_the_bits_of_an_unbroken_run(store, cold_dir, chunk):
    """96 and 320 divide no chunk of the store (1,024 tokens), and 96 is a group and a half."""
    model, ids = tiny().build(), ids_of(1300)
    border = {128: 1280, 96: 1152, 320: 1280}[chunk]

    def answered(hill, ids):
        cache = hill.new_cache()
        out = run(model, cache, ids, new_tokens=4, prefill_chunk_size=chunk)
        told = cache.read_from_store
        cache.close()
        return bits(out), 0 if told is None else told.found_tokens

    longer = torch.cat([ids, ids_of(340, seed=4)], dim=1)
    with attached(model, cold_dir) as hill:
        plain, _ = answered(hill, ids)
        plain_longer, _ = answered(hill, longer)
    with attached(model, cold_dir, store=store, reuse="exact") as hill:
        assert answered(hill, ids)[1] == 0
        assert held(store, model, ids[0].tolist()) == 0
        found, count = answered(hill, ids)
        assert count == border
        assert torch.equal(found, plain)
        # What came behind the border in the shorter prompt is not the longer one's.
        found, count = answered(hill, longer)
        assert count == border
        assert torch.equal(found, plain_longer)
        found, count = answered(hill, longer)
        assert count > border
        assert torch.equal(found, plain_longer)
        flipped = found.clone()
        flipped[0, 0, 7] ^= 1
        assert not torch.equal(flipped, plain_longer)


def test_exact_goes_back_to_a_border_where_the_second_chunk_is_wrong(store, cold_dir):
    model, ids = tiny(head_dim=32).build(), ids_of(2000)

    def answered(hill):
        cache = hill.new_cache()
        out = run(model, cache, ids, new_tokens=4, prefill_chunk_size=640)
        told = cache.read_from_store
        cache.close()
        return bits(out), told

    with attached(model, cold_dir) as hill:
        plain, _ = answered(hill)
    with attached(model, cold_dir, store=store, reuse="exact") as hill:
        answered(hill)
        # As an unbroken pass of 1,920 tokens left them: of three chunks of 640.
        path, _ = store.places.files[0]
        _, told = answered(hill)
        assert told.found_tokens == 1920
        rounding = {"block_rows": hill.settings.block_rows}
        stored = StoredPrompts(store, model, b"", Reuse.EXACT, 640, divided_by=rounding)
        with store.find(stored.namespace, ids[0].tolist()) as prefix:
            span, shape = prefix.chunks[1].record.span, prefix.shape
        with path.open("r+b") as file:
            file.seek(span.offset + shape.rows_at(0))
            file.write(bytes(1 << 12))
        found, told = answered(hill)
        # 1,024 came whole, and 640 end where the passes of this prompt end.
        assert told.found_tokens == 640
        assert "not as they were written" in told.failure
        assert torch.equal(found, plain)
    assert store.counts.quarantined_chunks == 1


@torch.no_grad()
def test_exact_stores_no_passes_of_another_length(store, cold_dir):
    model, ids = tiny().build(), ids_of(256)
    with attached(model, cold_dir, store=store, reuse="exact") as hill:
        for sizes, stored in (([32, 96, 128], 0), ([128, 128], 0), ([64] * 4, 256)):
            cache = hill.new_cache()
            assert cache.look_up(ids, chunk_tokens=64) == 0
            for chunk in ids.split(sizes, dim=1):
                model(chunk, past_key_values=cache, logits_to_keep=1)
            assert cache.read_from_store.stored_tokens == stored
            cache.close()


@torch.no_grad()
def test_exact_stores_no_rows_that_were_made_beside_those_of_other_caches(store, cold_dir):
    """Products of several rows round as those of none alone, whosever they are."""
    model, ids = tiny().build(), ids_of(256)
    with attached(model, cold_dir, store=store, reuse="exact") as hill:
        for rows, stored in ((2, 0), (1, 256)):
            caches = [hill.new_cache() for _ in range(rows)]
            assert caches[0].look_up(ids, chunk_tokens=64) == 0
            joined = hill.join(caches)
            for chunk in ids.split(64, dim=1):
                model(**joined.inputs(chunk.repeat(rows, 1)), logits_to_keep=1)
            assert caches[0].read_from_store.stored_tokens == stored
            for cache in caches:
                cache.close()


def test_exact_takes_no_prompt_that_other_instructions_attended_to(store, monkeypatch):
    """Products are rounded otherwise by each instruction set; any other reuse does not care."""
    model = tiny().build()

    def namespaces():
        return [StoredPrompts(store, model, reuse=one).namespace for one in Reuse]

    before = namespaces()
    monkeypatch.setattr(native_library(), "variants", (Variant.PORTABLE,))
    same = [one == other for one, other in zip(before, namespaces(), strict=True)]
    assert same == [reuse is not Reuse.EXACT for reuse in Reuse]


def test_exact_takes_no_prompt_whose_division_has_no_border(store, cold_dir):
    model = tiny().build()
    for way in ("generate", "forward", "beams in chunks", "padded batch in chunks"):
        with attached(model, cold_dir, store=store, reuse="exact") as hill:
            WAYS[way](hill)
            assert WAYS[way](hill).found == 0
    assert store.statistics()["chunks"] == 0


@torch.no_grad()
def test_a_caller_that_wants_all_logits_gets_them(store, cold_dir):
    model, ids = tiny().build(), ids_of()
    with attached(model, cold_dir, store=store) as hill:
        caches = [hill.new_cache() for _ in range(5)]
        model(ids, past_key_values=caches[0])
        assert held(store, model, ids[0].tolist()) == 128
        whole = model(ids, past_key_values=caches[1])
        assert whole.logits.shape[1] == 150
        hidden = model(
            ids, past_key_values=caches[2], logits_to_keep=1, output_hidden_states=True
        ).hidden_states
        assert {one.shape[1] for one in hidden} == {150}
        out = run(model, caches[3], ids, output_hidden_states=True, prefill_chunk_size=None)
        assert out.hidden_states[0][0].shape[1] == 150
        assert [one.read_from_store for one in caches[:4]] == [None] * 4
        # The twin: the last ones alone are had sooner.
        last = model(ids, past_key_values=caches[4], logits_to_keep=1)
        assert last.logits.shape[1] == 1
        assert caches[4].read_from_store.found_tokens == 128
        assert torch.allclose(last.logits, whole.logits[:, -1:], atol=1e-3)
        for cache in caches:
            cache.close()


@torch.no_grad()
def test_tokens_at_other_places_are_neither_taken_nor_stored(store, cold_dir):
    model, ids = tiny().build(), ids_of()
    with attached(model, cold_dir, store=store) as hill:
        moved = torch.arange(7, 157)[None]
        for given in (
            {"position_ids": moved},
            # Without positions the model counts the padding.
            {"attention_mask": torch.cat([torch.zeros(1, 20), torch.ones(1, 130)], dim=1).long()},
        ):
            cache = hill.new_cache()
            model(ids, past_key_values=cache, logits_to_keep=1, **given)
            cache.close()
        with torch.autocast("cpu", torch.bfloat16):
            cache = hill.new_cache()
            model(ids, past_key_values=cache, logits_to_keep=1)
            cache.close()
        assert store.statistics()["chunks"] == 0
        # The twin: where they belong they are stored.
        cache = hill.new_cache()
        model(ids, position_ids=moved - 7, past_key_values=cache, logits_to_keep=1)
        cache.close()
        assert held(store, model, ids[0].tolist()) == 128


def test_a_conversation_stores_what_was_read_densely_alone(store, cold_dir):
    model, ids = tiny().build(), ids_of(200)
    question = ids_of(130, seed=8)
    with attached(model, cold_dir, store=store) as hill:
        cache = hill.new_cache()
        talk = run(model, cache, ids, new_tokens=70).sequences
        assert talk.shape[1] == 270
        cache.await_stored()
        assert held(store, model, talk[0].tolist()) == 192
        # The next turn over the answer's rows, which were made under selection.
        talk = torch.cat([talk, question], dim=1)
        after = run(model, cache, talk, new_tokens=5).sequences
        assert held(store, model, after[0].tolist()) == 192
        cache.close()
        # Another cache reads the answer as a prompt, and stores it.
        other = hill.new_cache()
        run(model, other, talk, new_tokens=5)
        assert other.read_from_store.found_tokens == 192
        assert held(store, model, talk[0].tolist()) == 384
        other.close()
    assert store.counts.failures == 0


class SlowToSettle(DriveCalls):
    """A drive that takes long to have what was written."""

    def fdatasync(self, descriptor):
        time.sleep(0.2)
        super().fdatasync(descriptor)


@pytest.mark.parametrize("asks", ["the cache", "a fork"])
def test_a_question_goes_on_in_its_document_however_slow_the_drive_is(place, cold_dir, asks):
    model, ids = tiny().build(), ids_of(210)[0].tolist()
    with Store(place, calls=SlowToSettle()) as store:
        with attached(model, cold_dir, store=store) as hill:
            document = Generation(model, hill.new_cache(), 64)
            document.read(ids[:150])
            question = document.fork() if asks == "a fork" else document
            question.read(ids[150:])
            list(question.decode(Sampling(), 2, frozenset()))
            for one in {question, document}:
                one.close()
        assert [one.tokens for one in chains(store.database)] == [192]
        assert store.statistics()["chunks"] == 1


def test_a_cache_that_was_cropped_goes_on_storing(store, cold_dir):
    model, ids = tiny().build(), ids_of(200)
    with attached(model, cold_dir, store=store) as hill:
        cache = hill.new_cache()
        run(model, cache, ids, new_tokens=30)
        cache.crop(200 - cache.get_seq_length())
        longer = torch.cat([ids, ids_of(60, seed=2)], dim=1)
        run(model, cache, longer, new_tokens=2)
        assert held(store, model, longer[0].tolist()) == 256
        # The twin: with one decoded token left, it does not.
        twin = hill.new_cache()
        talk = run(model, twin, ids_of(200, seed=3), new_tokens=30).sequences
        twin.crop(201 - twin.get_seq_length())
        longer = torch.cat([talk[:, :201], ids_of(60, seed=2)], dim=1)
        run(model, twin, longer, new_tokens=2)
        assert held(store, model, longer[0].tolist()) == 192
        for one in (cache, twin):
            one.close()


@torch.no_grad()
def test_a_prompt_read_token_by_token_is_not_stored(store, cold_dir):
    model, ids = tiny().build(), ids_of(130)
    with attached(model, cold_dir, store=store) as hill:
        cache = hill.new_cache()
        for one in ids.split(1, dim=1):
            model(one, past_key_values=cache, logits_to_keep=1)
        cache.close()
        # A last pass of one token fills a group here, and selects.
        cache = hill.new_cache()
        run(model, cache, ids[:, :64], prefill_chunk_size=63)
        cache.close()
    assert store.statistics()["chunks"] == 0


def test_rows_of_a_joined_batch_take_what_the_first_one_stored(store, cold_dir):
    model = tiny().build()
    with attached(model, cold_dir, store=store) as hill:
        caches = [hill.new_cache() for _ in range(3)]
        ids, mask = prompts([150, 90, 150])
        ids[2] = ids[0]
        ids[2, 140:] = ids[0, 140:].flip(0)
        run(model, hill.join(caches), ids, mask, 3)
        assert [one.read_from_store.found_tokens for one in caches] == [0, 0, 128]
        for cache in caches:
            cache.close()


def test_what_makes_other_bits_has_prompts_of_its_own(store, cold_dir):
    ids = ids_of()

    def found(model, **changes):
        with attached(model, cold_dir, store=store, **changes) as hill:
            cache = hill.new_cache()
            run(model, cache, ids, new_tokens=2)
            told = cache.read_from_store.found_tokens
            cache.close()
        return told

    model = tiny().build()
    assert found(model) == 0
    assert found(model) == 128
    assert found(tiny().build()) == 128
    assert found(tiny(seed=3).build()) == 0
    assert found(tiny(dtype=torch.bfloat16).build()) == 0
    assert found(model, salt=b"tenant") == 0
    assert found(model, salt=b"tenant") == 128
    other = tiny().config()
    other.rope_parameters = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    turned = type(model)(other).eval()
    turned.load_state_dict(model.state_dict())
    assert found(turned) == 0
    # Written in place while it is attached, an adapter's scale, and a module that is covered.
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0, 0] += 1
    assert found(model) == 0
    model = tiny().build()
    model.model.layers[1].mlp.lora_scale = 2.0
    assert found(model) == 0
    # What stands around an attached model's methods makes no other bits, nor does a copy of it.
    model = tiny().build()
    prompts_of = StoredPrompts(store, model)
    assert prompts_of.load_into(DynamicCache(), ids[0].tolist()) == 128
    with attached(model, cold_dir):
        assert StoredPrompts(store, model).namespace == prompts_of.namespace
        copied = copy.deepcopy(model)
    assert StoredPrompts(store, copied).namespace == prompts_of.namespace
    assert found(copied) == 128
    whole = model.forward
    model.forward = lambda *given, **named: whole(*given, **named)
    assert found(model) == 0
    model = tiny().build()
    covered = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda states: 2 * covered(states)
    assert found(model) == 0


def test_weights_that_change_while_attached_are_hashed_again(store, cold_dir):
    model, ids = tiny().build(), ids_of()
    with attached(model, cold_dir, store=store) as hill:
        for change, expected in ((0, 0), (0, 128), (1, 0)):
            with torch.no_grad():
                model.model.layers[0].self_attn.k_proj.weight[0, 0] += change
            cache = hill.new_cache()
            run(model, cache, ids, new_tokens=2)
            # Adding nothing is a write too, and the same weights again.
            assert cache.read_from_store.found_tokens == expected
            cache.close()


def test_a_call_that_fails_leaves_the_cache_as_it_was(store, cold_dir):
    model, ids = tiny().build(), ids_of()
    with attached(model, cold_dir, store=store) as hill:
        cache = hill.new_cache()
        run(model, cache, ids, new_tokens=2)
        cache.close()

        for pass_on in (
            lambda cache: run(model, cache, ids, new_tokens=2),
            lambda cache: run(model, cache, ids, new_tokens=2, num_beams=2),
            lambda cache: model(ids, past_key_values=cache, logits_to_keep=1),
        ):
            cache = hill.new_cache()
            with pytest.raises(KeyboardInterrupt), torch.no_grad(), Struck():
                pass_on(cache)
            assert cache.read_from_store.found_tokens == 128
            # Another prompt is not refused.
            out = run(model, cache, ids_of(seed=6), new_tokens=2)
            assert out.sequences.shape[1] == 152
            cache.close()


def test_a_store_by_its_directory_is_opened_and_let_go(place, cold_dir):
    model = tiny().build()
    with attached(model, cold_dir, store=place) as hill:
        assert WAYS["generate"](hill).found == 0
        assert len(list((place / "owners").iterdir())) == 1
    assert list((place / "owners").iterdir()) == []
    with attached(model, cold_dir, store=str(place)) as hill:
        assert WAYS["generate"](hill).found == 128
    with pytest.raises(StoreError):
        hillinfer.attach(model, store=place / "missing")
    for wrong in ({"reuse": "most"}, {"salt": "text"}):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            hillinfer.attach(model, store=place, **wrong)
    # Nothing of the failed ones is left, and the model is not attached.
    assert list((place / "owners").iterdir()) == []
    with attached(model, cold_dir):
        pass


def test_a_padded_batch_holds_what_it_shares_once(store, cold_dir):
    model = tiny(head_dim=32).build()
    ids, mask = prompts([400, 300, 400])
    ids[2, :390] = ids[0, :390]
    with attached(model, cold_dir, store=store) as hill:
        for found in (0, 384 + 256 + 384):
            cache = hill.new_cache()
            run(model, cache, ids, mask, new_tokens=1, prefill_chunk_size=None)
            assert cache.read_from_store.prompt_tokens == 1100
            # All rows up to one column: the one that the shortest of them is stored to.
            assert cache.read_from_store.found_tokens == (found and 356 + 256 + 356)
            written = cache.statistics().cold_write_bytes
            cache.close()
        groups = written // (64 * 2 * 2 * 2 * 32 * 2)
    # A sixth of each of the two rows that begin alike; all else lies in the store.
    assert groups == 2


def test_a_first_row_that_begins_behind_what_others_take_loses_them_no_token(store, cold_dir):
    """The short row comes first, and its padding ends behind what is stored of the long one."""
    model = tiny().build()
    ids, mask = prompts([30, 150])

    def answered(hill, prompt, padding=None):
        cache = hill.new_cache()
        out = run(model, cache, prompt, padding, 5, prefill_chunk_size=None)
        told, held = cache.read_from_store, [len(row) for row in cache.token_ids]
        cache.close()
        return out.sequences[:, prompt.shape[1] :], told and told.found_tokens, held

    with attached(model, cold_dir) as hill:
        plain, _, lengths = answered(hill, ids, mask)
        changed, *_ = answered(hill, ids.flip(0), mask.flip(0))
    with attached(model, cold_dir, store=store) as hill:
        answered(hill, ids[1:, :70])
        tokens, found, held = answered(hill, ids, mask)
    assert found == 64
    assert held == lengths == [34, 154]
    assert torch.equal(tokens, plain)
    assert not torch.equal(changed, plain)


def test_generate_computes_what_a_store_that_goes_away_had(store, cold_dir):
    model, ids = tiny(head_dim=32).build(), ids_of(1300)
    # Too little for rows to stay that a pass has brought.
    few = {"dram_budget": "1600KiB", "alpha": 0.3}

    def answered(hill, **options):
        cache = hill.new_cache()
        torch.manual_seed(3)
        chosen = {"do_sample": True, "temperature": 0.2, "prefill_chunk_size": 256}
        out = run(model, cache, ids, new_tokens=12, **(chosen | options))
        told = cache.read_from_store
        cache.close()
        return out.sequences[0, 1300:].tolist(), told and told.found_tokens

    class Goes(StoppingCriteria):
        """Takes the drive away after two tokens."""

        def __call__(self, sequences, scores, **_):
            if sequences.shape[1] == 1302:
                os.truncate(store.places.files[0][0], 128 * 1024)
            return torch.zeros(len(sequences), dtype=torch.bool)

    with attached(model, cold_dir, **few) as hill:
        plain, _ = answered(hill)
    with attached(model, cold_dir, store=store, reuse="exact", **few) as hill:
        assert answered(hill) == (plain, 0)
        found = answered(hill, stopping_criteria=StoppingCriteriaList([Goes()]))
        assert found == (plain, 1280)
    assert store.counts.quarantined_chunks
