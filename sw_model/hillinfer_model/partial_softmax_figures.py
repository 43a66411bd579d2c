# SPDX-License-Identifier: Apache-2.0
"""What a card would gain by returning coded tokens' partial softmax; all of it modelled.

Compared are the ways in which a layer's selected tokens reach the model in one decode step, where
the card has scored them (contract, sections 14 to 16).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from hillinfer_model.choices import Scope
from hillinfer_model.coded_cycles import (
    PRODUCT_BYTES,
    Banks,
    attend_cycles,
    attended_bytes,
    block_count,
    partial_beats,
    product_beats,
)
from hillinfer_model.cycle_count import CycleCount
from hillinfer_model.cycle_model import kept_score_cycles, score_cycles
from hillinfer_model.descriptor import TUPLE_BYTES
from hillinfer_model.kernel_figures import (
    CARD_BYTES,
    P2P_ROOF,
    STAGING_BYTES,
    launch_segments,
)
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec
from hillinfer_model.launch_shape import key_value_row_beats
from hillinfer_model.memory_model import REALISTIC, MemoryModel
from hillinfer_model.selection import exact_count, selected_count
from hillinfer_model.value_layout import code_row_bytes, value_segment_beats


class Way(StrEnum):
    """How the coded tokens of a layer reach the model."""

    ROWS = "rows"
    CODES = "codes"
    BLOCKS = "blocks"
    PARTIAL = "partial"
    HOST = "host"


@dataclass(frozen=True)
class Step:
    """One layer of a decode step.

    Parameters
    ----------
    tokens
        N, tokens of the context.
    alpha, exact, floor, kept
        Importance rate, exact share and its floor in tokens, tokens that are always kept.
    """

    tokens: int
    alpha: float = 0.2
    exact: float = 0.02
    floor: int = 64
    kept: int = 36


@dataclass(frozen=True)
class Rates:
    """How fast the parts outside the card are.

    Parameters
    ----------
    host_scoring, host_coded
        Bytes per second at which a thread of the host scores a key shadow, and at which it attends
        to scattered value codes.
    launch
        Seconds from asking for a launch to its start, and from its end to the host.
    link
        Bytes per second between the card, its drive and the host.
    """

    host_scoring: float
    host_coded: float
    launch: float
    link: float = P2P_ROOF


@dataclass(frozen=True)
class WayFigures:
    """One way's figures for one layer of one decode step.

    Parameters
    ----------
    way
        Which one.
    link_bytes
        Bytes that come to the host: scores, exact rows, and what stands for the coded tokens.
    coded_bytes
        Those of them that stand for the coded tokens.
    sent_bytes
        Bytes that go to the card.
    card_bytes_moved
        Bytes that the card's memory reads and writes.
    score, attend
        The launches, None where there is none.
    seconds
        Of the layer, without the model's own products.
    host_seconds
        What a thread of the host computes of them, scoring included.
    card_bytes, host_bytes
        Bytes of shadows per token and layer, on the card and in the host's memory.
    card_tokens
        Tokens of all layers whose shadows fit on a card; 0 where it holds none.
    """

    way: Way
    link_bytes: int
    coded_bytes: int
    sent_bytes: int
    card_bytes_moved: int
    score: CycleCount | None
    attend: CycleCount | None
    seconds: float
    host_seconds: float
    card_bytes: int
    host_bytes: int
    card_tokens: int


@dataclass(frozen=True)
class Sets:
    """How many tokens of a step are exact, and which ones are coded, segment by segment."""

    exact: int
    coded: list[NDArray[np.int64]]

    @property
    def coded_count(self) -> int:
        """Coded tokens of the layer."""
        return sum(map(len, self.coded))


def drawn_sets(spec: KernelSpec, step: Step) -> Sets:
    """Return a step's sets, the coded tokens drawn evenly: no runs, the worst case for bursts."""
    selected = selected_count(step.tokens, step.alpha, step.kept, step.tokens)
    exact = exact_count(step.tokens, step.exact, step.floor, step.kept, selected)
    drawn = np.random.default_rng(0).permutation(step.tokens)[: selected - exact]
    segment, place = np.divmod(np.sort(drawn), spec.segment_tokens)
    count = -(-step.tokens // spec.segment_tokens)
    return Sets(exact, [place[segment == one] for one in range(count)])


def way_figures(
    spec: KernelSpec,
    layers: int,
    step: Step,
    way: Way,
    rates: Rates,
    banks: Banks = Banks.ONE,
    memory: MemoryModel = REALISTIC,
) -> WayFigures:
    """Return the figures of one way.

    Parameters
    ----------
    spec
        The model's shape; its key mode has a shadow.
    layers
        Layers of the model.
    step, way, rates
        What is computed, how, and how fast the surroundings are.
    banks, memory
        Of the card.
    """
    sets = drawn_sets(spec, step)
    exact = sets.exact * key_value_row_beats(spec) * BEAT_BYTES
    key_bytes = spec.segment_bytes // spec.segment_tokens
    value_bytes = value_segment_beats(spec) * BEAT_BYTES // spec.segment_tokens
    if way is Way.HOST:
        scoring = step.tokens * key_bytes / rates.host_scoring
        attending = _code_bytes(spec, sets.coded_count) / rates.host_coded
        return WayFigures(
            way=way,
            link_bytes=exact,
            coded_bytes=0,
            sent_bytes=0,
            card_bytes_moved=0,
            score=None,
            attend=None,
            seconds=scoring + max(exact / rates.link, attending),
            host_seconds=scoring + attending,
            card_bytes=0,
            host_bytes=key_bytes + value_bytes,
            card_tokens=0,
        )
    shapes = launch_segments(step.tokens, spec)
    # With two banks L' goes to the other one, and is out of the keys' way.
    apart = way is Way.ROWS or banks is Banks.TWO
    score = (score_cycles if apart else kept_score_cycles)(spec, Scope.LAYER, shapes, memory)
    scores = step.tokens * TUPLE_BYTES
    moved = (score.beats + score.load_beats + score.write_beats) * BEAT_BYTES
    if way is not Way.ROWS and banks is Banks.TWO:
        moved += product_beats(step.tokens, spec) * BEAT_BYTES
    attend, attending = None, 0.0
    listed = 0 if way is Way.ROWS else -(-step.tokens // 8)
    if way is Way.ROWS:
        coded = sets.coded_count * key_value_row_beats(spec) * BEAT_BYTES
    elif way is Way.CODES:
        coded = _code_bytes(spec, sets.coded_count)
        coded += PRODUCT_BYTES * spec.query_heads * sets.coded_count
        attending = _code_bytes(spec, sets.coded_count) / rates.host_coded
        moved += 2 * coded
    else:
        answers = block_count(sets.coded) if way is Way.BLOCKS else 1
        attend = attend_cycles(spec, sets.coded, memory, banks, answers)
        coded = answers * partial_beats(spec) * BEAT_BYTES
        moved += attended_bytes(attend) + attend.write_beats * BEAT_BYTES
    common = rates.launch + score.seconds + scores / rates.link
    linked = (exact + coded) / rates.link
    on_card = 0.0
    if attend is not None:
        on_card = rates.launch + attend.seconds + coded / rates.link
    elif way is Way.CODES:
        # Gathering them is a launch, too.
        on_card = rates.launch + coded / rates.link
    beside = 0 if way is Way.ROWS else value_bytes
    return WayFigures(
        way=way,
        link_bytes=scores + exact + coded,
        coded_bytes=coded,
        sent_bytes=listed,
        card_bytes_moved=moved,
        score=score,
        attend=attend,
        seconds=common + max(linked, on_card, attending),
        host_seconds=attending,
        card_bytes=key_bytes + beside,
        host_bytes=0,
        card_tokens=_card_tokens(spec, layers, key_bytes + beside),
    )


def _code_bytes(spec: KernelSpec, tokens: int) -> int:
    """Return the bytes of tokens' code rows and exponents."""
    return tokens * (code_row_bytes(spec) + spec.kv_heads)


def _card_tokens(spec: KernelSpec, layers: int, shadow_bytes: int) -> int:
    """Return the tokens that fit beside staging and L' of two layers, in whole segments."""
    kept = 2 * product_beats(spec.segment_tokens, spec) * BEAT_BYTES
    per_segment = layers * shadow_bytes * spec.segment_tokens + kept
    return (CARD_BYTES - STAGING_BYTES) // per_segment * spec.segment_tokens
