# SPDX-License-Identifier: Apache-2.0
"""What tests of devices share: rates that nobody need measure, and the room that is left."""

import torch

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.engine_table import open_engine
from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.rates.kept_rates import KeptRates, RatesKey


def key_of(shape, settings, cold_dir, device=None):
    """Return what rates are kept under; of the settings' device where none is named."""
    engine = open_engine(settings.io, settings.io_threads, DriveCalls())
    engine.close()
    return RatesKey.of(
        kernel_spec(shape, settings), settings.scope, shape.row_bytes, cold_dir, engine.name,
        torch.get_num_threads(), device or settings.device, settings.xclbin,
    )  # fmt: skip


def plant(rates, shape, settings, cold_dir, device=None):
    """Keep rates for the user whose cache directory the environment names."""
    KeptRates.of_user().get(key_of(shape, settings, cold_dir, device), lambda: rates)


def slots_left(shadows):
    """Take every slot that a device has left, and return how many there were."""
    count = 0
    while shadows.room(count) is not None:
        count += 1
    return count
