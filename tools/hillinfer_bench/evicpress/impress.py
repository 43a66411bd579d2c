# SPDX-License-Identifier: Apache-2.0
"""The rival IMPRESS: few heads rank tokens, and the important chunks are loaded.

As EvicPress describes its rival (section 6): three of eight heads compute attention, the tokens in
the first X per cent of it are important, and of chunks of the KV cache those are loaded that have
one. Here each question says anew what is important, as in IMPRESS itself. Chunks and keys of those
heads lie on the drive, and in memory as far as the budget goes: what was needed most often stays.

It attends to all tokens of the chunks that are loaded, which can only help its answers. Chunks are
not sorted by importance, which IMPRESS does beside.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from hillinfer.forms.dropped import queries_of
from hillinfer.forms.filed import Extent, FormFile
from hillinfer.forms.form import DocumentStates, GapLayer
from hillinfer.generate.answering import Generation
from hillinfer.kv.sequence import RowLayout
from hillinfer.model_shape import ModelShape
from hillinfer_bench.evicpress.harness import CHUNK, Harness, decoded
from hillinfer_bench.evicpress.played import DECODED
from hillinfer_bench.evicpress.plays import Play
from hillinfer_bench.evicpress.workload import Asked

_CHUNK = 64
_PROBED_HEADS = 3 / 8


@dataclass(frozen=True)
class _FiledLayer:
    """Where a layer of a document lies: the probed heads' keys, and keys and values of chunks."""

    probed: Extent
    chunks: tuple[Extent, ...]


class ImportantChunks:
    """Chunks of documents on a drive, and those in memory that were needed most often.

    Parameters
    ----------
    model
        With rotary positions, whose documents they are.
    file
        Where chunks go.
    budget
        Most bytes in memory.

    Attributes
    ----------
    held_bytes, read_bytes
        Bytes in memory now, and what came from the drive in all.
    peak
        Most bytes that were in memory.
    """

    def __init__(self, model: Any, file: FormFile, budget: int) -> None:
        self._model, self._file, self._budget = model, file, budget
        self._shape = ModelShape.from_config(model.config, model.dtype)
        self._layout = RowLayout(self._shape)
        self._filed: dict[int, tuple[int, list[_FiledLayer]]] = {}
        self._memory: dict[Extent, list[torch.Tensor]] = {}
        self._needed: Counter[Extent] = Counter()
        self._came: list[tuple[Extent, list[torch.Tensor]]] = []
        self.held_bytes = self.read_bytes = self.peak = 0

    @property
    def probed_heads(self) -> int:
        """KV heads that say what is important."""
        return max(1, round(_PROBED_HEADS * self._shape.kv_heads))

    def put(self, number: int, states: DocumentStates) -> None:
        """Write a document's chunks to the drive.

        Parameters
        ----------
        number
            Of the document.
        states
            Of whole chunks of 64 tokens.
        """
        layers = []
        for states_of_layer in states.layers:
            keys, values = (self._layout.round(part)[0] for part in states_of_layer)
            probed = self._file.write([keys[: self.probed_heads]])
            parts = [
                [part[:, start : start + _CHUNK] for part in (keys, values)]
                for start in range(0, states.tokens, _CHUNK)
            ]
            layers.append(_FiledLayer(probed, tuple(self._file.write(one) for one in parts)))
        self._filed[number] = (states.tokens, layers)

    @contextmanager
    def opened(self, number: int, share: float) -> Iterator[Any]:
        """Have the next pass choose what is important of a document, and go on from that.

        Yields the cache.

        Parameters
        ----------
        number
            Of the document.
        share
            Of its tokens that are important.
        """
        tokens, layers = self._filed[number]
        choice = _Choice(self, tokens, layers, share)
        handles = [
            layer.self_attn.register_forward_pre_hook(partial(choice.choose, at), with_kwargs=True)
            for at, layer in enumerate(self._model.model.layers)
        ]
        try:
            yield choice.cache
        finally:
            for handle in handles:
                handle.remove()

    def fetch(self, extents: Sequence[Extent]) -> list[list[torch.Tensor]]:
        """Return tensors from memory or the drive, and count that they were needed."""
        found = []
        for extent in extents:
            self._needed[extent] += 1
            tensors = self._memory.get(extent)
            if tensors is None:
                tensors = self._file.read(extent)
                self.read_bytes += extent.byte_count
                self._came.append((extent, tensors))
            found.append(tensors)
        return found

    def settle(self) -> None:
        """Keep in memory what came, as far as it is needed more often than what is there."""
        came, self._came = self._came, []
        for extent, tensors in came:
            self._keep(extent, tensors)

    def close(self) -> None:
        """Let others have the place of what was written."""
        for _, layers in self._filed.values():
            for layer in layers:
                for extent in (layer.probed, *layer.chunks):
                    self._file.give(extent)
        self._filed.clear()

    def _keep(self, extent: Extent, tensors: list[torch.Tensor]) -> None:
        """Keep what came in memory where others were needed less often."""
        while self.held_bytes + extent.byte_count > self._budget and self._memory:
            # Of those that were needed as often, the one that came first.
            least = min(self._memory, key=lambda one: self._needed[one])
            if self._needed[least] > self._needed[extent]:
                return
            del self._memory[least]
            self.held_bytes -= least.byte_count
        if self.held_bytes + extent.byte_count <= self._budget:
            self._memory[extent] = tensors
            self.held_bytes += extent.byte_count
            self.peak = max(self.peak, self.held_bytes)


