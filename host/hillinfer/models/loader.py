# SPDX-License-Identifier: Apache-2.0
"""Loading a model in two steps: what it is, then its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hillinfer.machine.processor import ProcessorFacts
from hillinfer.model_shape import ModelShape
from hillinfer.models.errors import ModelError
from hillinfer.models.gguf_file import load_gguf
from hillinfer.models.model_source import ModelSource
from hillinfer.models.number_type import NumberType


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to generate.

    Parameters
    ----------
    model, tokenizer, config
        As transformers makes them; the model is in evaluation mode on its device.
    name
        As the user named it.
    """

    model: Any
    tokenizer: Any
    config: Any
    name: str

    @property
    def shape(self) -> ModelShape:
        """Shape of the model's KV cache."""
        return ModelShape.from_config(self.config, self.model.dtype)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end an answer, from the generation config and the tokenizer."""
        own = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        listed = own if isinstance(own, list) else [own]
        return frozenset(
            int(one) for one in (*listed, self.tokenizer.eos_token_id) if one is not None
        )


@dataclass(frozen=True)
class ModelOutline:
    """Everything about a model but its weights.

    Parameters
    ----------
    source
        Where its files lie.
    tokenizer, config
        As transformers makes them.
    dtype
        Type it will compute in.
    device
        `cuda` where a GPU is, else `cpu`.
    skeleton
        The model with weights that have shapes and no memory (torch's meta device).
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

        Raises
        ------
        ModelError
            Where config or tokenizer cannot be read, or the model is not a causal language model.
        """
        from transformers import AutoConfig, AutoTokenizer

        files: dict[str, Any] = (
            {"gguf_file": str(source.path.absolute())} if source.gguf_file else {}
        )
        try:
            # A local folder only, so nothing here waits for a network.
            config = AutoConfig.from_pretrained(
                source.folder, trust_remote_code=False, local_files_only=True, **files
            )
            tokenizer = AutoTokenizer.from_pretrained(
                source.folder, trust_remote_code=False, local_files_only=True, **files
            )
        except (ValueError, OSError, ImportError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"cannot read the model in {source.path}: {' '.join(str(error).split())}"
            ) from error
        device = "cuda" if torch.cuda.is_available() else "cpu"
        own = torch.float32 if source.gguf_file else _own_type(config)
        return cls(
            source=source,
            tokenizer=tokenizer,
            config=config,
            dtype=number_type.resolve(own, device, ProcessorFacts.read()),
            device=device,
            skeleton=_skeleton(config, source),
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
        """Load the weights.

        Raises
        ------
        ModelError
            Where the folder has none, or they do not fit the config.
        """
        from transformers import AutoModelForCausalLM

        if self.source.gguf_file:
            model = load_gguf(self.source.path, self.dtype)
        else:
            try:
                model = AutoModelForCausalLM.from_pretrained(
                    self.source.folder,
                    dtype=self.dtype,
                    trust_remote_code=False,
                    local_files_only=True,
                )
            except (ValueError, OSError, ImportError, RuntimeError) as error:
                raise ModelError(
                    f"cannot load the weights in {self.source.path}: {' '.join(str(error).split())}"
                ) from error
        return LoadedModel(
            model.to(self.device).eval(), self.tokenizer, model.config, self.source.name
        )


def load_model(
    name: str,
    number_type: NumberType = NumberType.AUTO,
    say: Callable[[str], None] = print,
) -> LoadedModel:
    """Load a model by registry name, path or hub name, in one call.

    Raises
    ------
    ModelError, FetchError
        As `ModelSource.locate`, `ModelOutline.read` and `ModelOutline.load` say.
    """
    return ModelOutline.read(ModelSource.locate(name, say), number_type).load()


def _own_type(config: Any) -> torch.dtype:
    own = getattr(config, "dtype", None)
    if isinstance(own, str):
        own = getattr(torch, own.removeprefix("torch."), None)
    return own if isinstance(own, torch.dtype) else torch.float32


def _skeleton(config: Any, source: ModelSource) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise ModelError(
            f"{source.path} is not a causal language model (model type '{config.model_type}'): "
            "use a Llama, Mistral, Qwen2, Qwen3 or OPT model"
        ) from error
