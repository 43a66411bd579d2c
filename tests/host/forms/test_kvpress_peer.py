# SPDX-License-Identifier: Apache-2.0
"""The comparison with kvpress counts equal sets, and sees one index that differs."""

import shlex

import pytest
import torch
from tiny_models import TinyModel

import kvpress_peer
from hillinfer.forms.dropped import DROPPERS, queries_of
from peers.peer_environment import PeerSkippedError


@pytest.fixture
def saved():
    """What the worker would save, with our own sets in the place of kvpress'."""
    model = TinyModel("qwen3", head_dim=32).build()
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn((2, 2, 200, 32), generator=generator) for _ in range(2))
    hidden = torch.randn((2, 200, model.config.hidden_size), generator=generator)
    rotary = torch.stack(
        [part[0] for part in model.model.rotary_emb(keys, torch.arange(200)[None])]
    )
    found = {"keys": keys, "values": values, "hidden": hidden, "rotary": rotary, "kept": {}}
    for name in DROPPERS:
        own = [kvpress_peer.kept_by(model, found, name, 0.5, layer) for layer in range(2)]
        # As kvpress has them: in order of scores, not of positions.
        found["kept"][f"{name} 0.5"] = torch.stack(own).flip(-1)
    return model, found


def test_equal_sets_are_counted_whatever_their_order(saved):
    rows = kvpress_peer.compared("tiny", *saved)
    assert {row.dropper for row in rows} == {*DROPPERS}
    assert all((row.sets, row.equal, row.other) == (4, 4, 0) for row in rows)


def test_one_index_that_differs_is_seen(saved):
    model, found = saved
    kept = found["kept"]["keydiff 0.5"]
    kept[1, 0, 7] = next(at for at in range(200) if at not in kept[1, 0].tolist())
    rows = {row.dropper: row for row in kvpress_peer.compared("tiny", model, found)}
    assert (rows["keydiff"].equal, rows["keydiff"].other) == (3, 1)
    assert rows["knorm"].equal == 4


def test_queries_are_those_that_the_model_attends_with(saved):
    model, found = saved
    attention = model.model.layers[0].self_attn
    rotary = tuple(part[None] for part in found["rotary"])
    own = queries_of(attention, found["hidden"][0][None], rotary)
    assert own.plain.shape == own.turned.shape == (4, 200, 32)
    torch.testing.assert_close(own.plain[:, 0], own.turned[:, 0])
    assert not torch.allclose(own.plain[:, 5], own.turned[:, 5])


def test_a_worker_that_fails_is_skipped_with_its_reason(tmp_path, warm_python):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.join(warm_python)} "$@"\n')
    python.chmod(0o755)
    with pytest.raises(PeerSkippedError, match="No module named 'kvpress'"):
        kvpress_peer.ask(python, tmp_path, [1, 2], tmp_path / "out.pt", 60)
