# SPDX-License-Identifier: Apache-2.0
"""Every check of a run that needs no weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hillinfer.byte_size import format_bytes
from hillinfer.cli.generate_request import Asking, Compare, GenerateRequest
from hillinfer.cold_dir import prepared_cold_dir
from hillinfer.devices.table import make_scorer
from hillinfer.hf.features import check_model, check_versions
from hillinfer.machine.drive import DriveFacts
from hillinfer.models.capacity import Capacity
from hillinfer.models.context_needs import ContextNeeds
from hillinfer.models.loader import ModelOutline
from hillinfer.policies.pool_policies import make_pool_policy
from hillinfer.pools.budget_plan import hit_bytes, kernel_spec, observed_bytes
from hillinfer.prompt import DocumentPrompt, PromptError
from hillinfer.settings import Settings
from hillinfer.storage.shadow_memory import statistics_bytes
from hillinfer.storage.shadow_store import shadow_bytes
from hillinfer_model.choices import KeyMode
from hillinfer_model.kernel_spec import GROUP_TOKENS

_INTERACTIVE_QUESTION_TOKENS = 512


@dataclass(frozen=True)
class CheckedRun:
    """What a run may rely on.

    Parameters
    ----------
    document_ids
        To be read first.
    question_tokens
        Longest question that the context has room for.
    context_tokens
        Document, longest question and longest answer together.
    settings
        With the cold directory and the DRAM budget in bytes.
    """

    document_ids: list[int]
    question_tokens: int
    context_tokens: int
    settings: Settings


def check_run(
    request: GenerateRequest,
    outline: ModelOutline,
    prompt: DocumentPrompt,
    say: Callable[[str], None],
) -> CheckedRun:
    """Check model, device, positions, budget, memory and drive, and say what fits.

    Parameters
    ----------
    request, outline, prompt
        What was asked for.
    say
        Called with a line for what a user should know.

    Raises
    ------
    UnsupportedFeatureError, SettingsError, PromptError, ColdPoolError, BudgetError, FitError
        For the first thing that cannot work.
    """
    check_versions()
    check_model(outline.skeleton)
    make_scorer(
        request.settings.device,
        kernel_spec(outline.shape, _named(request.settings)),
        request.settings.scope,
    )
    asks = bool(request.questions) or request.asking is Asking.INTERACTIVE
    document_ids = prompt.document_ids() if asks else prompt.alone()
    lengths = [len(prompt.question_ids(question)) for question in request.questions]
    if request.asking is Asking.INTERACTIVE:
        lengths = [0, _INTERACTIVE_QUESTION_TOKENS]
    longest, shortest = max(lengths, default=0), min(lengths, default=0)
    context = len(document_ids) + longest + request.max_new_tokens
    positions = outline.shape.max_positions
    if context > positions:
        raise PromptError(
            f"{len(document_ids) + longest} prompt tokens and {request.max_new_tokens} new tokens "
            f"are more than the model's {positions} positions: shorten the prompt to "
            f"{max(0, positions - request.max_new_tokens)} tokens or lower --max-new-tokens"
        )
    drive = DriveFacts.probe(prepared_cold_dir(request.settings.cold_dir))
    if drive.warning:
        say(f"hillinfer: warning: {drive.warning}")
    needs = ContextNeeds.of(
        outline,
        request.settings,
        request.budget,
        chunk_tokens=request.chunk_tokens,
        # In a comparison each fork is a copy of the ordinary cache.
        ordinary_caches=(1 + request.forks) if request.compare is Compare.FULL else 0,
        fork_bytes=request.forks * _fork_bytes(request, outline, len(document_ids)),
        reserved_tokens=context - len(document_ids) - shortest,
    )
    capacity = Capacity.measure(drive, outline.device)
    needs.check(context, capacity)
    footprint = needs.footprint(context)
    say(
        f"{outline.source.name}: {context} tokens of context take about "
        f"{format_bytes(footprint.memory_bytes)} of {format_bytes(capacity.memory_bytes)} free "
        f"memory and {format_bytes(footprint.drive_bytes)} of "
        f"{format_bytes(capacity.drive_bytes)} free drive; largest context that fits: "
        f"{needs.largest_context(capacity)} tokens (the model has {positions} positions)"
    )
    choice = needs.choice(context)
    if request.settings.shadow is None:
        say(f"key shadow: {choice.settings.key_mode.value}, chosen for this budget")
    if choice.warning:
        say(f"hillinfer: warning: {choice.warning}")
    return CheckedRun(
        document_ids=document_ids,
        question_tokens=longest,
        context_tokens=context,
        settings=choice.settings,
    )


def _fork_bytes(request: GenerateRequest, outline: ModelOutline, document_tokens: int) -> int:
    """Return what a fork of the document's cache holds for itself."""
    shape = outline.shape
    policy = make_pool_policy(request.settings.pool_policy)
    own = GROUP_TOKENS * shape.token_bytes + observed_bytes(shape, policy.observed_queries)
    # The fork's hit-rate table; it grows with what the fork reads, a step at most.
    own += hit_bytes(shape, document_tokens + 1)
    # An open segment is coded, and then copied by a fork, only when a single token is read.
    if (document_tokens - 1) % request.chunk_tokens:
        return own
    spec = kernel_spec(shape, _named(request.settings))
    return own + shape.layers * (shadow_bytes(spec) + statistics_bytes(spec))


def _named(settings: Settings) -> Settings:
    """Return settings with the widest shadow where none is named."""
    return replace(settings, shadow=settings.shadow or KeyMode.INT8)
