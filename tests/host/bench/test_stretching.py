# SPDX-License-Identifier: Apache-2.0
"""Stretched selections: as many tokens as are selected, as local as recorded."""

from dataclasses import replace

import numpy as np
import pytest
from bench_cases import SETTINGS, local_trace

from hillinfer.errors import SettingsError
from hillinfer.models.loader import load_model
from hillinfer_bench.quality.texts import TextSample, standard_library_samples
from hillinfer_bench.systems.replayed_selections import SelectionRecorder
from hillinfer_bench.systems.stretching import (
    Locality,
    Stretch,
    recording_settings,
    stretched_trace,
)
from hillinfer_bench.systems.system import BenchError
from hillinfer_model.selection import kept_positions, selected_count

RECORDED, STEPS = 2048, 12


def stretched(context, settings=SETTINGS):
    recorded = local_trace(
        RECORDED, STEPS, settings=recording_settings(settings, RECORDED, context, STEPS)
    )
    return recorded, stretched_trace(recorded, context, settings, [0, 1])


@pytest.mark.parametrize("context", [RECORDED, 3000, 16_384])
@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.2])
def test_as_many_tokens_as_are_selected_and_the_kept_ones_among_them(context, alpha):
    settings = replace(SETTINGS, alpha=alpha)
    _, trace = stretched(context, settings)
    for sets in trace.layers:
        for step, positions in enumerate(sets):
            length = context + step + 1
            assert len(positions) == selected_count(length, alpha, settings.kept_tokens, None)
            assert (np.diff(positions) > 0).all()
            assert positions[0] >= 0
            assert positions[-1] < length
            assert np.isin(kept_positions(length, 4, 32), positions).all()


@pytest.mark.parametrize("context", [4096, 16_384])
def test_stretched_selections_are_as_local_as_recorded(context):
    recorded, trace = stretched(context)
    assert Locality.of(trace).difference(Locality.of(recorded)) is None


def test_selections_without_locality_are_told_from_recorded_ones():
    recorded, trace = stretched(8192)
    random = np.random.default_rng(0)
    layers = tuple(
        tuple(
            np.sort(random.choice(8192 + step + 1, len(positions), replace=False)).astype(np.int32)
            for step, positions in enumerate(sets)
        )
        for sets in trace.layers
    )
    assert Locality.of(replace(trace, layers=layers)).difference(Locality.of(recorded))


@pytest.mark.parametrize("share", ["overlap", "recent_share", "hit_rate", "run_tokens"])
def test_each_figure_alone_tells(share):
    recorded, _ = stretched(4096)
    locality = Locality.of(recorded)
    other = replace(locality, **{share: getattr(locality, share) * 0.7})
    assert share.split("_")[0] in other.difference(locality)


def test_runs_inside_a_block_and_ages_at_the_ends_stay():
    stretch = Stretch(1000, 5000, SETTINGS)
    source = stretch.source
    assert source[:4].tolist() == [0, 1, 2, 3]
    assert source[-32:].tolist() == list(range(968, 1000))
    steps = np.diff(source[4:-32])
    # 32 consecutive tokens come from 32 consecutive ones.
    assert (steps == 1).mean() > 0.96
    age = (5000 - np.arange(5000)) / 5000
    mirrored = (1000 - source) / 1000
    assert np.abs(age - mirrored)[4:-32].max() < 0.06


@pytest.mark.parametrize(("recorded", "context"), [(2048, 1024), (60, 4096)])
def test_recordings_that_cannot_be_stretched_are_refused(recorded, context):
    with pytest.raises(SettingsError, match=f"recording of {recorded} tokens"):
        Stretch(recorded, context, SETTINGS)


def checked(layers, batch, bad=None):
    """Stretch twelve made layers, one perhaps at random; return what was checked and the error."""
    recorded = local_trace(
        RECORDED, STEPS, layers=12, settings=recording_settings(SETTINGS, RECORDED, 4096, STEPS)
    )
    random = np.random.default_rng(0)

    def spoiled(trace, prefix, settings, sources):
        made = stretched_trace(trace, prefix, settings, sources)
        return replace(
            made,
            layers=tuple(
                tuple(
                    np.sort(random.choice(prefix + step + 1, len(own), replace=False))
                    for step, own in enumerate(sets)
                )
                if source == bad
                else sets
                for source, sets in zip(sources, made.layers, strict=True)
            ),
        )

    recorder = SelectionRecorder(None, None, RECORDED)
    try:
        recorder.stretched(recorded, SETTINGS, 4096, layers, batch, spoiled)
    except BenchError as error:
        return recorder.checks, str(error)
    return recorder.checks, None


@pytest.mark.parametrize("bad", [1, 10, 11])
def test_one_bad_layer_among_good_ones_is_found(bad):
    """Six layers of two sequences replay all twelve; the last is the second sequence's alone."""
    (check,), error = checked(6, 2, bad)
    assert f"not as local as recorded: recorded layer {bad}: " in error
    differing = [
        one["layer"]
        for one in check["layers"]
        if Locality(**one["stretched"]).difference(Locality(**one["recorded"]))
    ]
    assert differing == [bad]


def test_a_layer_that_is_not_replayed_is_not_checked():
    assert checked(6, 1, bad=0)[1] is None


def test_the_check_says_what_it_looked_at():
    (check,), _ = checked(6, 3)
    assert [one["layer"] for one in check["layers"]] == list(range(12))
    assert check["checked"] == (
        "each of the 12 recorded layers that 18 layers of all sequences replay, by itself, in all "
        "12 steps"
    )
    assert Locality(**check["stretched"]).difference(Locality(**check["recorded"])) is None


@pytest.mark.model
def test_selections_of_the_real_model_stay_as_local(smollm2_folder):
    loaded = load_model(str(smollm2_folder))
    sample = standard_library_samples(loaded.tokenizer, 640 + 10)[0]
    recorder = SelectionRecorder(loaded, sample, 640)
    selections = recorder.selections(SETTINGS, 10_240, 10, layers=2, batch=2)
    (check,) = recorder.checks
    assert check["recorded"]["overlap"] > 0.5
    # Two sequences of two layers each.
    assert len(check["layers"]) == 4
    assert len(selections.positions(1, 1, 10_241)) == selected_count(10_241, 0.1, 36, None)


def test_two_shapes_replay_one_recording(tiny_folder):
    loaded = load_model(str(tiny_folder))
    sample = TextSample("made", tuple(5 + i * 7 % 50 for i in range(620)))
    recorder, asked = SelectionRecorder(loaded, sample, 600), []

    # A recording takes all of its steps through each layer at once.
    loaded.model.model.layers[0].mlp.register_forward_pre_hook(
        lambda _, given: asked.append(given[0].shape[1])
    )

    def recorded():
        found = [tokens for tokens in asked if tokens < 600]
        asked.clear()
        return found

    few, many = (recorder.selections(SETTINGS, 600, 4, layers, 1) for layers in (1, 2))
    assert recorded() == [4]
    fresh = SelectionRecorder(loaded, sample, 600).selections(SETTINGS, 600, 4, 2, 1)
    for layer in range(2):
        assert np.array_equal(many.positions(layer, 0, 602), fresh.positions(layer, 0, 602))
    assert few.positions(0, 0, 602).size
    # The twin: another importance rate and other steps are recorded anew.
    assert recorded() == [4]
    recorder.selections(SETTINGS.changed(alpha=0.3), 600, 4, 1, 1)
    assert recorded() == [4]
    recorder.selections(SETTINGS, 600, 3, 1, 1)
    assert recorded() == [3]
