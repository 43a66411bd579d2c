# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: which prompts the store knows, and what each step loads and stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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


@dataclass(frozen=True)
class _Turn:
    """What a request has of a step.

    Parameters
    ----------
    request
        Its name.
    computed
        Its tokens that have rows before the step, or are loaded in it.
    blocks
        From its first token on.
    shared, filled
        Of its new blocks those that vLLM's own cache had, and those that it loads or computes.
    """

    request: str
    computed: int
    blocks: list[int]
    shared: list[int]
    filled: list[int]


class _BlocksOfOthers:
    """Blocks of vLLM with another engine's rows, or with what was computed behind such rows.

    vLLM's own cache gives them to later requests, also once the store has those rows no more.
    """

    def __init__(self) -> None:
        self._blocks: set[int] = set()
        self._requests: set[str] = set()

    def behind(self, turns: Sequence[_Turn], loading: set[str]) -> set[str]:
        """Learn what a step fills; return its requests that compute behind rows of others.

        Parameters
        ----------
        turns
            Of the step, in any order.
        loading
            Requests that load rows of others in it.
        """
        for one in turns:
            self._blocks.difference_update(one.filled)
        found = loading | {one.request for one in turns if one.request in self._requests}
        known = -1
        # Of two requests that begin in one step the one may share what the other one fills.
        while len(found) > known:
            known = len(found)
            self._blocks.update(*(one.filled for one in turns if one.request in found))
            found |= {one.request for one in turns if not self._blocks.isdisjoint(one.shared)}
        self._requests |= found
        return found

    def finished(self, request: str) -> None:
        """Forget a request, and none of its blocks."""
        self._requests.discard(request)


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
        # Of the last step: what became of it is told when some of its requests may be over.
        self._step: list[_Turn] = []
        self._of_others = _BlocksOfOthers()
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
        for turn in self._step:
            own = turn.blocks
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
        # vLLM asks also where the answer needs what all tokens compute, as logprobs of the prompt
        # do. 0.32 loads nothing then, whatever it is told. Rows are stored all the same.
        if known is None or request.skip_reading_prefix_cache:
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
        self._publishes = []
        self._step = list(self._turns(output))
        loading = {one.request for one in self._step if self._loads_of_others(one.request)}
        behind = self._of_others.behind(self._step, loading)
        for turn in self._step:
            known = self._known.get(turn.request)
            if known is None:
                continue
            if turn.request in behind:
                # What is computed behind rows of another engine is nobody's own, and is not stored.
                known.saved = len(known.prompt.ids)
            self._planned(plan, turn, known, output.num_scheduled_tokens[turn.request])
        return plan

    def finished(self, request: str) -> None:
        """Let go of what a request that is over had leased."""
        self._of_others.finished(request)
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
            known = _Known(prompt, found, saved=found.tokens)
            self._known[request.request_id] = known
        return known

    def _tell(self, refused: str | None) -> None:
        if refused is not None:
            self._tell_once(f"a request is neither loaded nor stored: {refused}")

    def _tell_once(self, line: str) -> None:
        if line and line not in self._warned:
            self._warned.add(line)
            self._warn(line)

    def _turns(self, output: SchedulerOutput) -> Iterator[_Turn]:
        """Yield what each request has of a step, also those that the store does not serve."""
        for new in output.scheduled_new_reqs:
            yield self._begun(new.req_id, new.block_ids[0], new.num_computed_tokens)
        again = output.scheduled_cached_reqs
        for at, request in enumerate(again.req_ids):
            new_blocks, computed = again.new_block_ids[at], again.num_computed_tokens[at]
            own = [] if new_blocks is None else list(new_blocks[0])
            if request in again.resumed_req_ids:
                yield self._begun(request, own, computed)
            else:
                known = self._known.get(request)
                blocks = own if known is None else known.blocks + own
                yield _Turn(request, computed, blocks, [], own)

    def _begun(self, request: str, blocks: Sequence[int], computed: int) -> _Turn:
        """Return the turn of a request that begins, or begins anew."""
        known, own = self._known.get(request), list(blocks)
        cached = computed if known is None or known.load is None else known.load[0]
        at = cached // self._block_tokens
        return _Turn(request, computed, own, own[:at], own[at:])

    def _loads_of_others(self, request: str) -> bool:
        known = self._known.get(request)
        return known is not None and known.load is not None and known.found.taken is not None

    def _planned(self, plan: StepPlan, turn: _Turn, known: _Known, tokens: int) -> None:
        request, known.blocks = turn.request, turn.blocks
        if known.load is not None:
            blocks_of, space = tuple(known.blocks), known.found.taken
            plan.loads.append(PlannedLoad(request, known.prompt, *known.load, blocks_of, space))
            known.load = None
        stop = min(turn.computed + tokens, len(known.prompt.ids))
        if stop // GROUP_TOKENS * GROUP_TOKENS > known.saved:
            plan.saves.append(
                PlannedSave(request, known.prompt, known.stored, stop, tuple(known.blocks))
            )
            known.saved = stop // GROUP_TOKENS * GROUP_TOKENS
