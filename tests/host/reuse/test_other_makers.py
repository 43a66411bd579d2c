# SPDX-License-Identifier: Apache-2.0
"""One store for two engines: what vLLM's connector stored HillInfer opens, and the other way round.

The worker's side of the connector is stepped as in test_vllm_steps.py; its rows are a model's own.
"""

import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from generation_runs import SETTINGS
from tiny_models import TinyModel, prompts
from transformers import AutoModelForCausalLM, DynamicCache

import hillinfer
from hillinfer.drive.files import aligned_buffer
from hillinfer.errors import SessionError, SettingsError
from hillinfer.generate.answering import Generation
from hillinfer.generate.tokens import Sampling
from hillinfer.kv.sequence import RowLayout
from hillinfer.model_shape import ModelShape
from hillinfer.reuse.model_prompts import ModelPrompts
from hillinfer.reuse.other_makers import kind_of_model
from hillinfer.settings import Settings
from hillinfer.store.store import Store
from hillinfer.store_namespaces import UnlikeRowsError
from hillinfer.values import ByteSize
from hillinfer_model.kernel_spec import GROUP_TOKENS
from hillinfer_vllm.shared_store import OtherRows, accepts, namespaces

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
from test_vllm_steps import BLOCK, DIM, HEADS, LAYERS, NAMES, Engine, put

MIB = 1 << 20
# One chunk of the store, and a tail.
TOKENS, CHUNK = 1300, 256
STORED = TOKENS // 64 * 64
NEW = 6
TYPE = torch.bfloat16


def ids_of(tokens, seed=0):
    ids, _ = prompts([tokens])
    return [(one + seed) % 60 for one in ids[0].tolist()]


IDS = ids_of(TOKENS)
# What is missed or not accepted is so however long a prompt is.
FEW, FEW_STORED = IDS[:400], 384


def saved_model(folder, dtype=TYPE, **changes):
    made = TinyModel(head_dim=DIM, layers=LAYERS, dtype=dtype, **changes).build()
    made.save_pretrained(folder)
    return loaded(folder, dtype)