@dataclass
class _Choice:
    chunks: ImportantChunks
    tokens: int
    layers: list[_FiledLayer]
    share: float
    cache: Any = field(init=False)

    def __post_init__(self) -> None:
        self.cache = DynamicCache()
        shape = self.chunks._shape
        nothing = torch.empty(1, shape.kv_heads, 0, shape.head_dim, dtype=self.dtype)
        self.cache.layers = [
            GapLayer(nothing.clone(), nothing.clone(), self.tokens) for _ in self.layers
        ]

    @property
    def dtype(self) -> torch.dtype:
        kind: torch.dtype = self.chunks._model.dtype
        return kind

    def choose(
        self, at: int, attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring what the first pass finds important, and give each layer a mask of its own."""
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        layer = self.cache.layers[at]
        if not layer.keys.shape[-2]:
            turned = queries_of(attention, hidden, kwargs["position_embeddings"]).turned
            self.cache.layers[at] = layer = self._loaded(at, turned)
        held, new = layer.keys.shape[-2], hidden.shape[1]
        mask = torch.zeros(new, held + new, dtype=self.dtype)
        later = torch.ones(new, new, dtype=torch.bool).triu(1)
        mask[:, held:].masked_fill_(later, torch.finfo(self.dtype).min)
        return args, {**kwargs, "attention_mask": mask[None, None]}

    def _loaded(self, at: int, queries: torch.Tensor) -> GapLayer:
        filed = self.layers[at]
        ((keys,),) = self.chunks.fetch([filed.probed])
        group = queries.shape[0] // self.chunks._shape.kv_heads
        asked = queries[: len(keys) * group]
        products = asked @ keys.to(self.dtype).repeat_interleave(group, 0).transpose(1, 2)
        weights = (products / math.sqrt(keys.shape[-1])).softmax(-1).sum((0, 1))
        important = weights.topk(max(1, round(self.share * self.tokens))).indices
        wanted = sorted({*(important // _CHUNK).tolist()})
        parts = self.chunks.fetch([filed.chunks[one] for one in wanted])
        own, values = (torch.cat([one[part] for one in parts], 1) for part in (0, 1))
        missing = self.tokens - own.shape[1]
        return GapLayer(own.to(self.dtype)[None], values.to(self.dtype)[None], missing)


class ImportantPlay(Play):
    """Plays a workload to IMPRESS.

    Parameters
    ----------
    harness
        As in `Play`.
    share
        Of a document's tokens that are important to a question.
    """

    def __init__(self, harness: Harness, share: float) -> None:
        super().__init__(harness)
        self._share = share
        self._chunks = ImportantChunks(harness.model, harness.file, harness.budget)
        self._answers: dict[tuple[int, int], torch.Tensor] = {}

    def begin(self, now: float) -> None:
        """Write the chunks of every document to the drive."""
        for number in self._harness.numbers:
            self._chunks.put(number, self._harness.states(number))

    def ask(self, asked: Asked) -> None:
        """Have a question say what is important, bring that, and decode some tokens."""
        number = asked.document
        turn = self._harness.turn(number, self.played)
        question = self._harness.stored[number].questions[turn]
        began = time.perf_counter()
        with self._chunks.opened(number, self._share) as cache:
            generation = Generation(self._harness.model, cache, CHUNK)
            generation.read(question.given)
            self.played.first_tokens.append(time.perf_counter() - began)
            seconds, logits = decoded(generation, question)
            if (number, turn) not in self._answers:
                # What was brought stays: the other tokens are read in one pass, untimed.
                rest = following(self._harness.model, cache, question.answer[DECODED:-1])
                self._answers[number, turn] = torch.cat([logits, rest])[: len(question.answer)]
        self.played.token_seconds.append(seconds)
        self.played.documents.append(number)
        self.played.forms.append(f"important-{self._share:g}")

    def settle(self, asked: Asked) -> None:
        """Keep in memory what was needed most often."""
        began = time.perf_counter()
        self._chunks.settle()
        self.played.moving_seconds += time.perf_counter() - began

    def finish(self) -> None:
        """Compare the answers, and let memory go."""
        self.played.dram_peak, self.played.read_bytes = self._chunks.peak, self._chunks.read_bytes
        self._chunks.close()
        for number, _, turn in self._harness.asked(self.played):
            probing = self._harness.probing(number, turn)
            self.played.agreements.append(probing.compared([self._answers[number, turn]]).mean)


def following(model: Any, cache: Any, ids: Sequence[int]) -> torch.Tensor:
    """Read tokens in one pass; return the logits at each, (tokens, vocabulary) in float32.

    Parameters
    ----------
    model, cache
        Of transformers.
    ids
        Token numbers, maybe none.
    """
    if not ids:
        return torch.empty(0, model.config.vocab_size)
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor([list(ids)], device=model.device),
            past_key_values=cache,
            use_cache=True,
        )
    logits: torch.Tensor = output.logits[0]
    return logits.float()
