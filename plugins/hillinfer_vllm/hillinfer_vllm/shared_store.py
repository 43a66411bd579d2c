# SPDX-License-Identifier: Apache-2.0
"""The store that an engine of vLLM uses, and the namespace of the rows that it makes."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hillinfer.errors import HillInferError
from hillinfer.store.keys import Namespace
from hillinfer.store.store import Store
from hillinfer.values import ByteSize

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_HASHING_THREADS = 4
# Of a config, what says nothing about how keys and values are computed.
_NO_MATTER = frozenset({"transformers_version", "torch_dtype", "use_cache", "_name_or_path"})


class ConnectorError(HillInferError):
    """vLLM is set up in a way that the store does not serve."""


def opened_store(extra: Mapping[str, Any]) -> Store:
    """Open the store that a `kv_connector_extra_config` names, made where it is missing.

    Parameters
    ----------
    extra
        `store`: its directory; `store_size`: bytes of a new one, as `20GB`.

    Raises
    ------
    ConnectorError
        Where no store is named, or it is missing and no size is said.
    StoreError
        Where it cannot be used.
    """
    unknown = sorted(set(extra) - {"store", "store_size"})
    if unknown:
        raise ConnectorError(
            f"kv_connector_extra_config has '{unknown[0]}', which is unknown: it takes 'store', "
            "the directory of a store, and 'store_size', as 20GB"
        )
    named = extra.get("store")
    if not isinstance(named, str) or not named:
        raise ConnectorError(
            "no store is named: add kv_connector_extra_config={'store': '/path', "
            "'store_size': '20GB'} to the KV transfer config"
        )
    directory = Path(named)
    if not Store.exists(directory):
        if "store_size" not in extra:
            raise ConnectorError(
                f"there is no store in {directory}: add 'store_size', as 20GB, and it is made, or "
                "make it with hillinfer store init"
            )
        size = ByteSize.parse(str(extra["store_size"])).byte_count
        if size is None:
            raise ConnectorError(
                f"store_size '{extra['store_size']}' is a share: write bytes, as 20GB"
            )
        Store.create(directory, size)
    return Store(directory)


def namespace(
    facts: Mapping[str, Any], model: str, config: Mapping[str, Any], layers: int, row_bytes: int
) -> Namespace:
    """Return the namespace of rows that vLLM makes with a model.

    They are another namespace than HillInfer's own of the same model: rounding differs.

    Parameters
    ----------
    facts
        Version and number types.
    model
        Directory of its weights.
    config
        The model's, as JSON says it.
    layers, row_bytes
        Of its KV.

    Raises
    ------
    ConnectorError
        Where the directory has no weights: then nobody knows whose rows they are.
    """
    own = {key: value for key, value in config.items() if key not in _NO_MATTER}
    said = json.loads(json.dumps(own, sort_keys=True, default=str))
    about = {**facts, "made_by": "vllm", "config": said, "weights": weights_digest(Path(model))}
    return Namespace.of(about, layers, row_bytes, 0)


def namespaces(
    facts: Mapping[str, Any],
    model: str,
    config: Mapping[str, Any],
    layers: int,
    row_bytes: int,
    ranks: int,
) -> list[Namespace]:
    """Return the namespace of each tensor-parallel rank's rows; of one, as of no ranks at all.

    Parameters
    ----------
    facts, model, config, layers, row_bytes
        As in `namespace`; `row_bytes` of a rank's own heads.
    ranks
        How many there are.

    Raises
    ------
    ConnectorError
        As `namespace` says.
    """
    one = namespace(facts, model, config, layers, row_bytes)
    if ranks == 1:
        return [one]
    about = json.loads(one.about)
    # How many there are, too: heads are divided otherwise among more.
    every = ({**about, "rank": rank, "ranks": ranks} for rank in range(ranks))
    return [Namespace.of(own, layers, row_bytes, 0) for own in every]


def weights_digest(directory: Path) -> str:
    """Return the SHA-256 over names and contents of a model's weight files.

    Raises
    ------
    ConnectorError
        Where there are none.
    """
    files = sorted(path for pattern in _WEIGHTS for path in directory.glob(pattern))
    if not files:
        raise ConnectorError(
            f"no weights in {directory}: give vLLM the directory of a model that lies on this "
            "machine, so that the store can tell its rows from those of other weights"
        )
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        digests = list(threads.map(_file_digest, files))
    named = [f"{path.name} {digest}\n" for path, digest in zip(files, digests, strict=True)]
    return hashlib.sha256("".join(named).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        if not path.stat().st_size:
            return hashlib.sha256().hexdigest()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return hashlib.sha256(content).hexdigest()
