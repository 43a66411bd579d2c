# SPDX-License-Identifier: Apache-2.0
"""Stored prefixes become sessions with the bytes of saved ones, and sessions come back."""

import hashlib
import shutil

import pytest
import torch
from generation_runs import attached, bits, run
from tiny_models import TinyModel, prompts

from hillinfer.errors import HillInferError, SessionError
from hillinfer.reuse.session_exchange import dense_tokens, export_session, import_session
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.sessions.fingerprint import ModelIdentity
from hillinfer.sessions.opening import SavedSession
from hillinfer.store.maintenance import chains
from hillinfer.store.pool_files import StoreError
from hillinfer.store.store import Store
from hillinfer.store_namespaces import token_ids
from hillinfer_model.choices import KeyMode

MIB = 1 << 20
# Two whole segments and some groups.
TOKENS = 2304


@pytest.fixture
def store(tmp_path):
    Store.create(tmp_path / "store", 64 * MIB)
    with Store(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def other(tmp_path):
    Store.create(tmp_path / "other", 64 * MIB)
    with Store(tmp_path / "other") as opened:
        yield opened


def ids_of(tokens):
    return prompts([tokens], seed=3)[0]


@torch.no_grad()
def read(model, cache, ids, chunk=256):
    for part in torch.split(ids, chunk, dim=1):
        model(input_ids=part, past_key_values=cache, logits_to_keep=1)


def digests(directory):
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()
    }


def kept(store, model, hill, tokens=TOKENS):
    """Read a prompt that is stored; return the cache, the prompts and the name."""
    cache, ids = hill.new_cache(), ids_of(tokens)
    assert cache.look_up(ids, chunk_tokens=256) == 0
    read(model, cache, ids)
    assert cache.read_from_store.stored_tokens == tokens // 64 * 64
    (one,) = chains(store.database)
    return cache, StoredPrompts(store, model), one.name


@pytest.mark.parametrize(
    ("tiny", "shadow"),
    [
        (TinyModel(), "int4"),
        (TinyModel(dtype=torch.bfloat16), "int8"),
        (TinyModel("opt", "mha"), "int2"),
    ],
    ids=str,
)
def test_an_export_is_the_session_that_would_have_been_saved(
    store, other, cold_dir, tmp_path, tiny, shadow
):
    model = tiny.build()
    with attached(model, cold_dir, shadow=shadow, store=store) as hill:
        cache, stored, name = kept(store, model, hill)
        cache.save_session(tmp_path / "saved")
        seen = []
        with listed(store, stored, name) as found:
            identity = ModelIdentity(model).fingerprint(KeyMode(shadow))
            told = export_session(found, tmp_path / "export", identity, seen.append)
        assert told.tokens == seen[-1] == TOKENS
        own, like = digests(tmp_path / "export"), digests(tmp_path / "saved")
        # How often rows were selected is the saved cache's; queries of its last pass, too.
        for name in ("session.json", "hits.bin", "observed.bin"):
            del own[name], like[name]
        assert own == like
        resumed = hill.load_session(tmp_path / "export")
        whole = torch.cat([ids_of(TOKENS), ids_of(40)], dim=1)
        assert torch.equal(bits(run(model, resumed, whole)), bits(run(model, cache, whole)))
    with SavedSession(tmp_path / "export") as session:
        assert dense_tokens_of(session) == TOKENS
        assert import_session(other, session, stored.namespace).stored_tokens == TOKENS
    assert store.counts.failures == 0


def listed(store, stored, name):
    """Return the stored prefix of a name."""
    ids = token_ids(store, name)
    return store.find(stored.namespace, ids)


def dense_tokens_of(session):
    session.verify()
    return dense_tokens(session)


def test_a_changed_row_is_not_exported(store, cold_dir, tmp_path):
    model = TinyModel().build()
    with attached(model, cold_dir, store=store) as hill:
        _, stored, name = kept(store, model, hill)
    identity = ModelIdentity(model).fingerprint(KeyMode.INT4)
    with listed(store, stored, name) as found:
        chunk = found.chunks[1]
        place = chunk.record.span.offset + chunk.shape.rows_at(1, 3)
        with store.files[0].path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(StoreError, match="rows of layer 1"):
            export_session(found, tmp_path / "export", identity)
    assert not (tmp_path / "export").exists()
    # What is left of it is before the chunk.
    with store.find(stored.namespace, ids_of(TOKENS)[0].tolist()) as found:
        assert export_session(found, tmp_path / "export", identity).tokens == 1024


