# SPDX-License-Identifier: Apache-2.0
"""What was damaged, changed or never fitted is refused with the reason."""

import json
import os
import shutil
import time
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from faulty_calls import FAULTS, HARMLESS, FaultyCalls, Injection
from generation_runs import attached, attached_with
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from session_runs import content_of, flip_bit, seal, seal_checksums
from tiny_folder import character_tokenizer
from tiny_models import TinyModel

import hillinfer
from hillinfer.errors import ColdPoolError, SessionError
from hillinfer.hf.attach import Attachment
from hillinfer.sessions.fingerprint import FIXES, Fingerprint, tokenizer_digest, weights_digest
from hillinfer.sessions.manifest import Manifest
from hillinfer.sessions.opening import SavedSession
from hillinfer_model.choices import KeyMode

FILES = (
    *("session.json", "tokens.bin", "tails.bin", "coded.bin", "statistics.bin", "shadow.bin"),
    *("hits.bin", "rows-0000.bin", "rows-0001.bin"),
)


def opened(directory):
    """Open and check a session; only a SessionError may come out of it."""
    with SavedSession(directory) as saved:
        saved.verify()
        return saved.token_ids()


def cut(file):
    os.truncate(file, file.stat().st_size - 1)


def emptied(file):
    os.truncate(file, 0)


def extended(file):
    with file.open("ab") as end:
        end.write(b"\0")


def missing(file):
    file.unlink()


def flipped(file):
    flip_bit(file, file.stat().st_size // 2)


def a_link(file):
    elsewhere = file.parent.parent / f"{file.name}.elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def a_directory(file):
    file.unlink()
    file.mkdir()


def a_pipe(file):
    file.unlink()
    os.mkfifo(file)


def unreadable(file):
    if os.geteuid() == 0:
        pytest.skip("root reads every file: run the tests as another user")
    file.chmod(0)


DAMAGES = (cut, emptied, extended, missing, flipped, a_link, a_directory, a_pipe, unreadable)


def test_an_undamaged_session_opens(saved):
    assert len(opened(saved)) == 2200
    assert {file.name for file in saved.iterdir()} == {*FILES, "observed.bin"}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_damage_to_every_file(saved, damage):
    for name in FILES:
        shutil.copytree(saved, saved.parent / name, symlinks=True)
        damage(saved.parent / name / name)
        with pytest.raises(SessionError, match=r"read the document again") as refused:
            opened(saved.parent / name)
        assert name in str(refused.value) or name == "session.json"


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_damage_to_observed_queries(observing, saved_observed, damage):
    file = saved_observed / "observed.bin"
    # Sixteen of each layer, float32.
    assert file.stat().st_size == 2 * 16 * 4 * 8 * 4
    damage(file)
    with pytest.raises(SessionError, match=r"observed\.bin.*read the document again"):
        observing.load_session(saved_observed)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_observed_queries_that_are_no_numbers(observing, saved_observed, number):
    file = saved_observed / "observed.bin"
    queries = np.fromfile(file, "<f4")
    queries[700] = number
    file.write_bytes(queries.tobytes())
    seal_checksums(saved_observed)
    with pytest.raises(SessionError, match=r"observed\.bin holds queries without end"):
        observing.load_session(saved_observed)


def test_a_file_that_is_not_its_own(saved):
    (saved / "note\n.txt").write_text("mine")
    with pytest.raises(SessionError, match=r"not its own, 'note\\n.txt'"):
        opened(saved)


def test_no_session_at_all(tmp_path, saved):
    for place in (tmp_path / "nowhere", saved / "tokens.bin"):
        with pytest.raises(SessionError, match="there is no session"):
            opened(place)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SessionError, match=r"session\.json is missing"):
        opened(tmp_path / "empty")


def test_a_manifest_that_is_too_large_is_not_read(saved):
    with (saved / "session.json").open("ab") as manifest:
        manifest.write(b" " * (64 << 20))
    with pytest.raises(SessionError, match="too large"):
        opened(saved)


def test_a_later_format(saved):
    content = content_of(saved)
    content["format_version"] = 2
    seal(saved, content)
    with pytest.raises(
        SessionError, match="format version is 2 in the session and 1 here; read the document again"
    ):
        opened(saved)


OTHER = {
    "contract_version": 2,
    "segment_tokens": 2048,
    "layers": 3,
    "kv_heads": 4,
    "query_heads": 8,
    "head_dim": 16,
    "compute_type": "bfloat16",
    "stored_type": "bfloat16",
    "rotary": "{}",
    "config": "0" * 64,
    "shadow": "int8",
    "tokenizer": "0" * 64,
    "weights": "0" * 64,
}


