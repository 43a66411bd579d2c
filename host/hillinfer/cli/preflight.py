# SPDX-License-Identifier: Apache-2.0
"""Checks of a run that need no weights, made before the model is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hillinfer.cli.console import panics_unsaid
from hillinfer.cli.generate import Asking, Compare, GenerateRequest
from hillinfer.devices.opening import DEVICES, OpenDevice, check_device
from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.directories import DriveFacts, prepared_cold_dir
from hillinfer.engine.budget_growth import AUTO_FORMATS
from hillinfer.engine.budget_plan import DevicePart, hit_bytes, kernel_spec
from hillinfer.errors import PromptError
from hillinfer.generate.prompt import DocumentPrompt, QuestionPrompt
from hillinfer.hf.features import check_model, check_versions
from hillinfer.hf.hooks import with_named_query
from hillinfer.kv.pool_policies import make_pool_policy
from hillinfer.kv.sequence import observed_bytes
from hillinfer.models.loader import ModelOutline
from hillinfer.models.needs import Capacity, ContextNeeds, activation_bytes, ordinary_token_bytes
from hillinfer.models.sources import ModelSource
from hillinfer.projections.attachment import PackingBytes
from hillinfer.projections.ways import make_projections
from hillinfer.pruning.rankers import UNIT_TOKENS, make_ranker, unit_key_bytes
from hillinfer.pruning.states import BUFFER_BYTES
from hillinfer.sessions.fingerprint import Fingerprint
from hillinfer.sessions.manifest import reusable_tokens
from hillinfer.sessions.opening import SavedSession
from hillinfer.settings import Encryption, Settings
from hillinfer.shadow.store import shadow_bytes, statistics_bytes
from hillinfer.values import format_bytes
from hillinfer_model.kernel_spec import GROUP_TOKENS

_INTERACTIVE_QUESTION_TOKENS = 512
# Tokenizers may leave out characters, such as repeated spaces, before they look for tokens.
_FEWER_CHARACTERS = 16
# Of the stored type.
_KEY_ITEM_BYTES = 2


@dataclass(frozen=True)
class Surroundings:
    """What a run reaches outside of itself; a program that calls the command may give its own.

    Parameters
    ----------
    calls
        How the drive is reached; the operating system itself where None.
    devices
        What opens a device of each name.
    probe
        Looks at the cold directory with these calls.
    measure
        Returns what is free on that drive and where the model will run.
    locate
        Finds a model by its name.
    """

    calls: DriveCalls | None = None
    devices: Mapping[str, OpenDevice] = field(default_factory=lambda: DEVICES)
    probe: Callable[[Path, DriveCalls | None], DriveFacts] = DriveFacts.probe
    measure: Callable[[DriveFacts, str], Capacity] = Capacity.measure
    locate: Callable[[str, Callable[[str], None]], ModelSource] = ModelSource.locate


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
    reused_tokens
        First tokens of the document that a session brings.
    session_seconds
        Time that checking the session took.
    """

    document_ids: list[int]
    question_tokens: int
    context_tokens: int
    settings: Settings
    reused_tokens: int = 0
    session_seconds: float = 0.0


