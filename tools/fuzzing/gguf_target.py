# SPDX-License-Identifier: Apache-2.0
"""The target for models in one GGUF file."""

from __future__ import annotations

import random
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from fuzzing.fuzz_input import Files
from fuzzing.model_folders import answer, load
from fuzzing.mutations import mutate_bytes
from fuzzing.verdict import WrongAnswerError

_FILE = "model.gguf"
# Key-value pairs, then what is said about each tensor, lie before the data.
_HEADER_SHARE = 12_000


class GGUFTarget:
    """Header, metadata, tensor table and data."""

    name = "gguf"

    def seeds(self) -> list[Files]:
        """Return one file."""
        return [{_FILE: _tiny_gguf()}]

    def mutate(self, rng: random.Random, files: Files) -> Files:
        """Change bytes, most of them in the header, or one of its names or numbers."""
        data = files[_FILE]
        if rng.random() < 0.5:
            return {_FILE: mutate_bytes(rng, data, rng.choice((24, _HEADER_SHARE, None)))}
        return {_FILE: _changed_words(rng, data)}

    def try_one(self, given: Path, other: Path) -> None:
        """Load, compare and ask."""
        loaded = load(given / _FILE)
        _check_weights(loaded, given / _FILE)
        answer(loaded, other)


@cache
def _tiny_gguf() -> bytes:
    from tiny_gguf import save_gguf
    from tiny_models import TinyModel

    with tempfile.TemporaryDirectory() as folder:
        model = TinyModel("llama", "gqa", head_dim=16, layers=1).build()
        return bytes(save_gguf(Path(folder) / _FILE, model).read_bytes())


def _changed_words(rng: random.Random, data: bytes) -> bytes:
    """Change a key's or tensor's name, or the number behind it, which tells type or length."""
    names = (
        *(b"llama.block_count", b"llama.attention.head_count", b"llama.embedding_length"),
        *(b"llama.context_length", b"tokenizer.ggml.tokens", b"tokenizer.ggml.token_type"),
        *(b"blk.0.attn_q.weight", b"output.weight", b"token_embd.weight", b"llama.vocab_size"),
        *(b"general.architecture", b"tokenizer.ggml.model", b"tokenizer.ggml.merges"),
        *(b"llama.rope.freq_base", b"tokenizer.ggml.eos_token_id", b"blk.0.ffn_norm.weight"),
        *(b"llama.attention.layer_norm_rms_epsilon", b"llama.attention.head_count_kv"),
    )
    name = rng.choice(names)
    place = data.find(name)
    changed = bytearray(data)
    kind = rng.randrange(4)
    if kind == 0:
        changed[place + rng.randrange(len(name))] ^= 1 << rng.randrange(7)
        return bytes(changed)
    behind = place + len(name) + rng.choice((0, 4, 4, 8, 12))
    number = rng.choice((0, 1, 2, 3, 7, 8, 30, 255, 10**7, 2**31 - 1, 2**32 - 1))
    form = rng.choice(("<I", "<Q", "<f"))
    packed = struct.pack(form, number)
    changed[behind : behind + len(packed)] = packed
    return bytes(changed)


def _check_weights(loaded: Any, file: Path) -> None:
    """Compare each weight with the file's, as sets of numbers: some are stored in another order."""
    import numpy as np
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from tiny_gguf import _gguf_name

    reader = GGUFReader(str(file))
    stored = {one.name: dequantize(one.data, one.tensor_type) for one in reader.tensors}
    named = {_gguf_name(name): one for name, one in loaded.model.state_dict().items()}
    for name, weight in named.items():
        if name not in stored:
            tied = name == "output.weight" and loaded.config.tie_word_embeddings
            if not tied:
                raise WrongAnswerError(f"the weight {name} was made up: the file does not hold it")
            continue
        own = weight.float().numpy()
        if own.size != stored[name].size or not np.array_equal(
            np.sort(own, axis=None),
            np.sort(stored[name], axis=None).astype(np.float32),
            equal_nan=True,
        ):
            raise WrongAnswerError(f"the weight {name} is not what the file holds")
    if stored.keys() - named.keys():
        raise WrongAnswerError("the file holds weights that are not in the model")