@pytest.mark.parametrize("field", [field.name for field in fields(Fingerprint)])
def test_every_field_of_a_fingerprint_that_differs(attachment, saved, field):
    assert OTHER.keys() == FIXES.keys()
    with SavedSession(saved) as session:
        own = session.manifest.fingerprint
    own = replace(own, tokenizer=tokenizer_digest(character_tokenizer()))
    own.check(own, saved)
    found = replace(own, **{field: OTHER[field]})
    assert found != own
    with pytest.raises(SessionError) as refused:
        own.check(found, saved)
    message = str(refused.value)
    for part in (
        field.replace("_", " "),
        f"{getattr(own, field)} in the session",
        f"{OTHER[field]} here",
        FIXES[field],
    ):
        assert part in message


MODELS = {
    "weights": (TinyModel(seed=99), {}),
    "compute type": (TinyModel(dtype=torch.bfloat16), {}),
    "layers": (TinyModel(layers=3), {}),
    "head dim": (TinyModel(head_dim=16), {}),
    "kv heads": (TinyModel(heads="mha"), {}),
    "config": (TinyModel("qwen2"), {}),
    "shadow": (TinyModel(), {"shadow": "int8"}),
}


@pytest.mark.parametrize("named", MODELS)
def test_another_model_or_shadow(saved, cold_dir, named):
    tiny, changes = MODELS[named]
    with (
        attached(tiny.build(), cold_dir, **changes) as hill,
        pytest.raises(SessionError, match=f"does not fit: {named} is "),
    ):
        hill.load_session(saved)


def test_other_rotary_settings(saved, cold_dir):
    model = TinyModel().build()
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 5.0}
    with (
        attached(model, cold_dir) as hill,
        pytest.raises(SessionError, match=r"does not fit: rotary is .*10000.* and .*5\.0"),
    ):
        hill.load_session(saved)


def test_auto_takes_the_shadow_of_the_session(saved, tiny_model, cold_dir, attachment):
    chosen = hillinfer.Settings().changed(cold_dir=cold_dir, dram_budget="24MiB")
    with Attachment(TinyModel().build(), replace(chosen, shadow=None)) as hill:
        assert hill.load_session(saved).engine.runtime.settings.shadow is KeyMode.INT4


def test_another_tokenizer(attachment, saved, tmp_path):
    cache = attachment.load_session(saved, tokenizer=character_tokenizer())
    session = tmp_path / "with tokenizer"
    cache.save_session(session, tokenizer=character_tokenizer())
    attachment.load_session(session, tokenizer=character_tokenizer())
    attachment.load_session(session)
    for other in (character_tokenizer(chat_template=None), character_tokenizer()):
        if other.chat_template:
            other.add_tokens(["<new>"])
        with pytest.raises(SessionError, match="tokenizer is"):
            attachment.load_session(session, tokenizer=other)


def test_a_tokenizer_that_was_used_is_the_same():
    used = character_tokenizer()
    before = tokenizer_digest(used)
    used.pad_token = "<e>"
    used(["a cat", "a"], padding=True, truncation=True, max_length=3)
    assert tokenizer_digest(used) == before


def test_weights_that_differ_in_one_bit_a_name_or_a_type():
    model = TinyModel().build()
    own = weights_digest(model)
    assert weights_digest(TinyModel().build()) == own
    digests = {own, weights_digest(TinyModel().build().half())}
    name, weight = next(iter(model.named_parameters()))
    with torch.no_grad():
        weight.view(torch.int32).view(-1)[-1] ^= 1
    digests.add(weights_digest(model))
    with torch.no_grad():
        weight.view(torch.int32).view(-1)[-1] ^= 1
    assert weights_digest(model) == own
    model.register_parameter("another", torch.nn.Parameter(weight.detach().clone()))
    digests.add(weights_digest(model))
    assert len(digests) == 4, name


def test_content_outside_the_contract_is_refused_though_it_was_sealed(attachment, saved):
    for name, change in (
        ("coded.bin", lambda data: data.view("<i4").__setitem__(0, 5000)),
        ("coded.bin", lambda data: data.view("<i4").__setitem__(0, -2)),
        ("statistics.bin", lambda data: data.__setitem__(0, 100)),
        ("tokens.bin", lambda data: data.view("<i4").__setitem__(7, -1)),
    ):
        file = saved / name
        before = file.read_bytes()
        data = np.frombuffer(bytearray(before), np.uint8)
        change(data)
        file.write_bytes(data.tobytes())
        seal_checksums(saved)
        with pytest.raises(SessionError, match=name.replace(".", r"\.")):
            attachment.load_session(saved)
        file.write_bytes(before)
        seal_checksums(saved)
    attachment.load_session(saved)


# --- fuzz -------------------------------------------------------------------------------------

QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["chat", "int4", "float16", "0" * 64]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=4,
)


