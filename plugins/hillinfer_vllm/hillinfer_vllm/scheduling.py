# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: which prompts the store knows, and what each step loads and stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hillinfer.store.keys import Namespace
from hillinfer.store.store import Store
from hillinfer_model.kernel_spec import GROUP_TOKENS
from hillinfer_vllm.adapters import Adapters, UnknownAdapterError
from hillinfer_vllm.ranks import FoundByAll, RankReports
from hillinfer_vllm.refusals import refusal_of
from hillinfer_vllm.step_plan import PlannedLoad, PlannedSave, Prompt, StepPlan

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass
class _Known:
    """A request under way.

    Parameters
    ----------
    prompt
        Its token numbers.
    found
        What the store has of it for all ranks, leased.
    blocks
        From its first token on, as vLLM said last.
    load
        Token positions that its next step loads; None where none.
    saved
        Tokens of it that the store has, or were planned to be stored.
    """

    prompt: Prompt
    found: FoundByAll
    blocks: list[int] = field(default_factory=list)
    load: tuple[int, int] | None = None
    saved: int = 0

    @property
    def stored(self) -> int:
        """Tokens that the store had when it was asked."""
        return self.found.tokens


class SchedulerSide:
    """Looks prompts up once each, and plans steps.

    Parameters
    ----------
    store
        Where rows are looked up.
    namespaces
        Of the rows of this engine, one for each of its ranks.
    block_tokens
        Tokens of a block; loads end with a whole one.
    warn
        Told once of each reason why a request is not looked up.
    others
        Returns namespaces of another engine's rows that are taken, and why there are no more.
    adapters
        Says which adapter a request's rows are made with.
    """

    def __init__(
        self,
        store: Store,
        namespaces: Sequence[Namespace],
        block_tokens: int,
        warn: Callable[[str], None] = lambda line: None,
        others: Callable[[], tuple[Sequence[Namespace], str]] = lambda: ((), ""),
        adapters: Adapters | None = None,
    ) -> None:
        self._store = store
        self._namespaces = namespaces
        self._block_tokens = block_tokens
        self._warn = warn
        self._warned: set[str] = set()
        self._others, self._adapters = others, adapters or Adapters()
        self._publishes: list[tuple[str, int]] = []
        self._known: dict[str, _Known] = {}
        # Blocks of each request of the last step, from its first token on: what became of it is
        # told when some of them may be over.
        self._step: list[list[int]] = []
        self._is_resting = False

    def rest(self) -> None:
        """Look nothing up any more, and plan nothing."""
        self._is_resting = True
        self.close()

    def failed(self, blocks: set[int]) -> set[int]:
        """Learn which blocks have no right rows; return them and all that was computed behind.

        Requests that have them look for nothing and store nothing any more.
        """
        gone = set(blocks)
        for own in self._step:
            first = next((at for at, one in enumerate(own) if one in blocks), len(own))
            gone.update(own[first:])
        for known in self._known.values():
            if not blocks.isdisjoint(known.blocks):
                known.saved = len(known.prompt.ids)
                known.found.close()
                known.found.tokens = 0
        return gone

    def reported(self, reports: RankReports) -> None:
        """Learn what ranks have written; what all of them have is published by the next step."""
        ranks = len(self._namespaces)
        self._publishes += [told for told, count in reports.counts.items() if count == ranks]

    def matched(self, request: Request, computed: int) -> int:
        """Return how many tokens behind the computed ones the store has; asked repeatedly."""
        known = self._of(request)
        if known is None:
            return 0
        return max(0, self._loaded_stop(known) - computed)

    def allocated(self, request: Request, blocks: list[int], external: int) -> None:
        """Learn which blocks a request has, and how many tokens of it are to be loaded.

        Parameters
        ----------
        request
            Which one.
        blocks
            Its blocks from the first token on.
        external
            Tokens that `matched` promised and vLLM counts as computed from here on.
        """
        known = self._of(request)
        if known is None or external <= 0:
            return
        stop = self._loaded_stop(known)
        known.load = stop - external, stop
        known.blocks = list(blocks)

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """Return what the worker does in one step."""
        plan = StepPlan(publishes=self._publishes)
        self._publishes, self._step = [], []
        for new in output.scheduled_new_reqs:
            self._planned(plan, output, new.req_id, new.block_ids[0], new.num_computed_tokens)
        again = output.scheduled_cached_reqs
        for at, request in enumerate(again.req_ids):
            new_blocks = again.new_block_ids[at]
            blocks = [] if new_blocks is None else list(new_blocks[0])
            known = self._known.get(request)
            if known is not None and request not in again.resumed_req_ids:
                blocks = known.blocks + blocks
            self._planned(plan, output, request, blocks, again.num_computed_tokens[at])
        return plan

    def finished(self, request: str) -> None:
        """Let go of what a request that is over had leased."""
        known = self._known.pop(request, None)
        if known is not None:
            known.found.close()

    def close(self) -> None:
        """Let go of everything."""
        for request in list(self._known):
            self.finished(request)

    # --- inside ----------------------------------------------------------------------------

    def _loaded_stop(self, known: _Known) -> int:
        """Return the position behind the last token that can be loaded, which ends a block."""
        # One token at least is computed: its logits are what the request came for.
        usable = min(known.stored, len(known.prompt.ids) - 1)
        return usable // self._block_tokens * self._block_tokens

    def _of(self, request: Request) -> _Known | None:
        """Return what is known of a request; None where the store does not serve it."""
        known = self._known.get(request.request_id)
        if known is None:
            refused, adapter = refusal_of(request), ""
            if refused is None and request.lora_request is not None:
                try:
                    adapter = self._adapters.digest(request.lora_request)
                except UnknownAdapterError as error:
                    refused = str(error)
            if self._is_resting or refused is not None:
                self._tell(refused)
                return None
            salt = (request.cache_salt or "").encode()
            prompt = Prompt(tuple(request.prompt_token_ids or ()), salt, adapter)
            others, why = self._others()
            self._tell_once(f"rows of another engine are not taken: {why}" if why else "")
            found = FoundByAll(self._store, self._namespaces, prompt, others)
            # What is computed behind rows of another engine is nobody's own, and is not stored.
            saved = len(prompt.ids) if found.taken is not None else found.tokens
            known = _Known(prompt, found, saved=saved)
            self._known[request.request_id] = known
        return known

    def _tell(self, refused: str | None) -> None:
        if refused is not None:
            self._tell_once(f"a request is neither loaded nor stored: {refused}")

    def _tell_once(self, line: str) -> None:
        if line and line not in self._warned:
            self._warned.add(line)
            self._warn(line)

    def _planned(
        self, plan: StepPlan, output: Any, request: str, blocks: Any, computed: int
    ) -> None:
        self._step.append(list(blocks))
        known = self._known.get(request)
        if known is None:
            return
        known.blocks = list(blocks)
        if known.load is not None:
            blocks_of, space = tuple(known.blocks), known.found.taken
            plan.loads.append(PlannedLoad(request, known.prompt, *known.load, blocks_of, space))
            known.load = None
        stop = min(computed + output.num_scheduled_tokens[request], len(known.prompt.ids))
        if stop // GROUP_TOKENS * GROUP_TOKENS > known.saved:
            plan.saves.append(
                PlannedSave(request, known.prompt, known.stored, stop, tuple(known.blocks))
            )
            known.saved = stop // GROUP_TOKENS * GROUP_TOKENS