def check_run(
    request: GenerateRequest,
    outline: ModelOutline,
    prompt: QuestionPrompt,
    saved: SavedSession | None,
    say: Callable[[str], None],
    around: Surroundings,
) -> CheckedRun:
    """Check model, device, session, positions, budget, memory and drive, and say what fits.

    `saved` is None where no session is used; `say` is called with a line for what a user should
    know; `around` is what the run reaches. Raises UnsupportedFeatureError, SessionError,
    SettingsError, PromptError, ColdPoolError, BudgetError or FitError for the first thing that
    cannot work.
    """
    check_versions()
    check_model(outline.skeleton)
    placed = request.settings.computed_on(outline.device)
    settings = with_named_query(placed, outline.config.model_type)
    request = replace(request, settings=settings)
    started = time.perf_counter()
    if saved is not None:
        settings = _fitting(request, outline, saved)
    _check_characters(request, outline)
    with panics_unsaid():
        document_ids = _document_ids(request, prompt, saved)
        asked = [prompt.question_ids(question) for question in request.questions]
    if isinstance(prompt, DocumentPrompt) and prompt.spelled_tokens:
        say(
            f"special tokens in the text, like {prompt.spelled_tokens[0]}, are read as characters "
            "(--special-tokens control obeys them)"
        )
    reused = 0 if saved is None else _reused(request, document_ids, saved, say)
    session_seconds = time.perf_counter() - started
    _check_ids(outline, [document_ids, *asked])
    lengths = [len(ids) for ids in asked]
    if request.asking is Asking.INTERACTIVE:
        lengths = [0, _INTERACTIVE_QUESTION_TOKENS]
    longest, shortest = max(lengths, default=0), min(lengths, default=0)
    new_tokens = 0 if request.only_reads else request.max_new_tokens
    context = len(document_ids) + longest + new_tokens
    positions = outline.shape.max_positions
    if context > positions:
        raise PromptError(
            f"{len(document_ids) + longest} prompt tokens and {new_tokens} new tokens "
            f"are more than the model's {positions} positions: shorten the prompt to "
            f"{max(0, positions - new_tokens)} tokens or lower --max-new-tokens"
        )
    drive = around.probe(prepared_cold_dir(request.settings.cold_dir), around.calls)
    if drive.warning:
        say(f"hillinfer: warning: {drive.warning}")
    own_bytes, beside_token_bytes = _pruning_bytes(request, settings, outline, len(document_ids))
    shape, item_bytes = outline.shape, outline.dtype.itemsize
    # In a comparison each fork is a copy of the ordinary cache.
    ordinary_caches = (1 + request.forks) if request.compare is Compare.FULL else 0
    needs = ContextNeeds(
        shape=shape,
        settings=settings,
        budget=request.budget,
        loading_bytes=outline.loading_bytes,
        activation_bytes=activation_bytes(outline.config, shape, item_bytes, request.chunk_tokens),
        chunk_tokens=request.chunk_tokens,
        ordinary_token_bytes=ordinary_caches * ordinary_token_bytes(shape, item_bytes),
        fork_bytes=own_bytes
        + request.forks * _fork_bytes(request, settings, outline, len(document_ids), reused),
        reserved_tokens=context - len(document_ids) - shortest,
        stored_tokens=reused,
        packed_bytes=PackingBytes.of(
            outline.skeleton, make_projections(request.projections), item_bytes
        ).most,
        beside_token_bytes=beside_token_bytes,
    )
    choice = needs.choice(context)
    # A card's image is for one format: that of the run, which a session or the budget may choose.
    check_device(
        settings.device,
        kernel_spec(outline.shape, choice.settings),
        settings.scope,
        settings.device_options,
        around.devices,
    )
    capacity = around.measure(drive, outline.device)
    needs.check(context, capacity)
    footprint = needs.footprint(context)
    say(
        f"{outline.source.name}: {context} tokens of context take about "
        f"{format_bytes(footprint.memory_bytes)} of {format_bytes(capacity.memory_bytes)} free "
        f"memory and {format_bytes(footprint.drive_bytes)} of "
        f"{format_bytes(capacity.drive_bytes)} free drive; largest context that fits: "
        f"{needs.largest_context(capacity)} tokens (the model has {positions} positions)"
    )
    raised = needs.raised_budget(context)
    if raised:
        say(raised)
    if settings.shadow is None:
        say(f"key shadow: {choice.settings.key_mode.value}, chosen for this budget")
    if settings.has_coded_tokens and not choice.settings.has_coded_tokens:
        say(
            "all selected tokens come as 16-bit rows: this budget has no room for the key shadow "
            "and tables that coded tokens need"
        )
    if choice.warning:
        say(f"hillinfer: warning: {choice.warning}")
    return CheckedRun(
        document_ids=document_ids,
        question_tokens=longest,
        context_tokens=context,
        settings=choice.settings,
        reused_tokens=reused,
        session_seconds=session_seconds,
    )


def _fitting(request: GenerateRequest, outline: ModelOutline, saved: SavedSession) -> Settings:
    """Refuse a session of another model as far as that shows without weights, and take its shadow.

    Then all of it is read and checked: nothing else needs to be done where it is damaged.
    """
    own = saved.manifest
    settings = replace(request.settings, shadow=request.settings.shadow or own.shadow)
    shadow = settings.key_mode.codes
    found = Fingerprint.of(outline.config, outline.dtype, shadow, outline.tokenizer)
    own.fingerprint.check(found, saved.directory)
    saved.verify()
    return settings


def _check_ids(outline: ModelOutline, prompts: list[list[int]]) -> None:
    """Refuse tokens that the model has no row of its embedding for."""
    words = outline.skeleton.get_input_embeddings().num_embeddings
    highest = max((max(ids) for ids in prompts if ids), default=0)
    if highest >= words:
        raise PromptError(
            f"the tokenizer of {outline.source.name} makes token {highest} of the prompt and the "
            f"model has {words} tokens: they are not of one model, get it anew"
        )


def _check_characters(request: GenerateRequest, outline: ModelOutline) -> None:
    """Refuse a text so long that making tokens of it only takes time and memory."""
    longest = max((len(token) for token in outline.tokenizer.get_vocab()), default=1)
    most = outline.shape.max_positions * longest * _FEWER_CHARACTERS
    for text in (request.document or "", *request.questions):
        if len(text) > most:
            raise PromptError(
                f"a prompt of {len(text)} characters is more than the model's "
                f"{outline.shape.max_positions} positions hold: shorten it"
            )


