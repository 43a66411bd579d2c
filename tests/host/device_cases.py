# SPDX-License-Identifier: Apache-2.0
"""What tests of devices share: rates nobody need measure, the room left, wrapped devices."""

import os
from contextlib import ExitStack

import torch

from hillinfer.devices.device import FilePiece, StoredRows
from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.devices.opening import make_scorer
from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.engine_table import open_engine
from hillinfer.drive.files import aligned_buffer
from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.errors import warn_of_loss
from hillinfer.rates.kept_rates import KeptRates, RatesKey
from hillinfer.scoring.native import NativeScorer


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


class Through:
    """A device that passes everything on to another; a test says what it does otherwise."""

    def __init__(self, device):
        self.device = device

    def __getattr__(self, name):
        return getattr(self.device, name)


class FlippedRows(Through):
    """Is given keys whose first channels have other signs."""

    def make(self, rows):
        with ExitStack() as files:
            return self.device.make([self._flipped(one, files) for one in rows])

    def _flipped(self, rows, files):
        content, at = aligned_buffer(rows.byte_count)[: rows.byte_count], 0
        for piece in rows.pieces:
            at += os.preadv(piece.file, [content[at : at + piece.size].data], piece.offset)
        content.reshape(1024, -1)[:, 1:32:2] ^= 0x80
        file = os.memfd_create("flipped")
        files.callback(os.close, file)
        os.pwrite(file, content.data, 0)
        pieces = [FilePiece(file, 0, rows.byte_count)]
        return StoredRows(rows.slot, rows.base_position, rows.statistics, pieces)


class Noting(Through):
    """Notes how often each part of a device was called."""

    def __init__(self, device):
        super().__init__(device)
        self.loads = self.launches = 0

    def load(self, shadows):
        self.loads += 1
        self.device.load(shadows)

    def score(self, *given):
        self.launches += 1
        return self.device.score(*given)


class Wrapped:
    """Opens a device of the host's table, or a package's, and wraps it; lists what it opened.

    Parameters
    ----------
    name
        In the table.
    wrap
        Takes the device and returns what is to be there for it.
    opening
        Opens it; as the table does where None.
    """

    def __init__(self, name, wrap=Noting, opening=None):
        self._name, self._wrap, self._opening = name, wrap, opening
        self.opened = []

    @property
    def table(self):
        return {self._name: self.open}

    def open(self, spec, scope, options, recorder):
        if self._opening is not None:
            scorer = self._opening(spec, scope, options, recorder)
        else:
            scorer = make_scorer(self._name, spec, scope, options, recorder)
        if scorer.on_device is None:
            return scorer
        self.opened.append(self._wrap(scorer.shadows.device))
        pace = scorer.shadows.pace
        shadows = DeviceShadows(spec, self.opened[-1], options.beta, warn_of_loss, pace)
        return DeviceScorer(NativeScorer(spec, scope), shadows, recorder)