def paths_of(content, path=()):
    if path:
        yield path
    if isinstance(content, dict):
        for key, value in content.items():
            yield from paths_of(value, (*path, key))


@QUICK
@given(data=st.data())
def test_fuzzed_values_of_a_sealed_manifest(saved, data):
    original = (saved / "session.json").read_bytes()
    content = content_of(saved)
    path = data.draw(st.sampled_from(list(paths_of(content))))
    *parents, last = path
    place = content
    for key in parents:
        place = place[key]
    before, place[last] = place[last], data.draw(VALUES)
    try:
        try:
            seal(saved, content)
        except ValueError:
            (saved / "session.json").write_text(json.dumps(content))
        try:
            opened(saved)
        except SessionError:
            return
        # What the session itself cannot know is a claim about its origin, and compared on use.
        harmless = path[0] in ("chunk_tokens", "prompt_form") or path[-1] in (
            *("compute_type", "rotary", "config", "tokenizer", "weights", "contract_version"),
        )
        assert harmless or place[last] == before, (path, place[last])
    finally:
        (saved / "session.json").write_bytes(original)


@QUICK
@given(data=st.data())
def test_fuzzed_bytes_of_any_file(saved, data):
    name = data.draw(st.sampled_from(FILES))
    original = (saved / name).read_bytes()
    start = data.draw(st.integers(0, len(original)))
    end = data.draw(st.integers(start, min(len(original), start + 40)))
    changed = original[:start] + data.draw(st.binary(max_size=40)) + original[end:]
    (saved / name).write_bytes(changed)
    try:
        if changed == original:
            opened(saved)
        else:
            with pytest.raises(SessionError):
                opened(saved)
    finally:
        (saved / name).write_bytes(original)


@QUICK
@given(data=st.binary(max_size=300) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_for_a_manifest(saved, data):
    original = (saved / "session.json").read_bytes()
    (saved / "session.json").write_bytes(data)
    with pytest.raises(SessionError):
        opened(saved)
    (saved / "session.json").write_bytes(original)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "9" * 10_000, '{"a": NaN}', '"\\ud800"', "{}", "[]"]
)
def test_odd_json(saved, text):
    (saved / "session.json").write_text(text)
    with pytest.raises(SessionError):
        opened(saved)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 1 << 36},
        {"tokens": 1, "segments": 1, "observed_queries": 1 << 16},
        {"observed_queries": 1 << 39},
        {"tokens": (1 << 40) + 1},
        {"segments": 1 << 39},
    ],
    ids=str,
)
def test_holes_of_any_size_are_refused_at_once(saved, change):
    """Sealed by somebody who knows the format; reading terabytes of nothing would take hours."""
    content = content_of(saved)
    content["extent"].update(change)
    # So that few queries take much, too.
    content["fingerprint"].update(kv_heads=4, query_heads=4 << 12)
    seal(saved, content)
    try:
        sizes = Manifest.parse((saved / "session.json").read_bytes(), saved).file_bytes
    except SessionError:
        sizes = {}
    for name, size in sizes.items():
        os.truncate(saved / name, size)
    started = time.monotonic()
    with pytest.raises(SessionError, match=r"nearly all of it is holes|makes no sense"):
        opened(saved)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    "name", ["../tokens.bin", "/etc/passwd", "tokens.bin/../x", "", ".", "a\0b", "rows-0000.bin "]
)
def test_a_name_that_leads_elsewhere_is_no_name_of_a_session(saved, name):
    content = content_of(saved)
    content["digests"][name] = content["digests"].pop("tokens.bin")
    seal(saved, content)
    with pytest.raises(SessionError, match="digests do not name the files"):
        opened(saved)


def test_a_key_that_is_there_twice_is_refused(saved):
    file = saved / "session.json"
    file.write_text(file.read_text().replace("{", '{"chunk_tokens": 7,', 1))
    with pytest.raises(SessionError, match="its digest does not fit"):
        opened(saved)


# --- a drive that fails -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["open", "preadv", "close"])
def test_every_call_that_fails_while_loading(saved, cold_dir, kind):
    model = TinyModel().build()
    calls = FaultyCalls(delay_seconds=0.001)
    with attached_with(model, cold_dir, {"calls": calls}) as hill:
        hill.load_session(saved).close()
        count = calls.counts[kind]
        assert count > 8
        for index in {0, count // 3, count // 2, count - 1}:
            for fault in FAULTS[kind]:
                calls.begin(Injection(kind, index, fault))
                try:
                    cache = hill.load_session(saved)
                except (SessionError, ColdPoolError) as error:
                    failed = error
                else:
                    failed = None
                    assert cache.get_seq_length() == 2200
                    cache.close()
                assert calls.hits == 1
                assert failed is None or fault not in HARMLESS