def _document_ids(
    request: GenerateRequest, prompt: QuestionPrompt, saved: SavedSession | None
) -> list[int]:
    if isinstance(prompt, DocumentPrompt):
        # What is kept is what every question's prompt starts with.
        keeps = request.only_reads or request.save_session is not None
        ids = prompt.document_ids() if request.asks or keeps else prompt.alone()
        if not ids:
            raise PromptError(
                "the prompt has no tokens: this model's tokenizer drops every character of it"
            )
        return ids
    assert saved is not None
    return saved.token_ids()


def _reused(
    request: GenerateRequest,
    document_ids: list[int],
    saved: SavedSession,
    say: Callable[[str], None],
) -> int:
    """Return how many tokens need not be read, and say so."""
    own = saved.manifest
    if request.document is None:
        say(f"session: {saved.tokens} tokens of {saved.directory}")
        return saved.tokens
    reused = reusable_tokens(
        saved.token_ids(),
        document_ids,
        request.chunk_tokens,
        own.fingerprint.segment_tokens,
        # Without a question or a session to save the last token's output starts the answer.
        unread_tokens=0 if request.asks or request.only_reads else 1,
    )
    if not reused:
        say(
            f"session: {saved.directory} has no whole segment of "
            f"{own.fingerprint.segment_tokens} tokens in common with this document, which is read "
            "from its start"
        )
        return 0
    say(f"session: {reused} of {len(document_ids)} tokens are reused from {saved.directory}")
    if own.chunk_tokens not in (None, request.chunk_tokens):
        say(
            f"session: it was read with --prefill-chunk {own.chunk_tokens}; other chunks may round "
            "otherwise"
        )
    return reused


def _pruning_bytes(
    request: GenerateRequest, settings: Settings, outline: ModelOutline, document_tokens: int
) -> tuple[int, int]:
    """Return what reading in stages holds, whatever the context's length, and for each token."""
    if request.prune is None:
        return 0, 0
    shape = outline.shape
    policy = make_pool_policy(settings.pool_policy)
    # Of each band, in each fork, too: an open group, and queries of the last tokens.
    band = GROUP_TOKENS * shape.token_bytes + observed_bytes(shape, policy.observed_queries)
    if request.store or request.session:
        # Hits of tokens that are stored, which bands begin with.
        band += hit_bytes(shape, document_tokens)
    # Keys of the layer that decides; what states go through on their way to the drive.
    per_token = shape.kv_heads * shape.head_dim * _KEY_ITEM_BYTES
    # Keys of units, which the rule makes, or one that `auto` finds.
    unit_tokens: int | None = UNIT_TOKENS
    if not request.prune.is_found:
        unit_tokens = make_ranker(request.prune.ranker).unit_tokens
    channels = shape.kv_heads * shape.head_dim
    # The last unit may have few tokens.
    through = unit_key_bytes(1, unit_tokens, channels)
    per_token += -(-through // (unit_tokens or 1))
    if settings.encrypt_cold_pool is Encryption.YES:
        # Boundary states, and states between bands, which lie on no drive then.
        states = outline.config.get_text_config().hidden_size * outline.dtype.itemsize
        per_token += states * min(request.prune.bands, 2)
    else:
        through += BUFFER_BYTES
    return request.prune.bands * (1 + request.forks) * band + through, per_token


def _fork_bytes(
    request: GenerateRequest,
    settings: Settings,
    outline: ModelOutline,
    document_tokens: int,
    reused_tokens: int,
) -> int:
    """Return what a fork of the document's cache holds for itself."""
    shape = outline.shape
    policy = make_pool_policy(settings.pool_policy)
    own = GROUP_TOKENS * shape.token_bytes + observed_bytes(shape, policy.observed_queries)
    # The fork's hit-rate table; it grows with what the fork reads, a step at most.
    own += hit_bytes(shape, document_tokens + 1)
    # An open segment is coded, and then copied by a fork, only when a single token is read.
    # What a session's open segment is, is not asked.
    if (document_tokens - 1) % request.chunk_tokens and not reused_tokens:
        return own
    # Unnamed, the widest that may be chosen: what is chosen depends on what forks hold.
    spec = kernel_spec(shape, replace(settings, shadow=settings.shadow or AUTO_FORMATS[0]))
    device = DevicePart.of(settings.device, spec, shape.layers, 1, 1)
    shadow = shape.layers * (shadow_bytes(spec) + statistics_bytes(spec))
    return own + shadow + device.probe_bytes
