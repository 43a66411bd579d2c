# SPDX-License-Identifier: Apache-2.0
"""Loading a model in two steps: what it is, then its weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hillinfer.errors import ModelError, one_line
from hillinfer.model_shape import ModelShape
from hillinfer.models.gguf import check_gguf, gguf_tensors, load_gguf
from hillinfer.models.json_files import check_settings
from hillinfer.models.sources import ModelSource, check_folder
from hillinfer.models.weights import check_loaded, check_stored, check_ties
from hillinfer.system.machine import NumberType, ProcessorFacts

_COMPUTED_IN = (torch.float32, torch.bfloat16, torch.float16)
_BUILDING_SECONDS = 60


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to generate; ModelError where answers end at what is no token id.

    Model, tokenizer and config are as transformers makes them, the model in evaluation mode on its
    device. `name` is as the user named it, `commit` that of a model of the hub, None for any other.
    """

    model: Any
    tokenizer: Any
    config: Any
    name: str
    commit: str | None = None

    def __post_init__(self) -> None:
        """Refuse ends of answers that are no token ids."""
        for one in self._ends():
            if isinstance(one, bool) or not isinstance(one, int):
                raise ModelError(
                    f"{self.name} ends answers at {one!r:.80}, and eos_token_id in its "
                    "generation_config.json is a number or a list of numbers"
                )

    @property
    def shape(self) -> ModelShape:
        """Shape of the model's KV cache."""
        return ModelShape.from_config(self.config, self.model.dtype)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end an answer, from the generation config and the tokenizer."""
        return frozenset(self._ends())

    def _ends(self) -> list[Any]:
        own = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        listed = own if isinstance(own, list) else [own]
        return [one for one in (*listed, self.tokenizer.eos_token_id) if one is not None]


@dataclass(frozen=True)
class ModelOutline:
    """Everything about a model but its weights.

    `source` says where its files lie; tokenizer and config are as transformers makes them. It will
    compute in `dtype` on `device`, `cuda` where a GPU is, else `cpu`. `skeleton` is the model with
    weights that have shapes and no memory (torch's meta device).
    """

    source: ModelSource
    tokenizer: Any
    config: Any
    dtype: torch.dtype
    device: str
    skeleton: Any

    @classmethod
    def read(cls, source: ModelSource, number_type: NumberType) -> ModelOutline:
        """Read config and tokenizer and build the model without memory for its weights.

        Raises ModelError where a file is not what it should be, config or tokenizer cannot be read,
        the model is not a causal language model, or the weights are not those that the config
        describes.
        """
        from transformers import AutoConfig, AutoTokenizer

        tensors = gguf_tensors(source.path) if source.gguf_file else check_folder(source.folder)
        # Whole: transformers would take a bare name from the current directory first.
        files = {"gguf_file": str(source.path.absolute())} if source.gguf_file else {}
        with one_line(f"read the model in {source.path}"):
            # A local folder only, so nothing here waits for a network.
            config = AutoConfig.from_pretrained(
                source.folder, trust_remote_code=False, local_files_only=True, **files
            )
            check_settings(config.to_dict(), source.path)
            tokenizer = AutoTokenizer.from_pretrained(
                source.folder, trust_remote_code=False, local_files_only=True, **files
            )
            words, rows = int(tokenizer.vocab_size), int(config.get_text_config().vocab_size)
            # What cannot make tokens of anything shows here, and not when a prompt is made: a
            # length that is no number, too.
            tokenizer("a b").input_ids  # noqa: B018
        if words > rows:
            raise ModelError(
                f"the tokenizer in {source.path} has {words} tokens and the model {rows}: they are "
                "not of one model, get it anew"
            )
        skeleton = _skeleton(config, source)
        if source.gguf_file is None:
            check_stored(skeleton, tensors, source.path)
        else:
            check_gguf(skeleton, tensors, source.path)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        own = torch.float32 if source.gguf_file else _own_type(config)
        if number_type is NumberType.AUTO and own not in _COMPUTED_IN:
            raise ModelError(
                f"{source.path} has dtype {own} in its config, which HillInfer does not compute "
                "in: choose one with --dtype, such as float32"
            )
        return cls(
            source=source,
            tokenizer=tokenizer,
            config=config,
            dtype=number_type.resolve(own, device, ProcessorFacts.read()),
            device=device,
            skeleton=skeleton,
        )

    @property
    def shape(self) -> ModelShape:
        """Shape of the model's KV cache."""
        return ModelShape.from_config(self.config, self.dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights once loaded, tied ones counted once."""
        weights = sum(int(weight.numel()) for weight in self.skeleton.parameters())
        return weights * self.dtype.itemsize

    @property
    def loading_bytes(self) -> int:
        """Most bytes of weights held at once while loading: a GGUF file is unpacked beside it."""
        return self.weight_bytes * (2 if self.source.gguf_file else 1)

    def load(self) -> LoadedModel:
        """Load the weights; ModelError where there are none, or they do not fit the config."""
        from transformers import AutoModelForCausalLM

        if self.source.gguf_file:
            model = load_gguf(self.source.path, self.dtype)
        else:
            with one_line(f"load the weights in {self.source.path}"):
                model, info = AutoModelForCausalLM.from_pretrained(
                    self.source.folder,
                    dtype=self.dtype,
                    trust_remote_code=False,
                    local_files_only=True,
                    use_safetensors=True,
                    output_loading_info=True,
                )
            check_loaded(info, self.source.path)
        check_ties(self.skeleton, model, self.source.path)
        with one_line(f"bring {self.source.path} to the {self.device}"):
            model = model.to(self.device).eval()
        return LoadedModel(
            model, self.tokenizer, model.config, self.source.name, self.source.commit
        )


def load_model(
    name: str, number_type: NumberType = NumberType.AUTO, say: Callable[[str], None] = print
) -> LoadedModel:
    """Load a model by registry name, path or hub name, in one call.

    Raises ModelError or FetchError as `ModelSource.locate`, `ModelOutline.read` and
    `ModelOutline.load` say.
    """
    return ModelOutline.read(ModelSource.locate(name, say), number_type).load()


def _own_type(config: Any) -> torch.dtype:
    own = getattr(config, "dtype", None)
    if isinstance(own, str):
        own = getattr(torch, own.removeprefix("torch."), None)
    return own if isinstance(own, torch.dtype) else torch.float32


def _skeleton(config: Any, source: ModelSource) -> Any:
    from transformers import AutoModelForCausalLM

    what = (
        f"build {source.path} as a causal language model (model type '{config.model_type}'): use a "
        "Llama, Mistral, Qwen2, Qwen3 or OPT model"
    )
    with one_line(what), torch.device("meta"), _BuildingDeadline(source):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


class _BuildingDeadline(TorchFunctionMode):
    """Ends the building of a model of far too many parts, each of which makes a tensor."""

    def __init__(self, source: ModelSource) -> None:
        super().__init__()
        self._source, self._end = source, time.monotonic() + _BUILDING_SECONDS

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if time.monotonic() > self._end:
            raise ModelError(
                f"the config in {self._source.path} describes so many parts that building them "
                f"takes more than {_BUILDING_SECONDS} s: it is not a model's"
            )
        return func(*args, **(kwargs or {}))
