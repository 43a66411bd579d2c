# SPDX-License-Identifier: Apache-2.0
"""Hooks on an attached model: they begin and end passes, and predict next layers' queries."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from hillinfer.engine.queries import Prediction, Rotary
from hillinfer.errors import SettingsError
from hillinfer.extents.shared_chunks import StoredRowsError
from hillinfer.hf import attention
from hillinfer.hf.attention import AttachedCache, SharedNorm, is_rms_norm
from hillinfer.hf.engine import Use
from hillinfer.hf.features import Guard
from hillinfer.hf.prompts import PromptCall, without_first
from hillinfer.settings import QuerySource, Settings

# --- hooks ---


class ModelHook(ABC):
    """Something that torch calls before or after a module's forward pass.

    A function would be copied with its model and go on to know the model that it was made for. A
    copy of this hook, also one that is pickled, does nothing.
    """

    @abstractmethod
    def __call__(self, *args: Any) -> Any:
        """Do what torch asks for; arguments as torch gives them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return nothing

    def __reduce__(self) -> Any:
        return _no_hook, ()


def nothing(*args: Any) -> None:
    """Do nothing, in the place of a hook."""


def _no_hook() -> Any:
    return nothing


# --- forward passes ---

_TORCH_CALLS = "torch.nn.modules.module"

_Result = TypeVar("_Result")


def forward_hooks(model: PreTrainedModel) -> list[Any]:
    """Put the hooks of a whole model on it, and return what takes them off."""
    return [
        model.register_forward_pre_hook(_Before(), with_kwargs=True),
        model.register_forward_hook(_After(), with_kwargs=True, always_call=True),
    ]


class _Before(ModelHook):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        arguments = named(module.forward, args, kwargs)
        cache = arguments.get("past_key_values")
        if not isinstance(cache, AttachedCache):
            return None
        attention.check_arguments(module, arguments)
        cache.check_model(module)
        mask, found = arguments.get("attention_mask"), 0
        if cache.takes_whole:
            call, ids = PromptCall.of_forward(module, arguments), arguments["input_ids"]
            places = arguments.get("position_ids")
            begin = functools.partial(cache.begin_whole, ids, mask, places, call)
            found = regaining(cache, module, begin)
            if found:
                arguments = without_first(arguments, found)
        regaining(cache, module, functools.partial(begin_pass, cache, arguments))
        return ((), arguments) if found else None


def regaining(cache: AttachedCache, model: Any, act: Callable[[], _Result]) -> _Result:
    """Do something before a pass, once more where rows of a store had to be computed for it.

    A pass that broke off before may have left half a group, whose rows are read back.
    """
    try:
        return act()
    except StoredRowsError as error:
        if not cache.regain(error, model):
            raise
    return act()


def begin_pass(cache: AttachedCache, arguments: dict[str, Any]) -> None:
    """Tell a cache what the forward pass brings that the caller is in, given its arguments."""
    use = Use(forward_frame())
    cache.begin_forward(arguments["input_ids"], arguments.get("attention_mask"), use)
    attention.begin_own(use)
    cache.check_positions(arguments.get("position_ids"))


class _After(ModelHook):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        cache = named(module.forward, args, kwargs).get("past_key_values")
        if not isinstance(cache, AttachedCache):
            return
        # Nothing comes out of a forward pass that raised; the cache then forgets what it brought.
        if output is not None:
            attention.end_own()
            cache.end_forward()
            if cache.holds_prompt:
                cache.end_prompt()
            return
        use = attention.own_use()
        # This hook is called for a pass that was refused at its beginning, too.
        if use is not None and use.is_of(forward_frame()):
            use.end()


def forward_frame() -> FrameType:
    """Return the innermost call of a torch module on the stack, or the caller's own call."""
    caller = frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "_call_impl" and frame.f_globals.get("__name__") == _TORCH_CALLS:
            return frame
    return caller


