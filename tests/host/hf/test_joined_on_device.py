# SPDX-License-Identifier: Apache-2.0
"""Joined caches of one document: a device scores what they share once for several of them."""

from contextlib import closing

import pytest
import torch
from generation_runs import attached
from test_cache_operations import feed
from test_joined_caches import TINY, documents, row_by_row, step

from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.devices.opening import CoreDevice
from hillinfer.errors import warn_of_loss
from hillinfer.scoring.native import NativeScorer

__all__ = ["row_by_row"]


class OneAtATime(CoreDevice):
    """Knows of no pass for several queries."""

    queries_together = 1


class Forgetful(CoreDevice):
    """Keeps other bits than those it is given."""

    def write(self, slot, first_beat, beats):
        super().write(slot, first_beat, beats ^ 0x11)


def opener(device):
    def open_device(spec, scope, options, recorder):
        shadows = DeviceShadows(spec, device(spec), options.beta, warn_of_loss)
        return DeviceScorer(NativeScorer(spec, scope), shadows, recorder)

    return open_device


@torch.no_grad()
def steps(cold_dir, device=None):
    """Logits of three forks that take steps together, and what the device did."""
    own = {"beta": 0.0, "device": "own", "devices": {"own": opener(device)}} if device else {}
    turns = torch.arange(12).reshape(3, 4) + 5
    with attached(TINY.build(), cold_dir, alpha=0.1, query="predicted", **own) as hill:
        cache = hill.new_cache()
        feed(hill.model, cache, documents([2100])[0], 256)
        with closing(cache), closing(cache.fork()) as second, closing(cache.fork()) as third:
            caches = [cache, second, third]
            logits = [step(hill, caches, turns[:, [i]]) for i in range(4)]
        return torch.stack(logits), cache.engine.runtime.parts.device


@pytest.mark.parametrize(("device", "shares"), [(CoreDevice, True), (OneAtATime, False)])
def test_forks_of_a_document_answer_as_without_a_device(row_by_row, cold_dir, device, shares):
    expected, _ = steps(cold_dir)
    found, shadows = steps(cold_dir, device)
    assert torch.equal(found, expected)
    assert (shadows.shared_launches > 0) is shares
    assert shadows.launches > 0
    assert not shadows.lost


def test_a_flipped_bit_on_the_device_shows(row_by_row, cold_dir):
    expected, _ = steps(cold_dir)
    found, shadows = steps(cold_dir, Forgetful)
    assert shadows.shared_launches > 0
    assert not torch.equal(found, expected)
