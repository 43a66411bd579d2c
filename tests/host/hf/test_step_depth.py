# SPDX-License-Identifier: Apache-2.0
"""How far a decode step goes into Python where all rows are hot: calls deep, and files crossed."""

import sys
from pathlib import Path

import pytest
import torch
from generation_runs import attached
from tiny_models import TinyModel, prompts

import hillinfer

PACKAGE = str(Path(hillinfer.__file__).parent)
# Deep: a whole layer in the attention function and in the hook that announces, itself included.
MOST_DEEP = 6
# Files are to be 20; what is above is asked once a step and not once a layer, for the most part.
MOST_FILES = {"true": 32, "predicted": 34}
# Where a layer's turn begins, and which call of it that is.
ENTRIES = {("hf/attention.py", "attention"): 1, ("hf/cache_pass.py", "announce"): 2}


class Calls:
    """Notes, from the entries on, how deep calls of the package are, and all its files."""

    def __init__(self):
        self.files = set()
        self.deepest = dict.fromkeys(ENTRIES, ())
        self._stack = []

    def note(self, frame, event, _):
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        name = code.co_filename[len(PACKAGE) + 1 :]
        if event == "return":
            if self._stack and self._stack[-1][0] is frame:
                self._stack.pop()
                if self._stack and self._stack[-1][0] is None:
                    self._stack = []
            return
        self.files.add(name)
        at = ENTRIES.get((name, code.co_name))
        if at is None and not self._stack:
            return
        if not self._stack:
            # The hook that announces asks a predictor first, which is none of what it sets going.
            self._stack = [(None, "its caller")] * (at - 1)
            self._entry = (name, code.co_name)
        self._stack.append((frame, f"{name}:{code.co_name}"))
        chain = tuple(one for _, one in self._stack)
        if len(chain) > len(self.deepest[self._entry]):
            self.deepest[self._entry] = chain

    def __enter__(self):
        sys.setprofile(self.note)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)


@pytest.fixture(params=["true", "predicted"])
def steps(request, cold_dir):
    """Return a function that takes one step of a tiny model, all rows of which are hot."""
    model = TinyModel(head_dim=32, layers=4).build()
    ids, _ = prompts([200])
    settings = {"query": request.param, "alpha": 0.2, "kept_recent": 4, "dram_budget": "32MiB"}
    with attached(model, cold_dir, **settings) as hill, torch.no_grad():
        cache = hill.new_cache(300)
        model(ids, past_key_values=cache)

        def step():
            model(torch.tensor([[5]]), past_key_values=cache)

        for _ in range(3):
            step()
        yield request.param, cache, step
        cache.close()


def test_a_step_is_few_calls_deep_and_crosses_few_files(steps):
    query, cache, step = steps
    before = cache.statistics()
    with Calls() as calls:
        step()
    after = cache.statistics()
    assert after.cold_rows_read == before.cold_rows_read, "a row was cold"
    assert after.hot_rows_read > before.hot_rows_read
    deepest = calls.deepest["hf/attention.py", "attention"]
    assert 3 < len(deepest) <= MOST_DEEP, deepest
    deepest = calls.deepest["hf/cache_pass.py", "announce"]
    assert len(deepest) <= MOST_DEEP, deepest
    assert (len(deepest) > 3) == (query == "predicted")
    assert len(calls.files) <= MOST_FILES[query], " ".join(sorted(calls.files))


def test_a_step_with_a_part_after_the_other_is_deeper(steps):
    """The twin: what is measured is seen."""
    from twins.python_decode import PythonDecode

    _, cache, step = steps
    PythonDecode.instead(cache.engine.runtime)
    with Calls() as calls:
        step()
    assert len(calls.deepest["hf/attention.py", "attention"]) > MOST_DEEP
