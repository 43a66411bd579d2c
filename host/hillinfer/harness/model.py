# SPDX-License-Identifier: Apache-2.0
"""The model `hillinfer` of EleutherAI's evaluation harness."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from hillinfer.errors import SettingsError
from hillinfer.harness.selected_model import Asked, SelectedModel
from hillinfer.models.loader import load_model
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.settings import Settings
from hillinfer.system.machine import NumberType
from hillinfer.values import choice

_ALONE = (None, 1, "1", "auto")


class HillInferLM(HFLM):  # type: ignore[misc]
    """A transformers model whose cache lies on the drive, evaluated behind selected tokens.

    The harness' own class for transformers computes log-likelihoods without a cache, which
    would be those of full attention. Here every scored token is a decode step: see `SelectedModel`.

    Parameters
    ----------
    pretrained
        Registry name, folder, GGUF file or name on the hub, as of `hillinfer generate --model`.
    dtype
        Type that the model computes in; `auto` as of `hillinfer generate --dtype`.
    prefill_chunk
        Tokens of one forward pass while a context is read.
    max_length
        Most tokens of context and continuation; the model's positions are the most.
    batch_size, max_batch_size, device
        Given by the harness; one request at a time is computed, where the model lies.
    add_bos_token, prefix_token_id, chat_template_args, enable_thinking, think_end_token
        As of the model `hf`.
    **settings
        Of the cache, by the names of `hillinfer.Settings`: `alpha`, `shadow`, `dram_budget`.

    Raises
    ------
    HillInferError
        Where a setting is unknown or the model cannot be loaded.
    """

    def __init__(
        self,
        pretrained: str = DEFAULT_MODEL,
        dtype: str = "auto",
        prefill_chunk: int = 1024,
        max_length: int | None = None,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        add_bos_token: bool | None = None,  # noqa: FBT001 - the harness names it
        prefix_token_id: int | None = None,
        chat_template_args: dict[str, Any] | None = None,
        enable_thinking: bool | None = None,  # noqa: FBT001 - likewise
        think_end_token: str | int | None = None,
        **settings: Any,
    ) -> None:
        if batch_size not in _ALONE:
            raise SettingsError(
                f"batch_size={batch_size}: hillinfer evaluates one request at a time, leave it out"
            )
        wanted = Settings().changed(**settings)
        loaded = load_model(pretrained, choice("dtype", NumberType, dtype))
        super().__init__(
            loaded.model,
            tokenizer=loaded.tokenizer,
            max_length=max_length,
            batch_size=1,
            add_bos_token=add_bos_token,
            prefix_token_id=prefix_token_id,
            chat_template_args=chat_template_args,
            enable_thinking=enable_thinking,
            think_end_token=think_end_token,
        )
        # Its name goes into reports, not the model itself.
        self.pretrained = pretrained
        self._chunk_tokens = prefill_chunk
        self._selected = SelectedModel(loaded, wanted, prefill_chunk)

    def close(self) -> None:
        """Take HillInfer off the model; harmless when done twice."""
        self._selected.close()

    @property
    def max_length(self) -> int:
        """Most tokens of context and continuation."""
        return min(int(super().max_length), self._selected.positions)

    def get_model_info(self) -> dict[str, Any]:
        """Return what reports say of the model; nothing asks the hub for it."""
        return {
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": self.model.dtype,
            "model_revision": self.revision,
            "model_sha": "",
        }

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,  # noqa: FBT001, FBT002 - the harness calls it
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        asked = [Asked.within(context, own, self.max_length) for _, context, own in requests]
        with tqdm(
            total=len(asked), disable=disable_tqdm, desc="hillinfer: log-likelihoods"
        ) as progress:
            found = [
                (one.total, one.greedy)
                for one in self._selected.likelihoods(asked, progress.update)
            ]
        for (texts, _, _), answer in zip(requests, found, strict=True):
            # Windows of a long text have no name of their own.
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return found

    def _model_generate(
        self, context: Any, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> Any:
        with closing(self._selected.cache(max_length)) as cache:
            return super()._model_generate(
                context,
                max_length,
                stop,
                past_key_values=cache,
                prefill_chunk_size=self._chunk_tokens,
                **generation_kwargs,
            )
