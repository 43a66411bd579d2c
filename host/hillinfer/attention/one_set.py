# SPDX-License-Identifier: Apache-2.0
"""One selected set per layer for all tokens of a chunk, as of a question about a document.

A set for each token reads more: those of a question's 30 tokens together are a third of all rows
where each is a tenth. Here tokens are ranked by what all of the chunk's queries give them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.kv.pool_manager import PoolManager
from hillinfer.kv.sequence import Sequence
from hillinfer.kv.sequence_shadows import SequenceShadows
from hillinfer.scoring.scorer import Scorer, SegmentShadow, Wanted
from hillinfer.trace.recorder import Lane, Recorder
from hillinfer_model.choices import Rule

# Each query is scored by itself; those of a longer chunk are taken at even distances.
MOST_QUERIES = 32
# Of a score code: 1 is a weight of 0, and ten bits follow the leading one (contract, section 7).
_FRACTION_BITS = 10


def code_weights(codes: NDArray[np.uint16]) -> NDArray[np.float64]:
    """Return the weights that score codes of rule `weight_sum` stand for, as they were cut.

    Parameters
    ----------
    codes
        uint16; 0 of an invalid token counts as a weight of 0.
    """
    magnitude = np.maximum(codes.astype(np.int64) - 1, 0)
    exponent, fraction = magnitude >> _FRACTION_BITS, magnitude & ((1 << _FRACTION_BITS) - 1)
    wide = np.ldexp((1 << _FRACTION_BITS) + fraction.astype(np.float64), exponent - 1)
    return np.where(exponent == 0, magnitude, wide)


class OneSet:
    """Ranks a sequence's past tokens for all queries of a chunk together.

    With rule `weight_sum` a token is worth the sum of what each query gives it, else the best rank
    that a query gives it. With a set for each KV head the set is what any of them selects.

    Parameters
    ----------
    scorer
        Scores one query after the other.
    wanted
        Returns how much is selected of so many tokens of a sequence that lacks so many.
    shadow
        Codes what is not coded yet.
    manager
        Counts what is selected as hits, once.
    scoring, make_room
        Held by whoever codes or scores, and counts what scoring so many tokens takes.
    recorder
        Notes how long it takes.
    """

    def __init__(
        self,
        scorer: Scorer,
        wanted: Callable[[int, int], Wanted],
        shadow: SequenceShadows,
        manager: PoolManager,
        scoring: threading.Lock,
        make_room: Callable[[int], None],
        recorder: Recorder,
    ) -> None:
        self._scorer, self._wanted = scorer, wanted
        self._shadow, self._manager = shadow, manager
        self._scoring, self._make_room = scoring, make_room
        self._recorder = recorder

    def chosen(
        self, layer: int, sequence: Sequence, query: torch.Tensor, scaling: float
    ) -> list[NDArray[np.int64]]:
        """Return the one set that a chunk's tokens attend to of those before them.

        Its positions are int64 and ascending.

        Parameters
        ----------
        layer, sequence
            Where the chunk's tokens were just appended.
        query
            Theirs, (query_heads, tokens, head_dim), on the model's device.
        scaling
            Factor on inner products.

        Raises
        ------
        hillinfer_model.errors.NonFiniteQueryError
            Where a query is not finite.
        """
        past = sequence.lengths[layer] - query.shape[1]
        wanted = self._wanted(past, sequence.lacking)
        if wanted.count >= past:
            return [np.arange(past)]
        self._make_room(past)
        tokens = query.shape[1]
        chosen = np.unique(np.linspace(0, tokens - 1, min(tokens, MOST_QUERIES)).astype(np.int64))
        queries = query[:, torch.from_numpy(chosen)].transpose(0, 1).float().cpu().contiguous()
        with self._scoring:
            with self._recorder.span(Lane.HOST_SCORING, "code", layer=layer):
                segments = self._shadow.code_past(layer, sequence, past)
            with self._recorder.span(Lane.HOST_SCORING, "score", layer=layer, tokens=past):
                worth = self._worth(queries, scaling, segments, past)
        # What is kept is in the set whatever it is worth.
        worth[:, : wanted.sinks] = np.inf
        worth[:, past - wanted.recent :] = np.inf
        best = np.argsort(-worth, axis=1, kind="stable")[:, : wanted.count]
        found = np.unique(best)
        self._manager.tally(layer, sequence, found)
        return [found]

    def _worth(
        self, queries: torch.Tensor, scaling: float, segments: list[SegmentShadow], past: int
    ) -> NDArray[np.float64]:
        """Return what each token is worth to each set, float64 (sets, past)."""
        adds = self._scorer.spec.rule is Rule.WEIGHT_SUM
        heads: dict[int, NDArray[np.float64]] = {}
        for query in queries:
            for block in self._scorer.score(query, scaling, segments):
                own = heads.setdefault(block.kv_head, np.zeros(past))
                positions, codes = block.positions, block.codes
                # A segment that the chunk made full has its tokens, too.
                inside = positions < past
                places, given = positions[inside], codes[inside]
                if adds:
                    own[places] += code_weights(given)
                else:
                    own[places] = np.maximum(own[places], given)
        return np.stack([heads[head] for head in sorted(heads)])
