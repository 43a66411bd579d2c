# SPDX-License-Identifier: Apache-2.0
"""A plain drive's rates are measured once per machine with its own scorer."""

import math

import pytest

from hillinfer.devices.opening import make_scorer
from hillinfer.doctor.profile import plain_rates
from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.engine_table import open_engine
from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.rates.kept_rates import KeptRates
from hillinfer.settings import IOChoice, Settings

SHAPE = ModelShape(2, 2, 4, 64, StoredType.FLOAT16, 10_000)


@pytest.fixture
def engine():
    made = open_engine(IOChoice.AUTO, 4, DriveCalls())
    yield made
    made.close()


def rates_of(kept, cold_dir, engine, **changes):
    settings = Settings().changed(**changes)
    scorer = make_scorer("nvme", kernel_spec(SHAPE, settings), settings.scope)
    return plain_rates(scorer, SHAPE.row_bytes, cold_dir, engine, kept)


def test_it_is_measured_once_for_what_it_depends_on(tmp_path, cold_dir, engine):
    kept = KeptRates(tmp_path / "rates.json")
    rates, weights = rates_of(kept, cold_dir, engine)
    assert rates.f_s == 0
    assert all(0 < one < math.inf for one in (rates.f_c, rates.b_c, rates.b_s, weights))
    ((key, found),) = kept.all()
    assert (key.device, key.xclbin, found) == ("nvme", "", rates)
    # Measured again, they would not be the same to the last bit.
    assert rates_of(kept, cold_dir, engine)[0] == rates
    assert kept.all() == [(key, rates)]
    other, _ = rates_of(kept, cold_dir, engine, shadow="int8")
    assert other != rates
    assert len(kept.all()) == 2
