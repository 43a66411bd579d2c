# SPDX-License-Identifier: Apache-2.0
"""Saved sessions that the tests here share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# Drives that fail on purpose.
sys.path.insert(0, str(Path(__file__).parent.parent / "faults"))


@pytest.fixture(scope="session")
def tiny_model():
    """A tiny model that no test here changes."""
    from session_runs import TINY

    return TINY.build()


@pytest.fixture(scope="session")
def attachment(tiny_model, tmp_path_factory):
    """HillInfer on that model, with a cold pool on the drive of the sessions."""
    from generation_runs import attached

    with attached(tiny_model, tmp_path_factory.mktemp("cold")) as hill:
        yield hill


@pytest.fixture(scope="session")
def _whole(attachment, tmp_path_factory):
    from session_runs import IDS, feed

    directory = tmp_path_factory.mktemp("whole") / "session"
    cache = attachment.new_cache()
    feed(attachment.model, cache, IDS)
    cache.save_session(directory)
    cache.close()
    return directory


@pytest.fixture
def saved(_whole, tmp_path):
    """A saved session of one's own, to be damaged."""
    import shutil

    shutil.copytree(_whole, tmp_path / "session")
    return tmp_path / "session"


@pytest.fixture
def observing(tmp_path_factory):
    """HillInfer with a pool policy that counts what the last queries of a prompt select."""
    from generation_runs import attached
    from session_runs import TINY

    # A model of its own: HillInfer is on the other one.
    with attached(TINY.build(), tmp_path_factory.mktemp("cold"), pool_policy="paper") as hill:
        yield hill


@pytest.fixture
def saved_observed(observing, tmp_path):
    """A saved session of a short text, with queries that are not counted yet."""
    from session_runs import IDS, feed

    cache = observing.new_cache()
    feed(observing.model, cache, IDS[:, :150])
    cache.save_session(tmp_path / "session")
    cache.close()
    return tmp_path / "session"
