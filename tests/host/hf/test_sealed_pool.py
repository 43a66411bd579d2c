# SPDX-License-Identifier: Apache-2.0
"""A sealed cold pool changes no bit, tells nothing, and believes no changed byte."""

import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from generation_runs import SETTINGS
from placement_matrix import Budget, Way, every
from placement_matrix import Path as RowPath
from tiny_models import TinyModel, prompts

from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.engine.runtime import Runtime
from hillinfer.errors import ColdPoolError
from hillinfer.generate.answering import Generation
from hillinfer.generate.tokens import Sampling
from hillinfer.hf.attach import Attachment
from hillinfer.model_shape import ModelShape
from hillinfer.reuse.model_prompts import ModelPrompts
from hillinfer.secrecy.key_sources import KeyFile
from hillinfer.settings import Encryption, Settings
from hillinfer.shadow.store import STREAM_BUFFERS, sealed_bytes, shadow_bytes
from hillinfer.store.store import Store
from hillinfer.values import ByteSize

CHUNK, TOKENS, NEW = 128, 1300, 4
MIB = 1 << 20
COLD = Way(Budget.LEAST, path=RowPath.COLD)
STREAMED = Way(Budget.LEAST, path=RowPath.STREAMED)


@pytest.fixture(scope="module")
def model():
    return TinyModel(head_dim=32).build()


@dataclass
class Pool:
    """An attachment in one of the ways, the runtimes that it opened, and files that were open."""

    attachment: Attachment
    runtimes: list[Runtime]
    before: set[Path]

    @property
    def files(self):
        """Links to all files of the cold pool, with what is read of them otherwise."""
        parts = self.runtimes[-1].parts
        for layer in range(self.runtimes[-1].shape.layers):
            parts.store.settle_all(layer)
        parts.shadow_memory.settle()
        place = target(link(parts.store.files[0])).parent
        return [one for one in links() if target(one).parent == place and self.is_own(one)]

    def is_own(self, one):
        """Whether a file is none of a test before, whose error still holds it."""
        return target(one) not in self.before

    @property
    def held(self):
        """All bytes that lie on the drive."""
        return [one.read_bytes() for one in self.files]


def links():
    return list(Path("/proc/self/fd").iterdir())


def link(file):
    return Path(f"/proc/self/fd/{file.descriptor}")


def target(one):
    try:
        return one.readlink()
    except OSError:
        # It lists itself, too.
        return Path()


@contextmanager
def attached(model, cold_dir, encryption, way=COLD, prompts_of=None, spare=0):
    """Attach as a line of the matrix says, with the cold pool kept in some way."""
    shape, runtimes = ModelShape.from_config(model.config, model.dtype), []
    before = {target(one) for one in links()}
    chosen = Settings().changed(
        cold_dir=cold_dir, **(SETTINGS | {"dram_budget": 24 * MIB, "encrypt_cold_pool": encryption})
    )
    settings = way.settings(chosen)
    budget = way.budget.byte_count(shape, settings, TOKENS + NEW) + spare

    def opened(shape_, settings_, byte_count, directory, **given):
        if way.path is RowPath.STREAMED:
            spec = kernel_spec(shape_, settings_)
            byte_count += STREAM_BUFFERS * shadow_bytes(spec) + sum(sealed_bytes(spec, 8))
            given |= {"shadow_limit_bytes": 0}
        runtimes.append(Runtime(shape_, settings_, byte_count, directory, **given))
        return runtimes[-1]

    settings = settings.changed(dram_budget=ByteSize(budget))
    with Attachment(model, settings, open_runtime=opened, prompts=prompts_of) as hill:
        yield Pool(hill, runtimes, before)


def ids_of(tokens=TOKENS):
    return prompts([tokens])[0][0].tolist()


