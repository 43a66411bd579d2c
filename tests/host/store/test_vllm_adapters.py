# SPDX-License-Identifier: Apache-2.0
"""Adapters under vLLM's connector: equal ones find each other's rows, others never do."""

import pytest
from test_vllm_steps import IDS, adapter_in, opened, space

from hillinfer_vllm.adapters import Adapters, UnknownAdapterError

# Fixtures of the steps' tests.
__all__ = ["opened", "space"]
FULL = len(IDS) // 64 * 64


def adapter_folder(folder, weights=b"adapter", settings=b"{}"):
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_bytes(settings)
    return folder


@pytest.fixture
def read(opened):
    """Read by an engine that is restarted each time; return how many tokens the store gave."""

    def told(adapter=None, **more):
        return opened().read("a", IDS, adapter=adapter, **more)[1]

    return told


def test_an_equal_adapter_finds_its_rows_whatever_it_is_called(read, tmp_path):
    one = adapter_folder(tmp_path / "one")
    again = adapter_folder(tmp_path / "again")
    assert read(adapter_in(one)) == 0
    assert read(adapter_in(one)) >= FULL - 32
    assert read(adapter_in(again, number=7)) >= FULL - 32


@pytest.mark.parametrize("changed", [{"weights": b"adapteR"}, {"settings": b'{"r": 8}'}])
def test_another_adapter_is_always_a_miss(read, tmp_path, changed):
    one = adapter_folder(tmp_path / "one")
    other = adapter_folder(tmp_path / "other", **changed)
    assert read(adapter_in(one)) == 0
    assert read(adapter_in(other)) == 0
    assert read() == 0
    assert read(adapter_in(one), salt="x") == 0
    # What was stored in between by others changes nothing.
    assert read(adapter_in(one)) >= FULL - 32
    assert read() >= FULL - 32


def test_an_adapter_of_this_name_that_changed_is_refused_from_then_on(tmp_path):
    folder, adapters = adapter_folder(tmp_path / "one"), Adapters()
    found = adapters.digest(adapter_in(folder))
    assert adapters.digest(adapter_in(folder, number=2)) == found
    whole = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(b"adapted")
    with pytest.raises(UnknownAdapterError, match="changed while the engine ran"):
        adapters.digest(adapter_in(folder))
    (folder / "adapter_model.safetensors").write_bytes(whole)
    with pytest.raises(UnknownAdapterError, match="changed while the engine ran"):
        adapters.digest(adapter_in(folder))
    # One of a new number has what lies there now.
    assert adapters.digest(adapter_in(folder, number=3)) == found


def test_what_is_loaded_over_another_is_refused(tmp_path):
    folder = adapter_folder(tmp_path / "one")
    with pytest.raises(UnknownAdapterError, match="changed"):
        Adapters().digest(adapter_in(folder, load_inplace=True))


@pytest.mark.parametrize("missing", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_without_its_files_is_unknown(tmp_path, missing):
    folder = adapter_folder(tmp_path / "one")
    (folder / missing).unlink()
    with pytest.raises(UnknownAdapterError, match="does not lie in a directory"):
        Adapters().digest(adapter_in(folder))


def test_the_type_that_adapters_are_computed_in_tells_them_apart(tmp_path):
    folder = adapter_folder(tmp_path / "one")
    kinds = ("torch.float16", "torch.bfloat16")
    assert len({Adapters(kind).digest(adapter_in(folder)) for kind in kinds}) == 2
