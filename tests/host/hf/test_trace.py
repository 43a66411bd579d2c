# SPDX-License-Identifier: Apache-2.0
"""A trace of real runs: every lane is in it, spans lie in their steps, and no token changes."""

from collections import Counter
from functools import partial
from itertools import pairwise

import pytest
import torch
from generation_runs import attached, attached_with, bits, run
from tiny_models import TinyModel, prompts
from trace_events import check, ends, load, spans

from hillinfer.engine.runtime import Runtime
from hillinfer.hf.cache import HillInferCache
from hillinfer.hf.engine import Engine
from hillinfer.hf.hooks import FIRST_PREDICTED
from hillinfer.model_shape import ModelShape
from hillinfer.scoring.scorer import ImportanceEvaluation
from hillinfer.trace.recorder import SILENT, Lane
from hillinfer_bench.figures.trace_figures import TraceRecord

LENGTH, CHUNKS, NEW, LAYERS = 1300, 3, 6, 4
TINY = TinyModel("llama", "gqa", torch.float32, layers=LAYERS)
CHANGES = {"shadow": "int4", "alpha": 0.1, "kept_recent": 6, "block_rows": 48}


@pytest.fixture(scope="module")
def model():
    return TINY.build()


def generated(model, cold_dir, budget, lengths=(LENGTH,), given=None, **changes):
    """Return the bits of a batch and the statistics of its cache; `given` goes to the runtime."""
    ids, mask = prompts(list(lengths))
    changes = CHANGES | {"dram_budget": budget} | changes
    opened = {"open_runtime": partial(Runtime, **(given or {}))}
    with attached_with(model, cold_dir, opened, **changes) as hill:
        cache = hill.new_cache(max(lengths) + NEW, len(lengths))
        output = run(model, cache, ids, mask, NEW, prefill_chunk_size=500)
        statistics = cache.statistics()
        cache.close()
    return bits(output), statistics


@pytest.fixture(scope="module")
def least(least_budget):
    """A budget that leaves rows next to nothing, so that they come from the drive."""
    return least_budget(TINY, LENGTH + NEW, **CHANGES)


@pytest.fixture(scope="module")
def traced(model, cold_dir, least, tmp_path_factory):
    file = tmp_path_factory.mktemp("trace") / "t.json"
    found, statistics = generated(model, cold_dir, least, trace=file)
    events = load(file)
    check(events)
    return file, events, found, statistics


def test_a_trace_changes_no_bit(model, cold_dir, least, traced):
    assert torch.equal(generated(model, cold_dir, least)[0], traced[2])


def test_another_selection_changes_bits(model, cold_dir, least, traced):
    """The twin: what is compared can differ."""
    assert not torch.equal(generated(model, cold_dir, least, alpha=0.05)[0], traced[2])


def test_every_lane_of_this_device_is_there(traced):
    assert {one["cat"] for one in spans(traced[1])} == set(Lane) - {Lane.DEVICE_SCORING}


def test_bytes_in_the_trace_are_those_of_the_statistics(traced):
    _, events, _, statistics = traced

    def total(lane, name):
        return sum(one["args"]["bytes"] for one in spans(events, lane, name))

    assert total("reads", "rows") == statistics.cold_read_bytes > 0
    assert total("writes", "rows") == statistics.cold_write_bytes > 0
    assert sum(one["args"]["reads"] for one in spans(events, "reads", "rows")) == (
        statistics.cold_reads
    )


def test_shadows_on_the_drive_are_read_and_written_in_the_trace(model, cold_dir, tmp_path):
    file = tmp_path / "t.json"
    ids, _ = prompts([LENGTH])
    with attached(model, cold_dir, trace=file, **CHANGES) as hill:
        shape = ModelShape.from_config(model.config, model.dtype)
        runtime = Runtime(shape, hill.settings, 24 << 20, cold_dir, shadow_limit_bytes=0)
        cache = HillInferCache(Engine(runtime))
        run(model, cache, ids, None, NEW, prefill_chunk_size=500)
        statistics = cache.statistics()
        cache.close()
    events = load(file)
    check(events)
    assert outside(events) == []
    read = [one["args"]["bytes"] for one in spans(events, "reads", "shadow")]
    assert sum(read) == statistics.shadow_read_bytes > 0
    written = [one["args"]["bytes"] for one in spans(events, "writes", "shadow")]
    assert sum(written) == statistics.shadow_write_bytes > 0


