# SPDX-License-Identifier: Apache-2.0
"""An emulated card behind the real XRT scores several sequences' queries in one pass."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from emulated_cards import SMALL, EmulatedCards

from hillinfer.devices.device import ResidentShadow
from hillinfer.devices.opening import GoldenScorer, open_xrt
from hillinfer.devices.started_scoring import AskedScoring
from hillinfer.scoring.native import NativeScorer
from hillinfer.scoring.scorer import SegmentShadow, Wanted
from hillinfer.settings import DeviceOptions
from hillinfer_hw.emulation import Engine
from hillinfer_model.choices import Scope

SPEC = replace(SMALL, queries=4)
TOKENS, SCALING = 1300, 0.3
WANTED = Wanted(90, 4, 30)

# Kernels of their own are built for both engines.
pytestmark = [pytest.mark.kernels, pytest.mark.xdist_group(SPEC.digest().hex())]


@pytest.fixture(scope="module")
def cards(tmp_path_factory):
    with pytest.MonkeyPatch.context() as environment:
        yield EmulatedCards(SPEC, tmp_path_factory.mktemp, environment.setenv)


def document():
    """The segments of one document, whole in DRAM."""
    keys = torch.randn(TOKENS, 2, 64, generator=torch.Generator().manual_seed(5)).half()
    scorer, segments, before = GoldenScorer(SMALL, Scope.LAYER), [], None
    for base in range(0, TOKENS, SMALL.segment_tokens):
        own = keys[base : base + SMALL.segment_tokens]
        before = scorer.statistics(own, base, before)
        shadow = np.zeros((SMALL.segment_beats, 64), np.uint8)
        scorer.encode(own, before, shadow, 0)
        segments.append(SegmentShadow(base, len(own), shadow, before))
    return segments


def resident(scorer, segments, flip):
    """The full segments on the card; the last one is the host's."""
    made = []
    for number, one in enumerate(segments[:-1]):
        held = scorer.shadows.take(number)
        given = one.shadow.copy()
        # Exponents of the first KV head.
        given[:: SPEC.group_beats] ^= flip
        scorer.shadows.update(held, given, one.tokens)
        made.append(
            ResidentShadow(
                one.base_position, one.tokens, one.statistics, held.slot, held.tokens,
                held.probes, one.shadow, None,
            )
        )  # fmt: skip
    return [*made, segments[-1]]


def chosen(surrounding, scope, queries, flip=0):
    """What queries of sequences that share a document choose, and how it was scored."""
    options = DeviceOptions(xclbin=surrounding.xclbin)
    scorer = open_xrt(SMALL, scope, options)
    with closing(scorer.shadows):
        assert scorer.shadows.queries_together == 4
        segments = resident(scorer, document(), flip)
        scorer.begin_together([AskedScoring(query, SCALING, segments, 0) for query in queries])
        # The last one first: a fifth query has a launch of its own.
        found = [scorer.choose(query, SCALING, segments, 0, [WANTED])[0] for query in queries[::-1]]
        found.reverse()
        assert not scorer.shadows.lost
        counts = scorer.shadows.launches, scorer.shadows.shared_launches
        return found, counts, scorer.shadows.scored_tokens


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("engine", Engine)
def test_sequences_of_a_document_choose_as_the_host_does(cards, engine, scope):
    queries = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(6)).unbind()
    host, segments = NativeScorer(SMALL, scope), document()
    expected = [host.choose(query, SCALING, segments, 0, [WANTED])[0] for query in queries]
    surrounding = cards(engine)
    found, counts, scored = chosen(surrounding, scope, queries)
    for one, right in zip(found, expected, strict=True):
        assert all(map(np.array_equal, one, right))
    # Four in one pass, and the fifth in its own.
    assert counts == (2, 1)
    assert scored == 5 * 1024


@pytest.mark.parametrize("engine", Engine)
def test_a_flipped_bit_on_the_card_shows(cards, engine):
    queries = torch.randn(2, 2, 64, generator=torch.Generator().manual_seed(6)).unbind()
    host, segments = NativeScorer(SMALL, Scope.LAYER), document()
    expected = [host.choose(query, SCALING, segments, 0, [WANTED])[0] for query in queries]
    found, counts, _ = chosen(cards(engine), Scope.LAYER, queries, flip=1)
    assert counts == (1, 1)
    assert not all(
        all(map(np.array_equal, one, right)) for one, right in zip(found, expected, strict=True)
    )