def loaded(folder, dtype=TYPE, **changes):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **changes).eval()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def store(tmp_path):
    Store.create(tmp_path / "store", 64 * MIB)
    with Store(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def attached(model, store, cold_dir):
    """Attach the model to the store as a user does."""

    @contextmanager
    def opened(own=None, accept=("vllm",), into=store, **more):
        settings = Settings().changed(
            cold_dir=cold_dir, **(SETTINGS | {"dram_budget": ByteSize(24 * MIB), "alpha": 0.2})
        )
        given = model if own is None else own
        with hillinfer.attach(given, settings, store=into, accept=accept, **more) as hill:
            yield hill

    return opened


def read(model, hill, ids=None):
    """Read a prompt and answer; return tokens, the last logits' bits, what the store did, rows."""
    ids = IDS if ids is None else ids
    generation = Generation(model, hill.new_cache(len(ids) + NEW), CHUNK)
    generation.read(ids)
    cache = generation.cache
    rows = [rows_in(cache, layer, len(ids), model) for layer in range(LAYERS)]
    made = list(generation.decode(Sampling(), NEW, frozenset()))
    with torch.no_grad():
        logits = model(torch.tensor([made[-1:]]), past_key_values=cache).logits
    told = cache.read_from_store
    generation.close()
    return made, logits.float().numpy().tobytes(), told, rows


def rows_in(cache, layer, tokens, model):
    shape = ModelShape.from_config(model.config, model.dtype)
    size = tokens * shape.row_bytes
    out = aligned_buffer(size)[:size].reshape(tokens, -1)
    cache.copy_rows(layer, 0, out)
    layout, rows = RowLayout(shape), torch.from_numpy(out)
    return torch.stack([layout.keys(rows), layout.values(rows)], dim=1).clone()


class RowsEngine(Engine):
    """Steps requests as vLLM does; what it computes is given."""

    rows = lines = None

    def compute(self, turns):
        for layer, name in enumerate(NAMES):
            self.loads.wait(name)
            halves = self.blocks[name].view(-1, HEADS, 2 * BLOCK, DIM).chunk(2, dim=2)
            for one in turns:
                both = self.rows[layer][one.start : one.stop]
                slots = [one.numbers[at // BLOCK] * BLOCK + at % BLOCK for at in one.positions]
                put(both[:, 0], both[:, 1], *halves, torch.tensor(slots))
            self.saves.take(name)

    def held(self, numbers, count):
        return [self._rows(own, numbers, count) for own in self.blocks.values()]


@contextmanager
def vllm(store, model, rows, accept=None, **facts):
    """An engine of vLLM that has a model's directory, and computes these rows."""
    directory, config = model.config.name_or_path, model.config.to_dict()
    facts = {"vllm": "0.32.0", "dtype": "torch.bfloat16", "quantization": "None"} | facts
    (space,) = namespaces(facts, directory, config, LAYERS, 4 * HEADS * DIM, 1)
    extra = {} if accept is None else {"accept": accept}
    others = OtherRows.of(store, accepts(extra), [space], directory, config, facts)
    lines = []
    engine = RowsEngine(store, space, asks={"others": others.now, "warn": lines.append})
    engine.rows = rows
    engine.lines = lines
    yield engine
    engine.close()


# --- what vLLM read is opened by HillInfer ---


@pytest.fixture(scope="module")
def rows(model, tmp_path_factory):
    """Rows of the prompt, and what comes of it where the model has stored them itself."""
    folder = tmp_path_factory.mktemp("own")
    Store.create(folder / "store", 64 * MIB)
    settings = Settings().changed(
        cold_dir=folder, **(SETTINGS | {"dram_budget": ByteSize(24 * MIB), "alpha": 0.2})
    )
    for _ in range(2):
        # The second one finds its shadows stored.
        with hillinfer.attach(model, settings, store=folder / "store") as hill:
            made, bits, told, found = read(model, hill)
    assert told.found_tokens == STORED
    assert told.made_by == "hillinfer"
    return made, bits, found


def test_what_vllm_read_is_opened_in_place_with_shadows_coded_then(model, store, attached, rows):
    made, bits, own = rows
    with vllm(store, model, own) as engine:
        engine.read("a", IDS)
    with attached() as hill:
        again, again_bits, told, held = read(model, hill)
    assert (told.found_tokens, told.made_by, told.not_accepted) == (STORED, "vllm", "")
    assert told.failure == ""
    # The same rows and the same shadows as those that were stored with them: no bit differs.
    assert (again, again_bits) == (made, bits)
    assert all(torch.equal(one, other) for one, other in zip(held, own, strict=True))
    # The twin.
    flipped = [one.clone() for one in own]
    flipped[1].view(torch.int16)[STORED // 2, 1] ^= 1 << 13
    with vllm(store, model, flipped) as engine:
        engine.read("a", IDS, salt="twin")
    with attached(salt=b"twin") as hill:
        _, twin_bits, told, _ = read(model, hill)
    assert (told.found_tokens, told.made_by) == (STORED, "vllm")
    assert twin_bits != bits


def test_nobody_takes_rows_of_others_unasked(model, store, attached, rows):
    with vllm(store, model, rows[2]) as engine:
        engine.read("a", FEW)
    with attached(accept=()) as hill:
        _, _, told, _ = read(model, hill, FEW)
    assert (told.found_tokens, told.made_by) == (0, "")


def test_what_is_read_behind_rows_of_others_is_stored_by_nobody(model, store, attached, rows):
    few = IDS[:400]
    with vllm(store, model, rows[2]) as engine:
        engine.read("a", few)
    before = store.statistics()
    with attached() as hill:
        generation = Generation(model, hill.new_cache(TOKENS + NEW), CHUNK)
        generation.read(IDS[:500])
        generation.read(IDS[500:1100])
        told = generation.cache.read_from_store
        generation.close()
    assert told.made_by == "vllm"
    assert told.stored_tokens == 0
    assert store.statistics()["chunks"] == before["chunks"]
    # By its own it is found no further than before, which is not at all.
    with attached(accept=()) as hill:
        assert read(model, hill, IDS[:1100])[2].found_tokens == 0


def test_nobody_goes_on_storing_behind_rows_of_others_that_turn_out_wrong(
    model, store, attached, rows
):
    """The second chunk of vLLM's is damaged, and then what the model itself has is longer."""
    with attached() as hill:
        read(model, hill, IDS[:1100])
    with vllm(store, model, rows[2]) as engine:
        engine.read("a", IDS)
    with store.find(engine.space, IDS) as prefix:
        span, shape = prefix.chunks[1].record.span, prefix.shape
    with store.places.files[0][0].open("r+b") as file:
        file.seek(span.offset + shape.rows_at(0))
        file.write(bytes(1 << 12))
    with attached() as hill:
        told = read(model, hill)[2]
    assert "not as they were written" in told.failure
    assert (told.found_tokens, told.made_by, told.stored_tokens) == (1024, "vllm", 0)
    # The twin: behind its own it goes on, and finds that.
    for found, stored in ((1088, STORED - 1088), (STORED, 0)):
        with attached(accept=()) as hill:
            _, _, told, held = read(model, hill)
        assert (told.found_tokens, told.made_by) == (found, "hillinfer")
        assert told.stored_tokens == stored
        assert all(torch.equal(a[:1088], b[:1088]) for a, b in zip(held, rows[2], strict=True))


def test_a_session_is_saved_of_own_rows_alone(model, store, attached, rows, tmp_path):
    with vllm(store, model, rows[2]) as engine:
        engine.read("a", FEW)
    for accept, is_saved in ((("vllm",), False), ((), True)):
        with attached(accept=accept) as hill:
            generation = Generation(model, hill.new_cache(TOKENS + NEW), CHUNK)
            generation.read(FEW)
            with nullcontext() if is_saved else pytest.raises(SessionError, match="vllm made rows"):
                generation.cache.save_session(tmp_path / "session")
            generation.close()
        assert (tmp_path / "session").exists() == is_saved


def test_own_rows_come_first_where_both_have_as_many(model, store, attached, rows):
    with attached() as hill:
        read(model, hill, FEW)
    with vllm(store, model, rows[2]) as engine:
        engine.read("a", FEW)
    with attached() as hill:
        assert read(model, hill, FEW)[2].made_by == "hillinfer"


def test_a_cache_of_transformers_takes_them_and_is_not_stored_as_its_own(model, store, rows):
    with vllm(store, model, rows[2]) as engine:
        engine.read("a", IDS)
    stored = ModelPrompts(store, model, accept=("vllm",)).divided(CHUNK)
    cache = DynamicCache()
    assert stored.load_into(cache, IDS) == STORED
    for layer, own in zip(cache.layers, rows[2], strict=True):
        assert torch.equal(layer.keys[0].transpose(0, 1), own[:STORED, 0])
    assert stored.keep(cache, IDS[:STORED]) == 0
    assert ModelPrompts(store, model).divided(CHUNK).stored_key(IDS) is None


def told_of(attached, model, **more):
    with attached(model, **more) as hill:
        return read(model, hill, FEW)[2]


def test_other_weights_are_always_a_miss(model, store, attached, rows, tmp_path):
    with vllm(store, model, rows[2]) as engine:
        engine.read("a", FEW)
    other = saved_model(tmp_path / "other", seed=1)
    told = told_of(attached, other)
    assert (told.found_tokens, told.not_accepted) == (0, "")
    # The same files, and one bit in memory.
    changed = loaded(model.config.name_or_path)
    with torch.no_grad():
        changed.model.layers[0].mlp.up_proj.weight.view(torch.int16)[0, 0] ^= 1
    told = told_of(attached, changed)
    assert told.found_tokens == 0
    assert "is not in memory what" in told.not_accepted


def test_another_type_is_a_miss_that_says_so(model, store, attached, rows):
    with vllm(store, model, rows[2]) as engine:
        engine.read("a", FEW)
    single = loaded(model.config.name_or_path, torch.float32)
    told = told_of(attached, single)
    assert told.found_tokens == 0
    assert told.not_accepted == (
        "rows of vllm are bfloat16 and those of this model float16: load both in one type"
    )


def test_another_rotation_is_always_a_miss(model, store, attached, rows):
    with vllm(store, model, rows[2]) as engine:
        engine.read("a", FEW)
    config = type(model.config).from_pretrained(model.config.name_or_path)
    config.rope_parameters = config.rope_parameters | {"rope_theta": 5e5}
    other = loaded(model.config.name_or_path, config=config)
    assert told_of(attached, other).found_tokens == 0
    turned = loaded(model.config.name_or_path)
    turned.model.rotary_emb.inv_freq *= 2
    told = told_of(attached, turned)
    assert told.found_tokens == 0
    assert "inv_freq' is not what the model's config makes" in told.not_accepted


def test_another_salt_is_always_a_miss(model, store, attached, rows):
    with vllm(store, model, rows[2]) as engine:
        engine.read("a", FEW, salt="tenant")
    assert told_of(attached, model).found_tokens == 0
    assert told_of(attached, model, salt=b"tenant").found_tokens == FEW_STORED


def test_hooks_and_adapters_are_no_other_engines_rows(model, store):
    changed = loaded(model.config.name_or_path)
    changed.model.layers[1].register_forward_hook(lambda *_: None)
    with pytest.raises(UnlikeRowsError, match=r"layers\.1' is not what the model's config makes"):
        kind_of_model(changed)
    wider = loaded(model.config.name_or_path)
    wider.model.layers[0].self_attn.k_proj.extra = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(UnlikeRowsError, match="extra"):
        kind_of_model(wider)
    prompts_of = ModelPrompts(store, model, made_by={"projections": "x"}, accept=("vllm",))
    told = prompts_of.divided(CHUNK)._prompts.accepted
    assert (told.namespaces, told.refused[:10]) == ((), "an adapter")


def test_exact_reuse_takes_nothing_of_others(model, store):
    with pytest.raises(SettingsError, match="exact gives the bits of an unbroken run"):
        ModelPrompts(store, model, "exact", accept=("vllm",)).divided(CHUNK)
    with pytest.raises(SettingsError, match="hillinfer finds its own rows anyway"):
        ModelPrompts(store, model, accept=("hillinfer",))
    with pytest.raises(SettingsError, match="choose one of hillinfer, vllm"):
        ModelPrompts(store, model, accept=("other",))


# --- what HillInfer read is loaded by vLLM ---


def stored_by_hillinfer(model, attached, ids=None, **more):
    with attached(model, **more) as hill:
        return read(model, hill, ids)[3]


def test_what_hillinfer_read_is_loaded_by_vllm(model, store, attached):
    own = stored_by_hillinfer(model, attached)
    empty = [torch.zeros_like(one) for one in own]
    before = store.statistics()["chunks"]
    with vllm(store, model, empty, accept="hillinfer") as engine:
        numbers, external, failed = engine.read("a", IDS)
        held = engine.held(numbers, STORED)
        assert (external, failed) == (STORED, set())
        assert engine.counts.accepted_tokens == STORED
        assert engine.lines == []
    whole = STORED // BLOCK * BLOCK
    assert all(torch.equal(a[:whole], b[:whole]) for a, b in zip(held, own, strict=True))
    # The twin.
    held[2].view(torch.int16)[7, 0, 0, 0] ^= 1
    assert not torch.equal(held[2][:whole], own[2][:whole])
    assert store.statistics()["chunks"] == before


def test_vllm_stores_nothing_that_it_computed_behind_rows_of_others(model, store, attached, rows):
    few, more = IDS[: STORED // 2 + 20], IDS[: STORED // 2 + 200]
    with attached() as hill:
        read(model, hill, few)

    def read_by_itself():
        # The twin: what is computed without them is stored, and might be gone on behind.
        with vllm(store, model, rows[2]) as own:
            assert own.read("own", more)[1] == 0

    # Behind the look-up, and before the first pass alone.
    meanwhile = iter([read_by_itself])
    with vllm(store, model, rows[2], accept="hillinfer") as engine:
        _, external, failed = engine.read(
            "a", IDS, before_load=lambda: next(meanwhile, lambda: None)()
        )
    assert (external, failed) == (len(few) // GROUP_TOKENS * GROUP_TOKENS, set())
    with vllm(store, model, rows[2]) as engine:
        assert engine.read("b", IDS)[1] == len(more) // GROUP_TOKENS * GROUP_TOKENS


def test_vllm_takes_rows_of_others_only_where_it_is_told_to(model, store, attached):
    own = stored_by_hillinfer(model, attached, FEW)
    with vllm(store, model, own) as engine:
        assert engine.read("a", FEW)[1] == 0


def test_vllm_does_not_find_what_was_read_without_the_users_word(model, store, attached):
    own = stored_by_hillinfer(model, attached, FEW, accept=())
    with vllm(store, model, own, accept="hillinfer") as engine:
        assert engine.read("a", FEW)[1] == 0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dtype": "torch.float16"}, "rows of hillinfer are bfloat16 and those of this model"),
        ({"quantization": "awq"}, "weights are quantized: awq"),
        ({"hf_overrides": {"rms_norm_eps": 1e-3}}, "hf_overrides are set"),
    ],
)
def test_vllm_says_why_it_takes_none(model, store, attached, changed, said):
    own = stored_by_hillinfer(model, attached, FEW)
    with vllm(store, model, own, accept="hillinfer", **changed) as engine:
        assert engine.read("a", FEW)[1] == 0
        assert said in engine.lines[0]


def test_vllm_misses_with_another_salt_or_other_weights(model, store, attached, tmp_path):
    own = stored_by_hillinfer(model, attached, FEW)
    with vllm(store, model, own, accept="hillinfer") as engine:
        assert engine.read("a", FEW, salt="x")[1] == 0
    other = saved_model(tmp_path / "other", seed=1)
    with vllm(store, other, own, accept="hillinfer") as engine:
        assert engine.read("a", FEW)[1] == 0


def test_a_request_with_an_adapter_takes_none(model, store, attached, tmp_path):
    from test_vllm_adapters import adapter_folder
    from test_vllm_steps import adapter_in

    own = stored_by_hillinfer(model, attached, FEW)
    adapter = adapter_in(adapter_folder(tmp_path / "adapter"))
    with vllm(store, model, own, accept="hillinfer") as engine:
        assert engine.read("a", FEW, adapter=adapter)[1] == 0
        assert engine.read("b", FEW)[1] == FEW_STORED


def test_an_index_that_is_made_anew_knows_makers_once_they_come_again(model, store, rows, tmp_path):
    with vllm(store, model, rows[2]) as engine:
        engine.read("a", IDS)
    store.close()
    for one in (tmp_path / "store").glob("index.sqlite*"):
        one.unlink()
    with Store(tmp_path / "store") as anew:
        assert loaded_tokens(anew, model) == 0
        with vllm(anew, model, rows[2]):
            pass
        assert loaded_tokens(anew, model) == STORED


def loaded_tokens(store, model):
    stored = ModelPrompts(store, model, accept=("vllm",)).divided(CHUNK)
    return stored.load_into(DynamicCache(), IDS)
