# SPDX-License-Identifier: Apache-2.0
"""HillInfer: long-context LLM inference with the KV cache on a drive."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hillinfer.errors import (
    BudgetError,
    CacheUseError,
    ColdPoolError,
    HillInferError,
    SessionError,
    SettingsError,
    UnsupportedFeatureError,
)
from hillinfer.settings import Settings
from hillinfer.values import ByteSize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hillinfer.hf.attach import Attachment
    from hillinfer.hf.cache import HillInferCache
    from hillinfer.pruning.reading import Pruning
    from hillinfer.pruning.schedule import Schedule
    from hillinfer.store.store import Store

__all__ = [
    "BudgetError",
    "ByteSize",
    "CacheUseError",
    "ColdPoolError",
    "HillInferCache",
    "HillInferError",
    "Schedule",
    "SessionError",
    "Settings",
    "SettingsError",
    "Store",
    "UnsupportedFeatureError",
    "attach",
    "grouped_query",
    "prune",
]


def __getattr__(name: str) -> Any:
    # numpy and SQLite load only where they are used.
    if name == "Store":
        from hillinfer.store.store import Store

        return Store
    if name == "Schedule":
        from hillinfer.pruning.schedule import Schedule

        return Schedule
    if name == "HillInferCache":
        from hillinfer.hf.cache import HillInferCache

        return HillInferCache
    raise AttributeError(f"module 'hillinfer' has no attribute '{name}'")


def attach(
    model: PreTrainedModel,
    settings: Settings | None = None,
    *,
    store: Store | Path | str | None = None,
    reuse: str = "longest",
    salt: bytes = b"",
    accept: Sequence[str] = (),
    **changes: Any,
) -> Attachment:
    """Put HillInfer on a transformers model; `.detach()` or a `with` block takes it off.

    Parameters
    ----------
    model
        A decoder-only model, unmodified.
    settings
        How tokens are selected and where rows lie; the defaults where None.
    store
        A `Store` that is open, or the directory of one: every prompt is looked up in it and stored.
        An encrypted one takes the key that `HILLINFER_STORE_KEY_FILE`,
        `HILLINFER_STORE_PASSPHRASE_FILE` or `HILLINFER_STORE_KEYRING` names. Nothing is stored
        where None.
    reuse
        Where a stored prefix may end: `longest`, at any 64 tokens, or `exact`, where an unbroken
        run has the same bits.
    salt
        Of a tenant: what is stored with another one is not found.
    accept
        Engines whose rows of the same model are taken from the store, too, like `("vllm",)`, and
        that may find what is made here. They are rounded otherwise.
    changes
        Single settings by name, like ``alpha=0.1`` or ``dram_budget="2GiB"``.

    Raises
    ------
    SettingsError
        Where a setting is unknown or out of range.
    StoreError
        Where the directory holds no store, or one that cannot be used.
    UnsupportedFeatureError
        Where the model cannot work with selected tokens.
    """
    # transformers and torch load only when a model is attached; the rest works without them.
    from hillinfer.hf.attach import Attachment

    if settings is not None and not isinstance(settings, Settings):
        raise SettingsError(
            f"settings must be hillinfer.Settings, not {type(settings).__name__}: give single "
            "settings by name, like alpha=0.1"
        )
    chosen = (settings or Settings()).changed(**changes)
    if store is None:
        return Attachment(model, chosen)
    # numpy and SQLite load only where a store is used.
    from hillinfer.reuse.model_prompts import ModelPrompts

    rounding = {"block_rows": chosen.block_rows}
    prompts = ModelPrompts(store, model, reuse, salt, divided_by=rounding, accept=accept)
    try:
        return Attachment(model, chosen, prompts=prompts)
    except BaseException:
        prompts.close()
        raise


def grouped_query(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Let a transformers model attend to an ordinary cache without copying keys of shared heads.

    For passes behind a prefix that `StoredPrompts.load_into` brought; the bits are those of SDPA.
    An attached model does so by itself. The model is as it was behind the `with` block.

    Raises
    ------
    UnsupportedFeatureError
        Where the model attends in another way than by SDPA.
    """
    # transformers and torch load only when a model is there.
    from hillinfer.attention.grouped_query import grouped_query as opened

    return opened(model)


def prune(
    model: PreTrainedModel,
    schedule: Schedule | str,
    *,
    ranker: str = "weights",
    later: str = "keep",
    chunk_tokens: int = 1024,
    decoding: str = "keep",
) -> Pruning:
    """Let a transformers model read prompts in stages, deeper layers with fewer of their tokens.

    For ordinary caches, and for HillInfer's where the model is attached; one prompt at a time.
    `.remove()` or a `with` block ends it.

    Parameters
    ----------
    model
        A decoder-only model, unmodified or attached: Llama, Mistral, Qwen2, Qwen3 or OPT.
    schedule
        Which layers keep how much, such as ``"15:50%"``: from layer 15 on, half of the blocks of 64
        tokens. ``"15:mass=97%"`` keeps as many as hold that share of attention's weights. Or the
        name of one in print, such as ``"llama-3.1-8b"``.
    ranker
        Which blocks stay: `weights`, what attention of the prompt's last tokens gives them;
        `paper`, SlimInfer's unit scores; and others, see `hillinfer.pruning.rankers.RANKERS`.
    later
        What a turn behind an answer does: `keep`, go on with what was kept; `anew`, choose again
        from hidden states of the first cut, which are kept in memory, or on an attached model's
        drive; `enter`, choose again and compute those blocks alone that deeper layers do not have,
        for ordinary caches and schedules of one cut.
    chunk_tokens
        Tokens that go through the deeper layers at once.
    decoding
        Which blocks deeper layers have while tokens are decoded: `keep`, those of the prompt's
        read; `swap`, SlimInfer's KV manager, for ordinary caches alone: where fewer than 90 % of
        the blocks that decoded tokens want are there, or than ``"swap:0.8"`` says, they change;
        ``"blocks:10%"``, the same rule in HillInfer's cache, where layers attend to so many of the
        prompt's blocks in place of `alpha`; ``"enter:10%"``, the same of all blocks, of which those
        that the read dropped are computed, for schedules of one cut.

    Raises
    ------
    SettingsError
        Where the schedule fits no such model, or a name is unknown.
    """
    # transformers and torch load only when a model is there.
    from hillinfer.pruning.block_policies import make_decoding
    from hillinfer.pruning.passes import LaterTurns
    from hillinfer.pruning.rankers import make_ranker
    from hillinfer.pruning.reading import Pruning
    from hillinfer.pruning.schedule import Schedule

    chosen = Schedule.parse(schedule) if isinstance(schedule, str) else schedule
    if later not in [*LaterTurns]:
        raise SettingsError(f"later={later!r}: choose one of {', '.join(LaterTurns)}")
    if chunk_tokens < 1:
        raise SettingsError(f"chunk_tokens={chunk_tokens}: give 1 at least")
    way = make_decoding(decoding)
    return Pruning(model, chosen, make_ranker(ranker), LaterTurns(later), chunk_tokens, way)
