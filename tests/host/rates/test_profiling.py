# SPDX-License-Identifier: Apache-2.0
"""A machine is measured once, with the parts that do the work, and shares by what was found."""

import json
import time
from contextlib import ExitStack, closing, contextmanager

import pytest
import torch
from device_cases import plant, slots_left

from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.device_shadows import DeviceShadows, Pace
from hillinfer.devices.opening import CoreDevice
from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.engine_table import open_engine
from hillinfer.engine.budget_plan import kernel_spec, staging_bytes
from hillinfer.engine.runtime import Runtime
from hillinfer.errors import DeviceError, HillInferWarning, warn_of_loss
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.rates.kept_rates import KeptRates, Rates
from hillinfer.rates.latency import LATENCY_MODELS, AutoBeta
from hillinfer.rates.profiling import Profiling
from hillinfer.scoring.native import NativeScorer
from hillinfer.settings import Settings

SHAPE = ModelShape(
    layers=2, kv_heads=2, query_heads=4, head_dim=64, stored_type=StoredType.FLOAT16,
    max_positions=10_000,
)  # fmt: skip
SETTINGS = Settings().changed(device="core", block_rows=64, alpha=0.1, kept_recent=4)


@pytest.fixture
def kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return KeptRates.of_user()


@contextmanager
def opened(cold_dir, limit=1 << 40, scorer=None, **changes):
    settings = SETTINGS.changed(**changes)
    budget = staging_bytes(SHAPE, settings) + (4 << 20)
    runtime = Runtime(SHAPE, settings, budget, cold_dir, shadow_limit_bytes=limit, scorer=scorer)
    with closing(runtime):
        yield runtime


def decode(runtime, tokens):
    generator = torch.Generator().manual_seed(0)

    def random(heads, count=1):
        return torch.randn(heads, count, 64, generator=generator).half()

    sequence, found = runtime.open_sequence(), []
    for count in (tokens, 1, 1):
        runtime.begin_step()
        for layer in range(2):
            keys, values, query = random(2, count), random(2, count), random(4, count)
            runtime.append(layer, sequence, keys, values)
            if count > 1:
                runtime.code_full_segments(layer, sequence, keys)
            else:
                found.append(runtime.attend_selected(layer, sequence, query, keys, 0.1))
        sequence.token_ids.extend([0] * count)
    return found


def test_a_machine_is_measured_once_and_nothing_of_it_is_left(kept, cold_dir):
    with opened(cold_dir) as runtime:
        ((key, rates),) = kept.all()
        assert all(0 < getattr(rates, name) < float("inf") for name in ("f_c", "f_s", "b_c", "b_s"))
        assert 0 <= rates.sharing < 1
        assert key.device == "core"
        statistics = runtime.statistics()
        assert statistics.kernel_launches == statistics.device_scored_tokens == 0
        assert statistics.device_scored_segments == statistics.device_read_bytes == 0
        shadows = runtime.parts.device
        assert slots_left(shadows) == shadows.device.slots - len(shadows.staging)
    with opened(cold_dir):
        # Measured again, they would not be the same to the last bit.
        assert kept.all() == [(key, rates)]
    with opened(cold_dir, alpha=0.1, shadow="int8"):
        assert len(kept.all()) == 2


def test_what_is_kept_decides_who_scores(kept, cold_dir):
    plant(Rates(1, 0, 1, 1), SHAPE, SETTINGS, cold_dir)
    with opened(cold_dir) as runtime:
        assert not runtime.parts.device.wants(0)
    # The twin: a β that is given does not ask for rates.
    with opened(cold_dir, beta=0.0) as runtime:
        assert runtime.parts.device.wants(0)


@pytest.fixture(scope="module")
def expected(cold_dir):
    """What comes out where the host scores all."""
    with opened(cold_dir, device="nvme") as runtime:
        return decode(runtime, 3000)


