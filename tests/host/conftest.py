# SPDX-License-Identifier: Apache-2.0
"""Models on a drive and budgets that the host's tests share."""

import sys

import pytest


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A tiny random Llama with a tokenizer of characters and a chat template."""
    from tiny_folder import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def least_budget():
    """Return a function that gives the least bytes a tiny model can run a context with."""
    from generation_runs import SETTINGS

    from hillinfer.engine.budget_plan import BudgetPlan
    from hillinfer.model_shape import ModelShape
    from hillinfer.settings import Settings

    def least(tiny, tokens, sequences=1, **changes):
        shape = ModelShape.from_config(tiny.config(), tiny.dtype)
        settings = Settings().changed(**(SETTINGS | changes))
        return BudgetPlan.with_whole_shadow(shape, settings, tokens, sequences).required_bytes

    return least


@pytest.fixture
def hub_cache(monkeypatch, tmp_path):
    """An empty cache of the hub's library, which finds no network."""
    # Read when the library is imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture(autouse=True)
def threads_of_torch():
    """Fail a test that leaves torch with other threads: forks of a later one would hang in it."""
    before = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
    yield
    if before is not None:
        after = sys.modules["torch"].get_num_threads()
        sys.modules["torch"].set_num_threads(before)
        assert after == before, f"torch was left with {after} threads, not {before}"


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory):
    """What starts Python where importing models' libraries takes no time; see warm.py."""
    from warm import WarmPython

    process = WarmPython(tmp_path_factory.mktemp("warm"))
    yield process.command
    process.close()