def test_an_import_is_found_as_if_it_was_read(store, other, cold_dir, tmp_path):
    model = TinyModel(dtype=torch.bfloat16).build()
    ids = ids_of(TOKENS + 30)
    with attached(model, cold_dir, store=store) as hill:
        cache, stored, _ = kept(store, model, hill, TOKENS + 30)
        cache.save_session(tmp_path / "saved", chunk_tokens=256)
        with SavedSession(tmp_path / "saved") as session:
            told = import_session(other, session, stored.namespace)
            assert (told.tokens, told.dense_tokens) == (TOKENS + 30, TOKENS)
            assert (told.found_tokens, told.stored_tokens) == (0, TOKENS)
            assert import_session(other, session, stored.namespace).stored_tokens == 0
        listed = ids[0].tolist()
        with (
            store.find(stored.namespace, listed) as one,
            other.find(stored.namespace, listed) as two,
        ):
            assert one.tokens == two.tokens == TOKENS
            pairs = zip(one.stream(), two.stream(), strict=True)
            for (*own, rows), (*like, others) in pairs:
                assert own == like
                assert (rows == others).all()
        assert other.find(StoredPrompts(other, model, salt=b"x").namespace, listed, b"x") is None


@pytest.mark.parametrize(
    ("first", "decoded", "then", "dense"),
    [
        # Only read: all whole groups.
        (1500, 0, 0, 1472),
        # Decoded in the open segment: the segments before it, but for their last group.
        (1500, 20, 0, 1024 - 64),
        # Decoded, then filled up and read on densely: what follows is tainted all the same.
        (1500, 20, 1200, 1024 - 64),
        # In the first segment.
        (500, 20, 1200, 0),
        # From a border on, where the token before may have been decoded as well.
        (2048, 5, 0, 2048 - 64),
        (2047, 5, 0, 1024 * 2 - 64),
    ],
)
def test_rows_of_answers_are_not_imported(store, cold_dir, tmp_path, first, decoded, then, dense):
    model = TinyModel().build()
    ids = ids_of(first + decoded + then)
    with attached(model, cold_dir) as hill:
        cache = hill.new_cache()
        read(model, cache, ids[:, :first])
        read(model, cache, ids[:, first : first + decoded], chunk=1) if decoded else None
        read(model, cache, ids[:, first + decoded :]) if then else None
        cache.save_session(tmp_path / "saved", chunk_tokens=256)
    space = StoredPrompts(store, model).namespace
    with SavedSession(tmp_path / "saved") as session:
        if dense:
            assert import_session(store, session, space).stored_tokens == dense
        else:
            with pytest.raises(SessionError, match="surely read densely"):
                import_session(store, session, space)


def test_a_session_of_whole_segments_that_does_not_say_how_it_was_read(store, cold_dir, tmp_path):
    model = TinyModel().build()
    with attached(model, cold_dir) as hill:
        cache = hill.new_cache()
        read(model, cache, ids_of(2048))
        cache.save_session(tmp_path / "unsaid")
        cache.save_session(tmp_path / "said", chunk_tokens=256)
    space = StoredPrompts(store, model).namespace
    for name, dense in (("unsaid", 2048 - 64), ("said", 2048)):
        with SavedSession(tmp_path / name) as session:
            assert import_session(store, session, space).dense_tokens == dense


def test_a_damaged_session_is_not_imported(store, cold_dir, tmp_path):
    model = TinyModel().build()
    with attached(model, cold_dir) as hill:
        cache = hill.new_cache()
        read(model, cache, ids_of(1200))
        cache.save_session(tmp_path / "saved")
    space = StoredPrompts(store, model).namespace
    shutil.copytree(tmp_path / "saved", tmp_path / "other")
    rows = tmp_path / "other" / "rows-0001.bin"
    data = bytearray(rows.read_bytes())
    data[500] ^= 1
    rows.chmod(0o600)
    rows.write_bytes(data)
    with (
        SavedSession(tmp_path / "other") as session,
        pytest.raises(HillInferError, match="changed"),
    ):
        import_session(store, session, space)
    with SavedSession(tmp_path / "saved") as session:
        assert import_session(store, session, space).stored_tokens == 1152
