# SPDX-License-Identifier: Apache-2.0
"""The store that an engine of vLLM uses, and the namespace of the rows that it makes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hillinfer.errors import HillInferError
from hillinfer.store.keys import Namespace
from hillinfer.store.pool_files import StoreError, StoreExistsError
from hillinfer.store.store import Store
from hillinfer.store_namespaces import (
    RowKind,
    UnlikeRowsError,
    accepted,
    files_digest,
    note_maker,
    weight_files,
)
from hillinfer.store_rules import Maker
from hillinfer.values import ByteSize

_OPTIONS = frozenset({"store", "store_size", "accept"})
# Of a config, what says nothing about how keys and values are computed.
_NO_MATTER = frozenset({"transformers_version", "torch_dtype", "use_cache", "_name_or_path"})


class ConnectorError(HillInferError):
    """vLLM is set up in a way that the store does not serve."""


def opened_store(extra: Mapping[str, Any]) -> Store:
    """Open the store that a `kv_connector_extra_config` names, made where it is missing.

    Parameters
    ----------
    extra
        `store`: its directory; `store_size`: bytes of a new one, as `20GB`; `accept` as of
        `accepts`.

    Raises
    ------
    ConnectorError
        Where no store is named, or it is missing and no size is said.
    StoreError
        Where it cannot be used.
    """
    unknown = sorted(set(extra) - _OPTIONS)
    if unknown:
        raise ConnectorError(
            f"kv_connector_extra_config has '{unknown[0]}', which is unknown: it takes 'store', "
            "the directory of a store, 'store_size', as 20GB, and 'accept', hillinfer"
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
        # Of ranks that begin together one makes it.
        with suppress(StoreExistsError):
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
    files = weight_files(directory)
    if not files:
        raise ConnectorError(
            f"no weights in {directory}: give vLLM the directory of a model that lies on this "
            "machine, so that the store can tell its rows from those of other weights"
        )
    return files_digest(files)


# --- rows of other engines ---


def accepts(extra: Mapping[str, Any]) -> Maker | None:
    """Return whose rows a `kv_connector_extra_config` takes beside vLLM's; None: nobody's.

    Raises
    ------
    ConnectorError
        Where it names nobody who makes rows.
    """
    named = extra.get("accept")
    if named is None:
        return None
    if named != Maker.HILLINFER:
        raise ConnectorError(f"accept is '{named}': it takes 'hillinfer', or is left out")
    return Maker.HILLINFER


@dataclass(frozen=True)
class OtherRows:
    """Rows of the same model that another engine made, as far as they are taken.

    Parameters
    ----------
    store
        Where they may be.
    maker
        Whose are taken; None: nobody's.
    namespace
        Of what this engine makes.
    kind
        What they have to be; why they cannot be, where it is a text.
    """

    store: Store
    maker: Maker | None
    namespace: Namespace
    kind: RowKind | str

    @classmethod
    def of(
        cls,
        store: Store,
        maker: Maker | None,
        spaces: list[Namespace],
        model: str,
        config: Mapping[str, Any],
        facts: Mapping[str, Any],
    ) -> OtherRows:
        """Return what an engine may take, and let others find what it makes.

        Parameters
        ----------
        store, maker
            As of the class.
        spaces
            Namespaces of the engine's ranks.
        model, config
            As in `namespace`.
        facts
            As there, and `hf_overrides`.
        """
        kind: RowKind | str
        try:
            kind = _kind(spaces, model, config, facts)
            note_maker(store.database, Maker.VLLM, kind, spaces[0])
        except (UnlikeRowsError, StoreError) as error:
            kind = str(error)
        return cls(store, maker, spaces[0], kind)

    def now(self) -> tuple[tuple[Namespace, ...], str]:
        """Return namespaces of rows that are taken, and why there are no more; asked each time."""
        if self.maker is None:
            return (), ""
        if isinstance(self.kind, str):
            return (), self.kind
        try:
            found = accepted(self.store.database, self.maker, self.kind, self.namespace)
        except StoreError as error:
            return (), str(error)
        return found.namespaces, found.refused


def _kind(
    spaces: list[Namespace], model: str, config: Mapping[str, Any], facts: Mapping[str, Any]
) -> RowKind:
    if len(spaces) > 1:
        raise UnlikeRowsError("each tensor-parallel rank has rows of its own heads alone")
    if facts.get("quantization", "None") != "None":
        raise UnlikeRowsError(f"weights are quantized: {facts['quantization']}")
    if facts.get("hf_overrides"):
        raise UnlikeRowsError("hf_overrides are set: the model is not what its config says")
    return RowKind.of(Path(model), config, str(facts["dtype"]).removeprefix("torch."))
