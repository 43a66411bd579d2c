# SPDX-License-Identifier: Apache-2.0
"""Stretched selections: as many tokens as are selected, as local as recorded."""

from dataclasses import replace

import numpy as np
import pytest
from bench_cases import SETTINGS, local_trace

from hillinfer.bench.recorder import SelectionRecorder
from hillinfer.errors import SettingsError
from hillinfer.models.loader import load_model
from hillinfer.quality.texts import standard_library_samples
from hillinfer.replay.locality import Locality
from hillinfer.replay.stretching import Stretch, recording_settings, stretched_trace
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


@pytest.mark.model
def test_selections_of_the_real_model_stay_as_local(smollm2_folder):
    loaded = load_model(str(smollm2_folder))
    sample = standard_library_samples(loaded.tokenizer, 2048 + 10)[0]
    recorder = SelectionRecorder(loaded, sample, 2048)
    selections = recorder.selections(SETTINGS, 32_768, 10, layers=2, batch=2)
    (check,) = recorder.checks
    assert check["recorded"]["overlap"] > 0.5
    assert len(selections.positions(1, 1, 32_769)) == selected_count(32_769, 0.1, 36, None)
