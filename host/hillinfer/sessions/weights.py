# SPDX-License-Identifier: Apache-2.0
"""The digest of a model's weights."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_MOST_THREADS = 8


def weights_digest(model: Any) -> str:
    """Return the SHA-256 over name, shape, type and bytes of every weight, in name order.

    Weights that share their memory are read once. Works in threads: hashing runs without Python's
    lock.

    Parameters
    ----------
    model
        A torch module, its weights in memory.
    """
    state = sorted(model.state_dict().items())
    places: dict[tuple[Any, ...], torch.Tensor] = {_place(weight): weight for _, weight in state}
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
        digests = dict(zip(places, threads.map(_bytes_digest, places.values()), strict=True))
    whole = hashlib.sha256()
    for name, weight in state:
        line = f"{name} {tuple(weight.shape)} {weight.dtype} {digests[_place(weight)]}\n"
        whole.update(line.encode())
    return whole.hexdigest()


def _place(weight: torch.Tensor) -> tuple[Any, ...]:
    return (weight.device, weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)


def _bytes_digest(weight: torch.Tensor) -> str:
    flat = weight.detach().to("cpu").contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
