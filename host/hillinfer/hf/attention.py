# SPDX-License-Identifier: Apache-2.0
"""What transformers calls: a cache's layers, the attention and mask functions, and RMS norms."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import ContextVar
from typing import Any, cast

import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import causal_mask_function, sdpa_mask

from hillinfer.attention.grouped_query import grouped_query_attention
from hillinfer.engine.queries import Prediction
from hillinfer.errors import CacheUseError, UnsupportedFeatureError
from hillinfer.extents.shared_chunks import StoredRowsError
from hillinfer.hf.engine import Use
from hillinfer.hf.features import NAME, Guard
from hillinfer.hf.prompts import PromptCall
from hillinfer.trace.recorder import ForwardSpans

# --- a cache ---


class AttachedCache(Cache):  # type: ignore[misc]
    """A cache that stores and attends by itself; its layers are `AttachedLayer`s.

    A forward pass is `begin_forward`, then `store` and `attend` of every layer, then `end_forward`,
    which is left out where the pass broke off.
    """

    spans: ForwardSpans | None

    @abstractmethod
    def index_length(self, layer: int) -> int:
        """Return the tokens of a layer, padding included."""

    def check_model(self, model: Any) -> None:
        """Refuse another model, or number type, than this cache was made for."""

    def check_positions(self, positions: torch.Tensor | None) -> None:
        """Refuse positions (batch, tokens) of a pass that began, where this cache knows better."""

    @abstractmethod
    def check_continues(self, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Refuse full ids (batch, tokens) that do not start with what this cache holds."""

    def look_up(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None = None,
        chunk_tokens: int | None = None,
    ) -> int:
        """Take what a store has of a prompt that comes; return how many tokens need not come."""
        return 0

    def reads_singly(self, tokens: int) -> bool:
        """Whether so many tokens that come next are best read one by one."""
        return False

    def begin_prompt(self, ids: torch.Tensor, mask: torch.Tensor | None, call: PromptCall) -> None:
        """Learn what `generate` brings in a call that began."""

    def regain(self, error: StoredRowsError, model: Any) -> bool:
        """Have a model compute rows that a store cannot give back; False where there are none.

        A forward pass that broke off is forgotten then, and may begin again.
        """
        return False

    @property
    def takes_whole(self) -> bool:
        """Whether `begin_whole` may leave tokens of the next pass out."""
        return False

    def begin_whole(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        call: PromptCall,
    ) -> int:
        """Learn what a pass is to bring; return how many of its first tokens need not come."""
        return 0

    @property
    def holds_prompt(self) -> bool:
        """Whether a prompt is complete that `end_prompt` is to be told of."""
        return False

    def end_prompt(self) -> None:
        """Learn that a pass is through and others may use the engine."""

    @abstractmethod
    def begin_generate(self, use: Use) -> Use | None:
        """Learn that a call of `generate` brings tokens, and return the one it is made in."""

    @abstractmethod
    def end_generate(self, around: Use | None) -> None:
        """Learn that the call is over, however it ended; `around` is what its begin returned."""

    @abstractmethod
    def begin_forward(self, ids: torch.Tensor, mask: torch.Tensor | None, use: Use) -> None:
        """Learn which tokens (batch, tokens) a forward pass brings; mask of zeros for padding.

        The use is over when the pass is, however it ends.
        """

    @abstractmethod
    def end_forward(self) -> None:
        """Learn that the forward pass got through."""

    @abstractmethod
    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store a layer's new keys and values, (batch, kv_heads, tokens, head_dim)."""

    @abstractmethod
    def attend(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend to what `store` completed.

        (batch, query_heads, tokens, head_dim) in, (batch, tokens, query_heads, head_dim) out.
        """

    @property
    def takes_predictions(self) -> bool:
        """Whether `announce` is worth the price of a predicted query."""
        return False

    def announce(self, layer: int, predicted: Prediction, scaling: float) -> None:
        """Learn what a layer's predicted queries are computed by, before its turn."""

    def begin_choice(self, layer: int) -> None:
        """Learn that a layer's products are made, and its attention comes in a moment."""


# --- a layer ---


class HillInferLayer(CacheLayerMixin):  # type: ignore[misc]
    """Hands a layer's new keys and values to the cache and returns them unchanged in length.

    Attention modules pass what `update` returns on to the attention function untouched, so the
    returned key carries the layer it belongs to.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self, cache: AttachedCache, layer: int) -> None:
        super().__init__()
        # Without a cycle the cache and its space on the drive go when the last user drops it.
        self._cache = weakref.ref(cache)
        self.layer = layer

    @property
    def cache(self) -> AttachedCache:
        """The cache this layer is part of."""
        cache = self._cache()
        assert cache is not None, "a layer is only used through its cache"
        return cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: memory is taken as rows come."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values (batch, kv_heads, tokens, head_dim) and return them."""
        # As in the attention function, which says why.
        if torch.compiler.is_dynamo_compiling():
            stored: tuple[torch.Tensor, torch.Tensor] = self._left_out(key_states, value_states)
            return stored
        cache = self.cache
        spans = cache.spans
        if spans is None:
            cache.store(self.layer, key_states, value_states)
        else:
            with spans.store(self.layer):
                cache.store(self.layer, key_states, value_states)
        key_states._hillinfer_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    _left_out = torch.compiler.disable(update)  # type: ignore[no-untyped-call]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length of the mask and its offset, before `update`."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the tokens of this layer, padding included."""
        return self.cache.index_length(self.layer)

    def get_max_length(self) -> int:
        """Return -1: only the drive bounds the length."""
        return -1

    def reset(self) -> None:
        """Do nothing: the cache's own `reset` clears all layers at once."""

    def offload(self) -> None:
        """Do nothing: rows are on the drive already."""

    def prefetch(self) -> None:
        """Do nothing: rows are fetched when they are selected."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Refuse: beams are reordered for all layers at once by the cache."""
        raise RuntimeError("reorder the whole cache, not one layer")


# --- the attention function ---

# Mask functions are not told which cache a forward pass uses, so the model's hooks note it here:
# this thread's passes with caches of ours, one inside the other. Held weakly, because an
# interrupted pass is never taken away; the next one does it.
_own_uses: ContextVar[tuple[weakref.ref[Use], ...]] = ContextVar("hillinfer_own_uses", default=())

_AS_IT_IS = nullcontext()
_HARMLESS = frozenset(
    {
        "dropout",
        "position_ids",
        "use_cache",
        "sliding_window",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "is_causal",
        "tokenizer",  # What `generate` needs for stop strings it hands on to the model.
    }
)
_NAMES = {
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks with a learned logit",
    "sinks": "attention sinks with a learned logit",
    "position_bias": "a learned position bias",
    "indices": "sparse attention with its own indices",
    "block_indices": "sparse attention with its own indices",
}


def begin_own(use: Use) -> None:
    """Note that this thread begins a forward pass with a cache of ours."""
    _own_uses.set((*_under_way(), weakref.ref(use)))


def own_use() -> Use | None:
    """Return the innermost pass of this thread that is not over."""
    uses = _under_way()
    return uses[-1]() if uses else None


def end_own() -> None:
    """Note that the innermost pass of this thread is through."""
    _own_uses.set(_under_way()[:-1])


def _under_way() -> tuple[weakref.ref[Use], ...]:
    return tuple(one for one in _own_uses.get() if (use := one()) is not None and use.is_own)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend through the cache that a key came from, or as SDPA does for any other cache.

    Shapes as in transformers' attention interface: query (batch, query_heads, tokens, head_dim),
    output (batch, tokens, query_heads, head_dim).

    Raises
    ------
    UnsupportedFeatureError
        Where the model asks for something that a selected set of tokens cannot give.
    """
    # What `torch.compiler.disable` puts around a function takes as long as all that follows does in
    # Python, so only a compiler meets it.
    if torch.compiler.is_dynamo_compiling():
        left_out: tuple[torch.Tensor, torch.Tensor | None] = _left_out(
            module, query, key, value, attention_mask, scaling, **kwargs
        )
        return left_out
    layer = getattr(key, "_hillinfer_layer", None)
    if layer is None:
        out: tuple[torch.Tensor, torch.Tensor | None] = grouped_query_attention(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return out
    refuse_arguments(kwargs)
    if attention_mask is not None and attention_mask.dim() != 2:
        raise UnsupportedFeatureError("this model adds to its scores: it needs its ordinary cache")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    # Scoring is exact in the types it chooses; autocast would choose others for it.
    cache, number = layer.cache, layer.layer
    spans = cache.spans
    with without_autocast(query.device.type):
        if spans is None:
            return cache.attend(number, query, scaling), None
        with spans.attend(number):
            attended = cache.attend(number, query, scaling)
    spans.resume(number)
    return attended, None


_left_out = torch.compiler.disable(attention)  # type: ignore[no-untyped-call]


def is_autocast() -> bool:
    """Whether torch computes in other types than the model's."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Return what has torch compute in the model's own types, on a kind of device and the host."""
    if device == "cpu" and not torch.is_autocast_enabled("cpu"):
        return _AS_IT_IS
    kinds = [kind for kind in {"cpu", device} if torch.is_autocast_enabled(kind)]
    # Entering autocast takes long, also where it changes nothing, and every layer would do it.
    if not kinds:
        return _AS_IT_IS
    off = ExitStack()
    for kind in kinds:
        off.enter_context(torch.autocast(kind, enabled=False))
    return off


def refuse_arguments(arguments: dict[str, Any]) -> None:
    """Refuse attention arguments that change what attention computes."""
    if arguments.get("output_attentions"):
        raise UnsupportedFeatureError(
            "output_attentions=True: attention weights of tokens that were not selected do not "
            "exist; detach HillInfer to look at them"
        )
    if arguments.get("sliding_window") is not None:
        raise UnsupportedFeatureError(
            f"sliding_window={arguments['sliding_window']}: windowed attention needs the ordinary "
            "cache; set config.sliding_window = None if the model was trained without one"
        )
    if arguments.get("is_causal") is False:
        raise UnsupportedFeatureError(
            "is_causal=False: attention to later tokens needs all of them at once: use the "
            "ordinary cache"
        )
    for name, value in arguments.items():
        if name not in _HARMLESS and value is not None:
            feature = _NAMES.get(name, f"the attention argument {name!r}")
            raise UnsupportedFeatureError(
                f"{feature} ({name}) is not supported: this model needs its ordinary cache"
            )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def mask(
    *args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor | None:
    """Pass the two-dimensional mask on, or build SDPA's for any other cache.

    A mask of queries × keys is never made; the cache reads the padding from the rows of the mask.
    """
    if own_use() is None:
        built: torch.Tensor | None = sdpa_mask(*args, attention_mask=attention_mask, **kwargs)
        return built
    if kwargs.get("mask_function", causal_mask_function) is not causal_mask_function:
        raise UnsupportedFeatureError(
            "this model changes its causal mask (windows, images or packed sequences): it needs "
            "its ordinary cache"
        )
    return attention_mask


# --- a layer's norm ---

# Modules that divide by the root mean square and then multiply by a weight, without more.
_RMS_NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"})


_MODELS = "transformers.models."


def is_rms_norm(norm: Any) -> bool:
    """Whether a module is such a norm, as transformers made it."""
    own = norm.__dict__.get("forward")
    own = own.replaced if isinstance(own, SharedNorm) else own
    # A copy of an attached model has its class's own method there.
    of_class = type(norm).forward
    is_own = own is None or getattr(own, "__func__", None) is of_class
    is_own = is_own and of_class.__module__.startswith(_MODELS)
    is_hooked = norm._forward_hooks or norm._forward_pre_hooks
    return type(norm).__name__ in _RMS_NORMS and is_own and not is_hooked


class SharedNorm(Guard):
    """Wraps a norm's `forward`, of whose hidden states the next layer's query is predicted, too.

    Both norms divide by the same root mean square, and then multiply by weights of their own. What
    is divided once is taken for the very tensor that it was made of, as it was then, and once;
    threads may use it at once. Parameters as in `Guard`.
    """

    _name = "forward"
    _kept: tuple[torch.Tensor, int, torch.Tensor] | None = None

    @classmethod
    def between(cls, layer: Any, following: Any) -> SharedNorm | None:
        """Wrap a layer's norm; None, and nothing is done, where the next one divides otherwise."""
        norms = [getattr(one, "input_layernorm", None) for one in (layer, following)]
        if not all(one is not None and is_rms_norm(one) for one in norms):
            return None
        epsilon, other = (cast(Any, one).variance_epsilon for one in norms)
        return cls(cast(Any, norms[0])) if epsilon == other else None

    def entered(
        self, hidden: torch.Tensor, following: Any, layer: torch.nn.Module, hook: object
    ) -> torch.Tensor | None:
        """Return what the next layer's norm makes of hidden states, bit for bit; None to ask it.

        That is also where somebody may change the states between a hook of the layer and its norm.
        """
        own, norm = cast(Any, self._model), following.input_layernorm
        if not hidden.dtype is norm.weight.dtype is own.weight.dtype is torch.float32:
            return None
        is_last = next(reversed(layer._forward_pre_hooks.values())) is hook
        if hidden.is_inference() or not is_last or "forward" in layer.__dict__:
            return None
        if not (is_rms_norm(norm) and is_rms_norm(own)):
            return None
        variance = hidden.pow(2).mean(-1, keepdim=True)
        quotient = hidden * torch.rsqrt(variance + own.variance_epsilon)
        self._kept = hidden, hidden._version, quotient
        entered: torch.Tensor = norm.weight * quotient
        return entered

    def remove(self) -> None:
        """Give the norm its method back, unless somebody has given it another one."""
        if isinstance(self._model.__dict__.get(self._name), Guard):
            super().remove()

    def __call__(self, hidden_states: torch.Tensor) -> Any:
        """Return the norm of hidden states."""
        if torch.compiler.is_dynamo_compiling():
            return self._guarded(hidden_states)
        kept, self._kept = self._kept, None
        if kept is None or kept[0] is not hidden_states or kept[1] != hidden_states._version:
            own = type(self._model).forward.__get__(self._model)
            return (own if self.replaced is None else self._guarded)(hidden_states)
        return cast(Any, self._model).weight * kept[2]


# --- arguments of passes ---


def check_arguments(module: Any, arguments: dict[str, Any]) -> None:
    """Refuse arguments, and states of a model, that a pass with a cache of ours cannot have."""
    if module.training:
        raise UnsupportedFeatureError(
            "the model is in training mode, which drops or changes its cache: call model.eval()"
        )
    if module.config._attn_implementation != NAME:
        raise CacheUseError(
            f"the model's attention was set to {module.config._attn_implementation!r} while "
            f"HillInfer is attached, which then attends to nothing: call "
            f"model.set_attn_implementation({NAME!r}), or detach, set it, and attach again"
        )
    wanted = arguments.get("output_attentions")
    if getattr(module.config, "output_attentions", False) if wanted is None else wanted:
        refuse_arguments({"output_attentions": True})
    if arguments.get("use_cache") is False:
        raise UnsupportedFeatureError(
            "use_cache=False: all tokens would come again at every step and be stored again; leave "
            "it out, or leave past_key_values out"
        )
    if arguments.get("input_ids") is None:
        raise UnsupportedFeatureError(
            "inputs_embeds: the cache keeps token ids to tell prompts apart; pass input_ids"
        )
    check_ids(arguments["input_ids"])


def check_ids(ids: Any) -> None:
    """Refuse what are no token ids (batch, tokens), and none at all."""
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        found = f"shape {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise CacheUseError(
            f"input_ids must be a tensor of (batch, tokens), not {found}: take what "
            "tokenizer(texts, return_tensors='pt') gives"
        )
    if not ids.numel():
        raise CacheUseError(
            f"the prompt is empty (input_ids of shape {tuple(ids.shape)}): pass at least one token"
        )