def named(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return all arguments of a call by name."""
    if not args:
        return kwargs
    return dict(zip(inspect.signature(function).parameters, args, strict=False)) | kwargs


# --- an attached model's methods ---


class GuardedForward(Guard):
    """Wraps `forward`: a pass that meets stored rows which cannot be read is made again.

    A store that fails costs time and no pass, whoever makes it. The model computes the lost rows
    first, in passes of their own. Parameters as in `Guard`.
    """

    _name = "forward"

    # A compiler is to trace what is called, and not this.
    @functools.partial(torch.compiler.disable, recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make a forward pass."""
        try:
            return self._guarded(*args, **kwargs)
        except StoredRowsError as error:
            given = named(self._guarded, args, kwargs)
            cache = given.get("past_key_values")
            if not isinstance(cache, AttachedCache) or not cache.regain(error, self._model):
                raise
            begin_pass(cache, given)
        # Nothing of its prompt is asked of the store now.
        return self._guarded(*args, **kwargs)


# --- what predicts queries ---


class QueryPredictor(ABC):
    """Makes a layer's query from hidden states that are not its own (HillInfer section 4.3).

    Layers change the hidden states by little each, so those that enter the layer before give
    nearly the query that the layer will make.
    """

    def predict(self, layer: Any, hidden: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """Return the query that a decoder layer would make of some hidden states.

        Parameters
        ----------
        hidden
            (batch, tokens, hidden_size), before the layer's norm.
        rotary
            Cosines and sines of the tokens' positions, None in models without them.

        Returns
        -------
        (batch, query_heads, tokens, head_dim), as attention functions are given it.
        """
        return self.turn(self.project(layer, self.enter(layer, hidden)), rotary)

    @abstractmethod
    def enter(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the layer's attention would be given of hidden states."""

    @abstractmethod
    def project(self, layer: Any, entered: torch.Tensor) -> torch.Tensor:
        """Return the query of that, (batch, query_heads, tokens, head_dim), before positions."""

    def turn(self, query: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """Return a query as its position turns it."""
        return query

    @abstractmethod
    def scaling(self, layer: Any) -> float:
        """Return what the layer's attention multiplies inner products with."""


class _Predicted(Prediction):
    """The queries that a predictor makes of what enters a layer; they are computed when wanted."""

    def __init__(
        self, predictor: QueryPredictor, layer: Any, entered: torch.Tensor, rotary: Rotary | None
    ) -> None:
        self._predictor = predictor
        self._layer = layer
        # A copy, in effect: what the model does with its hidden states later is none of it.
        self._entered = entered
        self._rotary = rotary
        self._product: torch.Tensor | None = None

    def queries(self) -> torch.Tensor:
        """Return the queries; see `Prediction`."""
        return self._predictor.turn(*self.before_positions())

    def before_positions(self) -> tuple[torch.Tensor, Rotary | None]:
        """Return the layer's product; see `Prediction`."""
        if self._product is None:
            self._product = self._predictor.project(self._layer, self._entered)
        return self._product, self._rotary


# --- Queries of OPT ---


class OptPredictor(QueryPredictor):
    """OPT scales its query itself, and its positions are in the hidden states already."""

    def enter(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states behind the norm, where that comes first."""
        if not layer.do_layer_norm_before:
            return hidden
        normed: torch.Tensor = layer.self_attn_layer_norm(hidden)
        return normed

    def project(self, layer: Any, entered: torch.Tensor) -> torch.Tensor:
        """Return the query; see `QueryPredictor`."""
        attention = layer.self_attn
        query: torch.Tensor = attention.q_proj(entered) * attention.scaling
        return query.view(*entered.shape[:-1], -1, attention.head_dim).transpose(1, 2)

    def scaling(self, layer: Any) -> float:
        """Return 1: the query is scaled already."""
        return 1.0


# --- Queries of models with rotary positions ---


class RotaryPredictor(QueryPredictor):
    """Llama, Mistral, Qwen2 and Qwen3: norm, projection, norm of each head where there is one."""

    def enter(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states behind the norm."""
        norm: Any = layer.input_layernorm
        is_single = hidden.dtype is norm.weight.dtype is torch.float32
        if is_single and hidden.is_cpu and is_rms_norm(norm):  # The same bits by one call.
            return torch.rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon)
        normed: torch.Tensor = norm(hidden)
        return normed

    def project(self, layer: Any, entered: torch.Tensor) -> torch.Tensor:
        """Return the query before it is turned; see `QueryPredictor`."""
        attention, query = layer.self_attn, layer.self_attn.q_proj(entered)
        query = query.view(*entered.shape[:-1], -1, attention.head_dim)
        if hasattr(attention, "q_norm"):
            query = attention.q_norm(query)
        heads: torch.Tensor = query.transpose(1, 2)
        return heads

    def turn(self, query: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """Do what `apply_rotary_pos_emb` does to a query, without a key to turn beside it."""
        assert rotary is not None
        cosines, sines = rotary[0].unsqueeze(1), rotary[1].unsqueeze(1)
        first, second = query.chunk(2, -1)
        half_turned = torch.cat((-second, first), -1)
        turned: torch.Tensor = query * cosines + half_turned * sines
        return turned

    def scaling(self, layer: Any) -> float:
        """Return the layer's own factor."""
        return float(layer.self_attn.scaling)


# --- the table of families ---


@dataclass(frozen=True)
class Family:
    """What is known of one family of models.

    Parameters
    ----------
    predictor
        Makes a layer's query.
    default
        What `--query auto` means: `predicted` only where its selections were found to be as good
        on real weights, here (Llama, `make query`) or in print (OPT: InfiniGen, whose selections
        for OPT-6.7B to 30B rest on the same likeness of consecutive attention inputs).
    """

    predictor: QueryPredictor
    default: QuerySource


_FAMILIES = {
    "llama": Family(RotaryPredictor(), QuerySource.PREDICTED),
    "mistral": Family(RotaryPredictor(), QuerySource.TRUE),
    "qwen2": Family(RotaryPredictor(), QuerySource.TRUE),
    "qwen3": Family(RotaryPredictor(), QuerySource.TRUE),
    "opt": Family(OptPredictor(), QuerySource.PREDICTED),
}


def predictor_of(model_type: str, wanted: QuerySource) -> QueryPredictor | None:
    """Return what predicts the queries of a family, or None where true queries are to be used.

    Raises
    ------
    SettingsError
        Where predicted queries are asked for and the family has no predictor.
    """
    family = _FAMILIES.get(model_type)
    if family is None:
        if wanted is QuerySource.PREDICTED:
            raise SettingsError(
                f"query=predicted: nothing predicts the queries of {model_type} models; choose "
                f"--query true, or one of the families {', '.join(_FAMILIES)}"
            )
        return None
    source = family.default if wanted is QuerySource.AUTO else wanted
    return family.predictor if source is QuerySource.PREDICTED else None


def with_named_query(settings: Settings, model_type: str) -> Settings:
    """Return settings that name the query; where it is the true one, nothing is read ahead.

    Parameters
    ----------
    settings
        Whose query may be `auto`.
    model_type
        As in `predictor_of`, which see for errors.
    """
    if predictor_of(model_type, settings.query) is None:
        # Blocks that rows land in ahead of their layer would be memory for nothing.
        return replace(settings, query=QuerySource.TRUE, prefetch_blocks=0)
    return replace(settings, query=QuerySource.PREDICTED)


# --- hooks that announce predicted queries ---

# Layer 0's input is nothing like layer 1's, so layer 1 takes its true query like layer 0.
FIRST_PREDICTED = 2


def query_hooks(model: PreTrainedModel, predictor: QueryPredictor) -> list[Any]:
    """Put hooks on decoder layers that predict the query of the layer behind each (APP).

    Returns what takes them off. The predictor is that of the model's family.
    """
    layers = list(model.get_decoder().layers)
    made: list[Any] = []
    for number in range(FIRST_PREDICTED, len(layers)):
        before, following = layers[number - 1 : number + 1]
        coming = dict[int, weakref.ref[AttachedCache]]()
        norm = SharedNorm.between(before, following)
        announce = _Announce(predictor, number, following, coming, norm)
        made += [
            before.register_forward_pre_hook(announce, with_kwargs=True),
            following.self_attn.v_proj.register_forward_hook(_Begin(number, coming)),
        ]
        made += [] if norm is None else [norm]
    return made


# In which cache a layer was announced last, by thread.
_Coming = dict[int, weakref.ref[AttachedCache]]


@dataclass(frozen=True, eq=False)
class _Announce(ModelHook):
    _predictor: QueryPredictor
    _number: int
    _following: Any
    _coming: _Coming
    _norm: SharedNorm | None

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # As in the attention function, which says why.
        if torch.compiler.is_dynamo_compiling():
            self._left_out(module, args, kwargs)
            return
        cache = kwargs.get("past_key_values")
        hidden = args[0] if args else kwargs["hidden_states"]
        # Only a forward of a single token selects.
        is_step = hidden.shape[1] == 1
        if not (isinstance(cache, AttachedCache) and is_step and cache.takes_predictions):
            return
        following, predictor = self._following, self._predictor
        own, entered, rotary = self._norm, None, kwargs.get("position_embeddings")
        if own is not None:
            entered = own.entered(hidden, following, module, self)
        if entered is None:
            entered = predictor.enter(following, hidden)
        predicted = _Predicted(predictor, following, entered, rotary)
        spans = cache.spans
        if spans is not None:
            spans.announce()
        cache.announce(self._number, predicted, predictor.scaling(following))
        self._coming[threading.get_ident()] = weakref.ref(cache)
        if spans is not None:
            spans.go_on()

    _left_out = torch.compiler.disable(__call__)  # type: ignore[no-untyped-call]


class _Begin(ModelHook):
    """Comes when a layer has made its products: their weights are in the caches still."""

    def __init__(self, number: int, coming: _Coming) -> None:
        self._number = number
        self._coming = coming

    def __call__(self, *args: Any) -> None:
        # What is compiled chooses in the layer's turn.
        if not self._coming or torch.compiler.is_dynamo_compiling():
            return
        own = self._coming.pop(threading.get_ident(), None)
        cache = None if own is None else own()
        if cache is not None:
            cache.begin_choice(self._number)