# Where nobody but one of them scores, models do not differ.
@pytest.mark.parametrize(
    ("rates", "model"),
    [
        (Rates(1, 0, 1, 1), "scores_then_rows"),
        (Rates(0, 1, 1, 1), "parallel"),
        *((Rates(1, 1, 1, 1), model) for model in ("scores_then_rows", "parallel", "two_links")),
    ],
)
def test_whatever_the_rates_are_the_output_is_the_same(kept, cold_dir, rates, model, expected):
    plant(rates, SHAPE, SETTINGS, cold_dir)
    with opened(cold_dir, beta_model=model) as runtime:
        found = decode(runtime, 3000)
        scored = runtime.statistics().device_scored_tokens
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    # Two steps of two layers; of the open segment the device has whole groups.
    everything = 2 * 2 * (3001 // 64 * 64)
    if rates.f_s == 0:
        assert scored == 0
    elif rates.f_c == 0:
        assert scored == everything
    else:
        assert 0 < scored < everything


def test_what_is_selected_is_learned(kept, cold_dir):
    plant(Rates(1, 1, 1, 1), SHAPE, SETTINGS, cold_dir)
    noted = []

    class Noting(AutoBeta):
        def note(self, *counts):
            noted.append(counts)
            super().note(*counts)

    with opened(cold_dir) as runtime:
        model = LATENCY_MODELS[SETTINGS.beta_model](Rates(1, 1, 1, 1))
        runtime.parts.device.share_by(Noting(model, 1024, SETTINGS.alpha, 1 << 40))
        decode(runtime, 3000)
        statistics = runtime.statistics()
    host, host_selected, device, device_selected = map(sum, zip(*noted, strict=True))
    assert device == statistics.device_scored_tokens > 0
    assert host + device == statistics.scored_tokens
    assert host_selected + device_selected == statistics.selected_tokens
    assert host_selected > 0
    assert device_selected > 0


def test_memory_bounds_the_host_s_share(kept, cold_dir):
    plant(Rates(1, 0, 1, 1), SHAPE, SETTINGS, cold_dir)
    with opened(cold_dir, limit=0) as runtime:
        decode(runtime, 3000)
        assert runtime.statistics().device_scored_tokens == 2 * 2 * (3001 // 64 * 64)


def hosts(runtime, count=8):
    """Say of the first segments which ones the host is to score."""
    return [not runtime.parts.device.wants(number) for number in range(count)]


def test_the_model_is_the_one_that_was_asked_for(kept, cold_dir):
    # Rows of this drive cost what scoring does: the models disagree.
    rates = Rates(2e6, 1e6, 1e7, 1e5)
    plant(rates, SHAPE, SETTINGS, cold_dir)
    shares = {}
    for name, make in LATENCY_MODELS.items():
        expected = AutoBeta(make(rates), 1024, SETTINGS.alpha, 1 << 40)
        with opened(cold_dir, beta_model=name) as runtime:
            shares[name] = sum(hosts(runtime))
        assert shares[name] == expected.host_segments(8)
    assert len(set(shares.values())) > 1
    with opened(cold_dir, beta=0.5) as runtime:
        # As given: a third.
        assert sum(hosts(runtime, 6)) == 2


class BreakableCore(CoreDevice):
    """Fails its launches once `broken` is set."""

    broken = False

    def score(self, *given):
        if self.broken:
            raise DeviceError("launch failed")
        return super().score(*given)


class SlowScorer(DeviceScorer):
    """Takes 50 ms more to choose where `is_slow` says so of the segments."""

    is_slow = staticmethod(lambda segments: False)

    def choose(self, query, scaling, segments, *given):
        if self.is_slow(segments):
            time.sleep(0.05)
        return super().choose(query, scaling, segments, *given)


def made_scorer(beta):
    """A scorer as device `core` has, over a device that may break."""
    spec = kernel_spec(SHAPE, SETTINGS)
    shadows = DeviceShadows(spec, BreakableCore(spec), beta, warn_of_loss, Pace.REAL)
    return SlowScorer(NativeScorer(spec, SETTINGS.scope), shadows)


def test_a_device_that_fails_is_lost_and_keeps_no_rates(kept, cold_dir):
    scorer = made_scorer(None)
    scorer.shadows.device.broken = True
    with ExitStack() as open_now:
        with pytest.warns(HillInferWarning, match="launch failed; the host goes on"):
            own = open_now.enter_context(opened(cold_dir, scorer=scorer))
        assert own.statistics().device_lost
        assert kept.all() == []


@pytest.fixture
def profiling(cold_dir):
    """Of device `core`, brief."""
    scorer = made_scorer(1.0)
    engine = open_engine(SETTINGS.io, 1, DriveCalls())
    yield Profiling(scorer, SHAPE.row_bytes, cold_dir, engine, seconds=0.02)
    engine.close()
    scorer.shadows.close()


def test_what_merging_takes_is_a_cost_of_sharing(profiling):
    before = profiling.sharing(1e9, 1e9)
    profiling.scorer.is_slow = lambda segments: any(one.device_tokens for one in segments)
    found = profiling.sharing(1e9, 1e9)
    assert found >= 0.04
    # The twin: what the host alone takes longer, too, is none.
    profiling.scorer.is_slow = lambda segments: True
    assert profiling.sharing(1e9, 1e9) < 0.04
    assert before < 0.04


def test_sharing_leaves_nothing_behind_and_needs_a_device(profiling):
    shadows = profiling.scorer.shadows
    assert profiling.sharing(1e9, 0) == 0
    assert profiling.sharing(1e6, 1e9) >= 0
    assert shadows.launches == shadows.scored_tokens == shadows.scored_segments == 0
    assert slots_left(shadows) == shadows.device.slots - len(shadows.staging)


def test_a_device_that_fails_while_it_shares_is_lost(profiling):
    profiling.scorer.shadows.device.broken = True
    with (
        pytest.warns(HillInferWarning, match="launch failed; the host goes on"),
        pytest.raises(DeviceError, match="measured"),
    ):
        profiling.sharing(1e9, 1e9)
    assert profiling.scorer.shadows.lost


def test_what_is_expected_is_shared_as_a_whole(kept, cold_dir):
    plant(Rates(1.024e6, 1.024e6, 1e9, 1e9, sharing=0.0016), SHAPE, SETTINGS, cold_dir)
    with opened(cold_dir) as runtime:
        runtime.expect(8 * 1024 - 1)
        assert hosts(runtime) == [True, False] * 4
    with opened(cold_dir) as runtime:
        # As where nobody knows.
        runtime.expect(0)
        assert hosts(runtime)[:3] == [True] * 3


def test_a_plain_drive_measures_nothing(kept, cold_dir):
    with opened(cold_dir, device="nvme"):
        assert not kept.file.exists()


def test_what_is_kept_says_what_it_is(kept, cold_dir):
    plant(Rates(1, 2, 3, 4), SHAPE, SETTINGS, cold_dir)
    content = json.loads(kept.file.read_text())
    assert content["unit"] == "tokens/s of one layer; sharing: seconds of a step of one layer"
    assert content["label"] == "measured on this machine"
