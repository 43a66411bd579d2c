# SPDX-License-Identifier: Apache-2.0
"""Rates are measured once, for one machine and kernel, and kept where only their owner reads."""

import json
import stat
from dataclasses import fields, replace

import pytest

from hillinfer.doctor.diagnosis import rates_findings
from hillinfer.errors import SetupWarning
from hillinfer.rates.kept_rates import VERSION, KeptRates, Rates, RatesKey
from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.kernel_spec import KernelSpec

KEY = RatesKey(
    "a processor", 8, 4, "ext4", "259", "uring", "cd" * 32, "ab" * 32, "layer", 1024, "core", ""
)
RATES = Rates(1e6, float("inf"), 0.0, 2.5, 1.5e-4)


def never():
    raise AssertionError("kept rates are not measured again")


@pytest.fixture
def kept(tmp_path):
    return KeptRates(tmp_path / "rates.json")


def test_they_are_measured_once(kept):
    assert kept.get(KEY, lambda: RATES) == RATES
    assert KeptRates(kept.file).get(KEY, never) == RATES
    assert stat.S_IMODE(kept.file.stat().st_mode) == 0o600
    assert [one.name for one in kept.file.parent.iterdir()] == [kept.file.name]


@pytest.mark.parametrize("name", [field.name for field in fields(RatesKey)])
def test_they_hold_for_nothing_else(kept, name):
    kept.get(KEY, lambda: RATES)
    value = getattr(KEY, name)
    other = replace(KEY, **{name: value + (1 if isinstance(value, int) else "x")})
    slower = replace(RATES, f_c=3.0)
    assert kept.get(other, lambda: slower) == slower
    assert dict(kept.all()) == {KEY: RATES, other: slower}


def changed(text):
    content = json.loads(text)
    yield text[: len(text) // 2]
    yield ""
    yield "[]"
    yield "null"
    for part in ("key", "rates"):
        for name in content["rates"][0][part]:
            broken = json.loads(text)
            broken["rates"][0][part][name] = None
            yield json.dumps(broken)
            del broken["rates"][0][part][name]
            yield json.dumps(broken)
    for part in ("key", "rates"):
        for other in (None, [1, 2], 3.0, "x"):
            broken = json.loads(text)
            broken["rates"][0][part] = other
            yield json.dumps(broken)
    content["rates"][0]["rates"]["f_c"] = -1
    yield json.dumps(content)


def test_a_damaged_file_is_made_again(kept):
    kept.get(KEY, lambda: RATES)
    faster = replace(RATES, f_c=9e9)
    for text in list(changed(kept.file.read_text())):
        kept.file.write_text(text)
        with pytest.warns(SetupWarning, match="measured again"):
            assert kept.get(KEY, lambda: faster) == faster
        assert kept.get(KEY, never) == faster


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"version": 2, "rates": [{"key": {"\\u001b[31m": 1}, "rates": {}}]}',
        '{"version": 2, "rates": [{"key": {"' + "a" * 9_000 + '": 1}, "rates": {}}]}',
    ],
    ids=["deep", "for a terminal", "long"],
)
def test_hostile_rates_are_damage_told_in_one_short_line(kept, text):
    kept.file.write_text(text)
    with pytest.warns(SetupWarning, match="measured again") as told:
        assert kept.all() == []
    message = str(told[0].message)
    assert message.isprintable()
    assert len(message) < 300 + len(str(kept.file))


def test_bytes_that_are_no_text_are_damage(kept):
    kept.file.write_bytes(b"\xff\xfe\x00")
    with pytest.warns(SetupWarning, match="cannot be used"):
        assert kept.all() == []


def test_another_version_is_no_damage(kept, recwarn):
    kept.get(KEY, lambda: RATES)
    content = json.loads(kept.file.read_text())
    content["version"] = VERSION + 1
    kept.file.write_text(json.dumps(content))
    assert kept.all() == []
    assert not [one for one in recwarn if issubclass(one.category, SetupWarning)]


def test_what_knew_no_cost_of_sharing_is_measured_again(kept, recwarn):
    kept.get(KEY, lambda: RATES)
    content = json.loads(kept.file.read_text())
    content["version"] = 1
    for one in content["rates"]:
        del one["rates"]["sharing"]
    kept.file.write_text(json.dumps(content))
    dearer = replace(RATES, sharing=3e-4)
    assert kept.get(KEY, lambda: dearer) == dearer
    assert kept.get(KEY, never) == dearer
    assert not [one for one in recwarn if issubclass(one.category, SetupWarning)]


def test_what_fails_to_measure_keeps_nothing(kept):
    def failing():
        raise OSError("no drive")

    with pytest.raises(OSError, match="no drive"):
        kept.get(KEY, failing)
    assert not kept.file.exists()


def test_what_cannot_be_kept_is_used_all_the_same(tmp_path):
    (tmp_path / "file").touch()
    nowhere = KeptRates(tmp_path / "file" / "rates.json")
    with pytest.warns(SetupWarning, match="every run measures them"):
        assert nowhere.get(KEY, lambda: RATES) == RATES


def test_a_link_is_replaced_and_not_followed(kept, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text('{"version": 0}')
    kept.file.symlink_to(victim)
    kept.get(KEY, lambda: RATES)
    assert victim.read_text() == '{"version": 0}'
    assert not kept.file.is_symlink()


def test_the_oldest_go_first(kept):
    for number in range(70):
        kept.get(replace(KEY, row_bytes=number), lambda: RATES)
    assert [key.row_bytes for key, _ in kept.all()] == list(range(6, 70))


def test_the_user_s_own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert KeptRates.of_user().file == tmp_path / "hillinfer" / "rates.json"


def test_a_line_for_each(kept):
    assert list(rates_findings(kept)) == []
    kept.get(KEY, lambda: Rates(1.5e6, 2e6, 3e6, 4e4, 2.5e-4))
    (found,) = rates_findings(kept)
    assert found.name == "rates of core"
    assert "fc 1.50 M tokens/s, fs 2.00 M" in found.found
    assert "Bs 0.04 M" in found.found
    assert "sharing 250 us a step" in found.found


def test_the_key_of_this_machine(tmp_path):
    def key(**changed):
        given = {
            "spec": KernelSpec(64, 2, 2, KeyMode.INT4), "scope": Scope.LAYER, "row_bytes": 512,
            "cold_dir": tmp_path, "io": "threads", "threads": 2, "device": "xrt", "xclbin": None,
        }  # fmt: skip
        return RatesKey.of(**{**given, **changed})

    assert key() == key()
    image = tmp_path / "image.xclbin"
    image.write_bytes(b"kernels")
    seen = {key(), key(xclbin=image), key(scope=Scope.KV_HEAD), key(device="core"), key(threads=1)}
    image.write_bytes(b"other kernels")
    seen |= {key(xclbin=image), key(spec=KernelSpec(64, 2, 2, KeyMode.INT8))}
    assert len(seen) == 7
