# SPDX-License-Identifier: Apache-2.0
"""What is built is built once, by whoever asks first, and whole."""

import threading
from functools import partial

import pytest

from hillinfer_hw import build_cache

ENOUGH = 60


@pytest.fixture
def cached(tmp_path):
    return partial(build_cache.cached, build=tmp_path)


def test_other_content_is_another_build(cached):
    made = []
    folders = [
        cached("kind", sources, lambda folder: made.append(folder))
        for sources in ([b"a", b"bc"], [b"ab", b"c"], [b"a", b"bc"])
    ]
    assert folders[0] == folders[2] != folders[1]
    assert len(made) == 2


def test_who_asks_meanwhile_waits(cached):
    begun, twice, go_on, found = threading.Event(), threading.Event(), threading.Event(), []

    def make(folder):
        (twice if begun.is_set() else begun).set()
        assert go_on.wait(ENOUGH)
        (folder / "output").write_text("whole")

    def ask():
        found.append((cached("kind", [b"source"], make) / "output").read_text())

    threads = [threading.Thread(target=ask) for _ in range(2)]
    threads[0].start()
    assert begun.wait(ENOUGH)
    threads[1].start()
    assert not twice.wait(0.5)
    go_on.set()
    for thread in threads:
        thread.join(ENOUGH)
    assert found == ["whole", "whole"]
    assert not twice.is_set()


def test_a_build_that_fails_leaves_nothing_to_be_found(cached, tmp_path):
    def fail(folder):
        (folder / "output").write_text("half")
        raise RuntimeError("no compiler")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no compiler"):
            cached("kind", [b"source"], fail)
    assert not [path for path in (tmp_path / "kind").iterdir() if path.is_dir()]
    assert cached("kind", [b"source"], lambda folder: None).is_dir()