def test_every_layer_and_step_is_there_once(traced):
    events = traced[1]
    steps = spans(events, "steps", "step")
    # Three chunks of the prompt, and every new token but the last is read.
    tokens = [one["args"]["tokens"] for one in steps]
    assert tokens == [500, 500, 300] + [1] * (NEW - 1)
    assert len(tokens) == CHUNKS + NEW - 1
    assert [one["args"]["step"] for one in steps] == list(range(1, len(steps) + 1))
    once = {(step, layer): 1 for step in range(1, len(steps) + 1) for layer in range(LAYERS)}
    decoding = {key: 1 for key in once if key[0] > CHUNKS}
    assert counted(events, "steps", "attend") == counted(events, "copies", "store") == once
    assert counted(events, "host scoring", "score") == decoding
    before = {(step, None): 1 for step, layer in once if layer == 0}
    # A layer's query is predicted two layers ahead, from layer 2 on, in the model's time.
    announced = {key: 2 for key in decoding if key[1] + FIRST_PREDICTED < LAYERS}
    assert counted(events, "compute", "model") == once | before | announced


def counted(events, lane, name):
    return Counter(
        (one["args"]["step"], one["args"].get("layer")) for one in spans(events, lane, name)
    )


def scored_by_thread(events):
    """Return which layers are scored, for each thread that does."""
    layers = {}
    for one in spans(events, "host scoring", "score"):
        layers.setdefault(one["tid"], set()).add(one["args"]["layer"])
    return list(layers.values())


class Unhurried(ImportanceEvaluation):
    """Takes so long that another thread is to score."""

    is_fast = False


def test_predicted_queries_are_scored_by_a_thread_of_their_own(model, cold_dir, least, tmp_path):
    # So few tokens would be scored by whoever announces them.
    given = {"evaluate": Unhurried}
    first, ahead = set(range(FIRST_PREDICTED)), tmp_path / "ahead.json"
    generated(model, cold_dir, least, given=given, trace=ahead)
    assert sorted(scored_by_thread(load(ahead)), key=min) == [first, set(range(LAYERS)) - first]
    # The twin: with the layers' own queries nothing is ahead.
    file = tmp_path / "t.json"
    generated(model, cold_dir, least, given=given, trace=file, query="true")
    assert scored_by_thread(load(file)) == [set(range(LAYERS))]


def test_few_tokens_are_scored_where_they_are_announced(traced):
    assert scored_by_thread(traced[1]) == [set(range(LAYERS))]


def outside(events):
    """Return spans that the model waits for and that do not lie in their step."""
    steps = {one["args"]["step"]: ends(one) for one in spans(events, "steps", "step")}
    found = []
    for one in spans(events):
        # The background may go on after a step, and what it writes may wait until one after.
        background = one["cat"] in (Lane.COPIES, Lane.WRITES) and one["name"] != "store"
        if background or one["name"] == "put off":
            continue
        begin, end = steps[one["args"]["step"]]
        start, stop = ends(one)
        if not begin <= start <= stop <= end:
            found.append(one)
    return found


def test_spans_lie_in_their_steps(traced):
    assert outside(traced[1]) == []


def test_a_span_of_another_step_is_found(traced, tmp_path):
    """The twin: the same spans, one of them with the next step's number."""
    events = load(traced[0])
    one = spans(events, "host scoring", "score")[0]
    one["args"]["step"] += 1
    assert outside(events) == [one]


def test_the_model_computes_nothing_while_the_cache_does(traced):
    """One thread does one thing at a time."""
    for step in spans(traced[1], "steps", "step"):
        own = [one for one in spans(traced[1]) if one["args"]["step"] == step["args"]["step"]]
        parts = sorted(ends(one) for one in own if one["name"] in ("model", "store", "attend"))
        assert all(one[1] <= other[0] for one, other in pairwise(parts))
        assert sum(stop - start for start, stop in parts) <= ends(step)[1] - ends(step)[0]


def test_steps_of_a_batch_read_back(model, cold_dir, tmp_path):
    file = tmp_path / "t.json"
    generated(model, cold_dir, "24MiB", (LENGTH, 700), trace=file)
    check(load(file))
    record = TraceRecord.read(file)
    assert len(record.decode_steps) == NEW - 1
    trace = record.step(record.median_step)
    # Two sequences are scored in each layer.
    assert len([one for one in trace.of(Lane.HOST_SCORING) if one.name == "score"]) == 2 * LAYERS
    assert 0 < trace.busy(Lane.COMPUTE) < trace.nanoseconds


def test_a_forward_pass_that_breaks_off_is_no_step(model, cold_dir, tmp_path):
    file = tmp_path / "t.json"
    ids, _ = prompts([150])
    with attached(model, cold_dir, trace=file) as hill, torch.no_grad():
        cache = hill.new_cache()
        model(ids, past_key_values=cache)
        norm = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, :1], past_key_values=cache)
        norm.remove()
        model(ids[:, :1], past_key_values=cache)
        cache.close()
    check(load(file))
    assert [one.step for one in TraceRecord.read(file).steps] == [1, 3]


def test_without_a_trace_nothing_records(model, cold_dir):
    with attached(model, cold_dir) as hill:
        cache = hill.new_cache()
        assert cache.engine.runtime.recorder is SILENT
        assert cache.spans is None
        cache.close()
