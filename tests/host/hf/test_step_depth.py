# SPDX-License-Identifier: Apache-2.0
"""How far a decode step goes into Python where all rows are hot: calls deep, and files crossed."""

import sys
from pathlib import Path

import pytest
import torch
from generation_runs import attached
from tiny_models import TinyModel, prompts

import hillinfer
import hillinfer_model

PACKAGES = [Path(one.__file__).parent for one in (hillinfer, hillinfer_model)]
# Deep: a whole layer in the attention function and in the hook that announces, itself included.
MOST_DEEP = 6
# Of a whole step: what it asks once, and what every layer asks. Where tokens are coded it asks for
# their values' codes, too, and for memory that exact and coded tokens are chosen in.
MOST_FILES = {"exact": 18, "coded": 20}
# Where a layer's turn begins, and which call of it that is.
ENTRIES = {("hf/attention.py", "attention"): 1, ("hf/cache_pass.py", "announce"): 2}


def name_of(file):
    """Return a file's name within its package, None where it is none of ours."""
    return next((file[len(str(one)) + 1 :] for one in PACKAGES if file.startswith(f"{one}/")), None)


class Calls:
    """Notes, from the entries on, how deep calls of the packages are, and all their files."""

    def __init__(self):
        self.files = set()
        self.deepest = dict.fromkeys(ENTRIES, ())
        self._stack = []

    def note(self, frame, event, _):
        code = frame.f_code
        name = name_of(code.co_filename)
        if event not in ("call", "return") or name is None:
            return
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
def query(request):
    return request.param


# All selected tokens in 16 bits, and most of them as codes.
FORMS = {"exact": {}, "coded": {"exact": 0.02, "exact_floor": 10}}


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


@pytest.fixture(params=[1, 2], ids=["one thread", "another thread chooses"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=["32MiB", "400%"], ids=["budget in bytes", "budget that follows"])
def steps(request, query, form, threads, cold_dir):
    """Return a function that takes one step of a tiny model, all rows of which are hot."""
    model = TinyModel(head_dim=32, layers=4).build()
    ids, _ = prompts([200])
    settings = {"query": query, "alpha": 0.2, "kept_recent": 4, "dram_budget": request.param}
    settings |= FORMS[form]
    with attached(model, cold_dir, **settings) as hill, torch.no_grad():
        cache = hill.new_cache()
        model(ids, past_key_values=cache)

        def step():
            model(torch.tensor([[5]]), past_key_values=cache)

        for _ in range(3):
            step()
        yield cache, step
        cache.close()


def test_a_step_is_few_calls_deep_and_crosses_few_files(query, form, steps):
    cache, step = steps
    before = cache.statistics()
    with Calls() as calls:
        step()
    after = cache.statistics()
    assert after.cold_rows_read == before.cold_rows_read, "a row was cold"
    assert after.hot_rows_read > before.hot_rows_read
    assert (after.coded_tokens > before.coded_tokens) == (form == "coded")
    deepest = calls.deepest["hf/attention.py", "attention"]
    assert 3 < len(deepest) <= MOST_DEEP, deepest
    deepest = calls.deepest["hf/cache_pass.py", "announce"]
    assert len(deepest) <= MOST_DEEP, deepest
    assert (len(deepest) > 3) == (query == "predicted")
    assert len(calls.files) <= MOST_FILES[form], " ".join(sorted(calls.files))


def test_a_step_with_a_part_after_the_other_is_deeper(form, steps):
    """The twin: what is measured is seen."""
    from twins.python_coded import PythonCodedStep
    from twins.python_decode import PythonDecode

    cache, step = steps
    twin = {"exact": PythonDecode, "coded": PythonCodedStep}[form]
    twin.instead(cache.engine.runtime)
    with Calls() as calls:
        step()
    assert len(calls.deepest["hf/attention.py", "attention"]) > MOST_DEEP
    assert len(calls.files) > MOST_FILES[form], " ".join(sorted(calls.files))


@pytest.mark.parametrize(("tokens", "apart"), [(150, False), (125, True)])
def test_a_step_of_joined_caches_makes_no_call_for_each_row(query, cold_dir, tokens, apart):
    """But for one whose group becomes full with the token, where all rows are hot."""
    model = TinyModel(head_dim=32, layers=4).build()
    settings = {"query": query, "alpha": 0.2, "kept_recent": 4, "dram_budget": "32MiB"}
    with attached(model, cold_dir, **settings) as hill, torch.no_grad():
        caches = [hill.new_cache() for _ in range(3)]
        for cache, length in zip(caches, (200, 100, tokens), strict=True):
            model(prompts([length])[0], past_key_values=cache)
        ids = torch.tensor([[5]] * 3)
        for _ in range(2):
            model(**hill.join(caches).inputs(ids))
        given = hill.join(caches).inputs(ids)
        with Calls() as calls:
            model(**given)
        assert "engine/joined_step.py" in calls.files
        assert ("engine/decode_step.py" in calls.files) is apart
        for cache in caches:
            cache.close()
