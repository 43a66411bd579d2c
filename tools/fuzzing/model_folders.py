# SPDX-License-Identifier: Apache-2.0
"""Folders with a tiny model: made, loaded, compared with their files, and asked something."""

from __future__ import annotations

import json
import math
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from fuzzing.fuzz_input import Files
from fuzzing.verdict import WrongAnswerError

DOCUMENT = "cat 1 sat on mat 7. cat 2 sat on mat 14. "
QUESTION = "who sat?"
NEW_TOKENS = 2
# What a config says that the model must then have.
_OBEYED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings"),
    *("hidden_act", "tie_word_embeddings", "attention_bias", "mlp_bias", "model_type"),
)
# Buffers that older files list and no weights.
_NO_WEIGHTS = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")


def files_of(folder: Path) -> Files:
    """Return the content of a folder's files."""
    found = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in found}


@cache
def _tiny_folder(family: str) -> Files:
    from tiny_folder import save_tiny
    from tiny_models import TinyModel

    with tempfile.TemporaryDirectory() as folder:
        save_tiny(Path(folder), TinyModel(family, "mha" if family == "opt" else "gqa", layers=1))
        return files_of(Path(folder))


def tiny_folder(family: str = "llama") -> Files:
    """Return the files of a tiny model of one layer and its tokenizer."""
    return dict(_tiny_folder(family))


def quiet(line: str) -> None:
    """Say nothing."""


def load(place: Path) -> Any:
    """Load a model as a program does that uses HillInfer."""
    from hillinfer.models.loader import load_model

    return load_model(str(place), say=quiet)


def prompt_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids of the document and of the question after it."""
    from hillinfer.generate.prompt import DocumentPrompt

    prompt = DocumentPrompt(tokenizer, DOCUMENT)
    prompt.alone()
    return prompt.document_ids(), prompt.question_ids(QUESTION)


def answer(loaded: Any, cold_dir: Path) -> list[int]:
    """Return the first tokens of an answer, each chosen from logits whose greatest is a number."""
    import hillinfer
    from hillinfer.errors import PromptError
    from hillinfer.generate.answering import Generation
    from hillinfer.generate.tokens import Sampling, TokenChooser

    document, question = prompt_ids(loaded.tokenizer)
    words = loaded.model.get_input_embeddings().num_embeddings
    if max([*document, *question]) >= words:
        # As the command does, before it loads anything.
        raise PromptError(f"the tokenizer makes tokens that the model, of {words}, does not have")
    expected = len(document) + len(question) + NEW_TOKENS
    with hillinfer.attach(loaded.model, cold_dir=cold_dir, dram_budget="24MiB") as attachment:
        cache = attachment.new_cache(expected_tokens=expected)
        generation = Generation(loaded.model, cache, 64)
        try:
            generation.read([*document, *question])
            tokens = list(generation.decode(Sampling(), NEW_TOKENS, loaded.stop_ids))
            if not math.isfinite(float(generation._logits.max())):
                # Nothing was chosen from the last ones yet.
                TokenChooser(Sampling(), generation._logits.device).choose(generation._logits)
                raise WrongAnswerError("tokens were chosen from logits that are no numbers")
        finally:
            generation.close()
    return tokens


def check_weights(loaded: Any, folder: Path) -> None:
    """Compare every weight of a loaded model with those of its safetensors files.

    Raises
    ------
    WrongAnswerError
        Where a weight was made up, left out or changed.
    """
    stored = _stored_weights(folder)
    found = loaded.model.state_dict()
    prefix = f"{loaded.model.base_model_prefix}."
    named = {name if name in found else prefix + name: one for name, one in stored.items()}
    for name, weight in named.items():
        if name not in found:
            if not name.endswith(_NO_WEIGHTS):
                raise WrongAnswerError(f"the file's weight {name!a} is not in the model")
        elif not _equal(weight, found[name]):
            raise WrongAnswerError(f"the weight {name} is not what the file holds")
    # A tied weight is the same memory as one that the file has.
    places = {found[name].data_ptr() for name in named if name in found}
    for name, weight in found.items():
        if name not in named and weight.data_ptr() not in places:
            raise WrongAnswerError(f"the weight {name} was made up: no file holds it")


def check_config(loaded: Any, folder: Path) -> None:
    """Compare what the model was built with and what its config's file says.

    Raises
    ------
    WrongAnswerError
        For the first setting that differs.
    """
    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name in _OBEYED:
        if name in said and said[name] is not None:
            taken = getattr(loaded.config, name, None)
            if taken != said[name]:
                raise WrongAnswerError(f"config.json has another {name} than the model")


def _stored_weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        return dict(load_file(whole))
    listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    stored: dict[str, Any] = {}
    for name in sorted(set(listed.values())):
        stored |= load_file(folder / name)
    return stored


def _equal(stored: Any, found: Any) -> bool:
    import torch

    if stored.shape != found.shape:
        return False
    same = stored.to(found.dtype)
    return bool(torch.equal(same.view(torch.uint8), found.contiguous().view(torch.uint8)))
