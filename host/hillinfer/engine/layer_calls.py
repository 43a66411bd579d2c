# SPDX-License-Identifier: Apache-2.0
"""What all calls have in common by which the native library decodes one layer's token."""

from __future__ import annotations

import ctypes

import torch

from hillinfer.kv.hot_pools import HotPools
from hillinfer.kv.pool_policies import PoolPolicy
from hillinfer.kv.sequence import NUMBER_TYPES, Sequence
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.native.coming import MissList
from hillinfer.native.selected_rows import SelectedRows
from hillinfer.native.structures import DecodeStep, Shape
from hillinfer.scoring.arguments import query_factor
from hillinfer.scoring.scorer import Wanted
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec

# Hits are counted in Python.
_NOT_COUNTED = -1
# After a step with cold rows it is looked for so many steps what is to be read.
_STEPS_AFTER_COLD = 16


class AskedStep:
    """What layers of one step are asked for alike.

    Parameters
    ----------
    step
        What the library is told.

    Attributes
    ----------
    address
        Where that lies.
    of
        What it is filled in for, or None: the tokens that are stored, how many the sequence has
        beside them, and the scaling.
    count
        How many tokens are chosen for each set.
    """

    def __init__(self, step: DecodeStep) -> None:
        self.step = step
        self.address = ctypes.addressof(step)
        self.of: tuple[int, int, float] | None = None
        self.count = 0

    def tell(self, of: tuple[int, int, float], coming: int, wanted: Wanted, exact: int = 0) -> None:
        """Fill in how much is to be chosen, how much of it is exact, and with which factors."""
        step = self.step
        if self.of is None or self.of[2] != of[2]:
            self.tell_scaling(of[2])
        step.coming = coming
        step.sinks, step.recent, step.count = wanted.sinks, wanted.recent, wanted.count
        step.threads, step.exact = torch.get_num_threads(), exact
        self.of, self.count = of, wanted.count

    def tell_scaling(self, scaling: float) -> None:
        """Fill in the factors alone."""
        self.step.scaling, self.step.factor = scaling, query_factor(scaling)


class LayerCalls:
    """Tells the library of queries, and the pools of what it found.

    Parameters
    ----------
    shape
        The model's.
    spec, scope
        Of the scoring contract.
    pools
        Where rows lie.
    policy
        Tallies hits.
    """

    def __init__(
        self,
        shape: ModelShape,
        spec: KernelSpec,
        scope: Scope,
        pools: HotPools,
        policy: PoolPolicy,
    ) -> None:
        self._shape = shape
        self._spec = spec
        self._scope = scope
        self._pools = pools
        self._policy = policy
        self._query_shape = shape.query_heads, 1, shape.head_dim
        # A policy that counts in a way of its own does it in Python.
        is_common = type(policy).tally is PoolPolicy.tally
        self._shift = policy.fade_shift if is_common else _NOT_COUNTED
        # The first step from which on rows are thought to be hot again.
        self._aside_from = 0

    def asked(self) -> AskedStep:
        """Return what a kind of call asks for: another thread may still look at another kind's."""
        shape = self._shape
        return AskedStep(
            DecodeStep(
                shape=Shape.of(self._spec, self._scope),
                group_size=shape.group_size,
                stored_type=0 if shape.stored_type is StoredType.BFLOAT16 else 1,
                fade_shift=self._shift,
            )
        )

    def tell_query(self, step: DecodeStep, query: torch.Tensor) -> bool:
        """Say where a query lies; False where the library cannot read it, or others refuse it."""
        number_type, strides = NUMBER_TYPES.get(query.dtype), query.stride()
        if number_type is None or query.shape != self._query_shape or not query.is_cpu:
            return False
        if strides[2] != 1:
            return False
        step.query, step.head_stride, step.query_type = query.data_ptr(), strides[0], number_type
        return True

    def settle(self, layer: int, sequence: Sequence, length: int) -> None:
        """Wait until no row of a layer moves, and have room to count hits.

        Not with `attending` held: rows may move behind an observer that waits for it.
        """
        self._pools.settle(layer)
        if length > len(sequence.hits.counts[layer]):
            self._pools.cover_hits(sequence.hits, layer, length)

    def note_hits(
        self, layer: int, sequence: Sequence, selected: SelectedRows, misses: MissList
    ) -> None:
        """Note that what is selected was counted, or count it: each row once."""
        length = sequence.lengths[layer]
        self._pools.hits.note(layer, sequence, length & -GROUP_TOKENS, length)
        if self._shift == _NOT_COUNTED:
            counts = sequence.hits.counts[layer]
            self._policy.tally(counts, selected.rows)
            misses.recount(counts)

    def note_cold(self, step: int) -> None:
        """Note that rows were cold in a step."""
        self._aside_from = step + _STEPS_AFTER_COLD

    def may_choose_aside(self, past: int, newest: int, threads: int) -> bool:
        """Say whether another thread may choose while this one goes on, and gains time by it.

        It may where what it looks at stays as it is until the layer's turn: no segment of the
        sequence begins or becomes full with the token that comes, and its group goes on. It gains
        where nothing is to be read, as nothing was lately.

        Parameters
        ----------
        past
            Tokens that a layer has; one more is coming.
        newest
            The newest step that was attended to.
        threads
            Compute threads.
        """
        inside = past % self._spec.segment_tokens
        return (
            threads > 1
            and past % GROUP_TOKENS != 0
            and 0 < inside < self._spec.segment_tokens - 1
            and newest >= self._aside_from
        )