def answer(model, generation, ids):
    """Return greedy tokens, and the bits of the logits of one more."""
    generation.read(ids)
    made = list(generation.decode(Sampling(), NEW, frozenset()))
    with torch.no_grad():
        output = model(torch.tensor([made[-1:]]), past_key_values=generation.cache)
    return made, output.logits.float().numpy().tobytes()


def run(model, cold_dir, encryption, way):
    with attached(model, cold_dir, encryption, way) as pool, torch.no_grad():
        generation = Generation(model, pool.attachment.new_cache(TOKENS + NEW), CHUNK)
        found = answer(model, generation, ids_of())
        statistics = generation.statistics()
        generation.close()
    assert statistics.dram_peak_bytes <= statistics.dram_budget_bytes
    return found, statistics


# What is sealed depends on where rows and shadows go; policies and devices only ask for them.
WAYS = [
    *every(batch=(1,), device=("nvme",), policy=("lru",)),
    Way(Budget.LEAST, "core", "paper", RowPath.PREFETCHED),
    Way(Budget.SOME_HOT, "golden", "decayed", RowPath.COLD),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_no_bit_depends_on_it(way, model, cold_dir):
    plain, before = run(model, cold_dir, "no", way)
    sealed, statistics = run(model, cold_dir, "yes", way)
    assert sealed == plain
    assert statistics.cold_write_bytes == before.cold_write_bytes > 0
    if way.budget is Budget.LEAST:
        assert min(statistics.cold_read_bytes, before.cold_read_bytes) > 0
    assert (statistics.shadow_read_bytes > 0) == (before.shadow_read_bytes > 0)


# --- What lies on the drive ---


@pytest.mark.parametrize("encryption", ["no", "yes"])
def test_no_row_and_no_shadow_is_found_on_the_drive(encryption, model, cold_dir):
    """The twin is the plain pool, where all of them are."""
    with attached(model, cold_dir, encryption, STREAMED) as pool, torch.no_grad():
        cache = pool.attachment.new_cache(TOKENS + NEW)
        generation = Generation(model, cache, CHUNK)
        generation.read(ids_of())
        runtime, (sequence,) = pool.runtimes[-1], pool.runtimes[-1].parts.rows.sequences
        rows = []
        for layer in range(runtime.shape.layers):
            for block in runtime.gather.from_drive(layer, sequence, 0, 1280):
                rows += [row.tobytes() for row in block[::9]]
        parts = runtime.parts
        shadow = parts.shadow_memory.whole(sequence.segments[0].layers[1]).tobytes()
        held = pool.held
        for wanted in (*rows, shadow[:64], shadow[-64:]):
            assert any(wanted in one for one in held) == (encryption == "no")
        assert sum(map(len, held)) >= 1280 * runtime.shape.token_bytes
        generation.close()


def test_what_is_written_again_is_sealed_anew(model, cold_dir):
    """Equal rows at the same places of the same files, and no equal page."""
    with attached(model, cold_dir, "yes", spare=MIB) as pool, torch.no_grad():
        seen = []
        keep = pool.attachment.new_cache(TOKENS + NEW)
        for _ in range(2):
            generation = Generation(model, pool.attachment.new_cache(TOKENS + NEW), CHUNK)
            generation.read(ids_of())
            own = [data for data in pool.held if len(data)]
            seen.append({data[at : at + 4096] for data in own for at in range(0, len(data), 4096)})
            generation.close()
        keep.close()
    zeros = {bytes(4096)}
    assert len(seen[0]) > 10
    assert not (seen[0] - zeros) & (seen[1] - zeros)


def flip(one, at):
    descriptor = os.open(one, os.O_RDWR)
    (byte,) = os.pread(descriptor, 1, at)
    os.pwrite(descriptor, bytes([byte ^ 1]), at)
    os.fsync(descriptor)
    os.close(descriptor)


def test_a_flipped_bit_of_a_row_is_an_error_that_names_it(model, cold_dir):
    with attached(model, cold_dir, "yes") as pool, torch.no_grad():
        generation = Generation(model, pool.attachment.new_cache(TOKENS + NEW), CHUNK)
        generation.read(ids_of())
        runtime = pool.runtimes[-1]
        assert pool.files
        # In the middle of the first layer's rows: the next prompt's tokens attend to all of them.
        flip(link(runtime.parts.store.files[0]), 600 * 128 + 5)
        with pytest.raises(ColdPoolError, match=r"of rows of layer 0 .* are not what was written"):
            generation.read(ids_of(70))


def test_a_flipped_bit_of_a_shadow_is_an_error_that_names_it(model, cold_dir):
    with attached(model, cold_dir, "yes", STREAMED) as pool, torch.no_grad():
        generation = Generation(model, pool.attachment.new_cache(TOKENS + NEW), CHUNK)
        generation.read(ids_of())
        rows = {link(one) for one in pool.runtimes[-1].parts.store.files}
        (shadows,) = set(pool.files) - rows
        flip(shadows, 70)
        with pytest.raises(ColdPoolError, match=r"of key shadow .* are not what was written"):
            list(generation.decode(Sampling(), NEW, frozenset()))


# --- Sessions ---


def test_a_session_saved_from_it_is_that_of_a_plain_one(model, cold_dir, tmp_path):
    ids = ids_of()
    for encryption in ("no", "yes"):
        with attached(model, cold_dir, encryption, spare=MIB) as pool, torch.no_grad():
            cache = pool.attachment.new_cache(TOKENS + NEW)
            Generation(model, cache, CHUNK).read(ids)
            saved = cache.save_session(tmp_path / encryption)
            # A session is read by its name: what is sealed is written once more.
            assert (saved.copied_row_bytes > 0) == (encryption == "yes")
            # The cache goes on as before.
            left = answer(model, Generation(model, cache, CHUNK), ids[:70])
            cache.close()
            resumed = pool.attachment.load_session(tmp_path / encryption)
            assert answer(model, Generation(model, resumed, CHUNK), ids[:70]) == left
    one, other = ({p.name: p.read_bytes() for p in (tmp_path / e).iterdir()} for e in ("no", "yes"))
    assert one.keys() == other.keys()
    assert all(one[name] == other[name] for name in one if name.endswith(".bin"))


# --- Beside a store ---


def opened_beside(model, cold_dir, directory, key):
    Store.create(directory, 64 * MIB, key=key)
    store = Store(directory, key=key)
    return store, ModelPrompts(store, model)


@pytest.mark.parametrize("given", ["with the model", "with the cache"])
@pytest.mark.parametrize("has_key", [False, True])
def test_a_pool_is_sealed_beside_an_encrypted_store(given, has_key, model, cold_dir, tmp_path):
    key = KeyFile(tmp_path / "key") if has_key else None
    store, own = opened_beside(model, cold_dir, tmp_path / "store", key)
    with_model = given == "with the model"
    beside = own if with_model else None
    with store, attached(model, cold_dir, "auto", prompts_of=beside, spare=MIB) as pool:
        cache = pool.attachment.new_cache(TOKENS + NEW, prompts=None if with_model else own)
        expected = Encryption.YES if has_key else Encryption.AUTO
        assert pool.runtimes[-1].settings.encrypt_cold_pool is expected
        with torch.no_grad():
            generation = Generation(model, cache, CHUNK)
            found = answer(model, generation, ids_of(300))
        generation.close()
    assert found[0]


def test_whoever_wants_it_plain_has_it_plain(model, cold_dir, tmp_path):
    store, own = opened_beside(model, cold_dir, tmp_path / "store", KeyFile(tmp_path / "key"))
    with store, attached(model, cold_dir, "no", prompts_of=own) as pool:
        pool.attachment.new_cache(TOKENS + NEW).close()
        assert pool.runtimes[-1].settings.encrypt_cold_pool is Encryption.NO
