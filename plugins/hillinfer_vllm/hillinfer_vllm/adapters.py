# SPDX-License-Identifier: Apache-2.0
"""Adapters: a request's rows are those of the adapter that it names, and of no other.

An adapter is known by the contents of its files. A name or a number of vLLM says nothing: another
process may give them to another adapter.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from hillinfer.store.keys import Namespace
from hillinfer.store_namespaces import files_digest, weight_files

_SETTINGS = "adapter_config.json"


class UnknownAdapterError(Exception):
    """Nobody knows what rows of an adapter are; the message says why."""


class Adapters:
    """Knows the adapters of one engine by their files.

    Files have to stay as they are while the engine runs: vLLM reads them again where it has dropped
    an adapter from memory. Those that changed are refused from then on.

    Parameters
    ----------
    number_type
        That the engine computes adapters in.
    """

    def __init__(self, number_type: str = "") -> None:
        self._type = number_type
        self._digests: dict[tuple[Any, ...], str] = {}
        self._by_number: dict[int, str] = {}
        self._changed: set[int] = set()

    def digest(self, request: Any) -> str:
        """Return the digest of the adapter of a request.

        Parameters
        ----------
        request
            vLLM's `LoRARequest`.

        Raises
        ------
        UnknownAdapterError
            Where its files are not on this machine, or changed under the engine.
        """
        number, directory = request.lora_int_id, Path(request.lora_path)
        if getattr(request, "load_inplace", False):
            self._changed.add(number)
        if number in self._changed:
            raise UnknownAdapterError("its adapter was changed while the engine ran")
        try:
            files = [directory / _SETTINGS, *weight_files(directory)]
            stamp = tuple(
                (str(one), told.st_ino, told.st_size, told.st_mtime_ns, told.st_ctime_ns)
                for one in files
                for told in [one.stat()]
            )
            if len(files) == 1:
                raise FileNotFoundError(f"no weights in {directory}")
            if stamp not in self._digests:
                self._digests[stamp] = files_digest(files)
        except OSError as error:
            raise UnknownAdapterError(
                f"its adapter does not lie in a directory of this machine: {error}"
            ) from error
        found = f"{self._digests[stamp]} {self._type}"
        if self._by_number.setdefault(number, found) != found:
            self._changed.add(number)
            raise UnknownAdapterError("its adapter was changed while the engine ran")
        return found


@lru_cache(maxsize=256)
def adapted(namespace: Namespace, adapter: str) -> Namespace:
    """Return the namespace of rows that are made with an adapter; the same one without any.

    Parameters
    ----------
    namespace
        Of rows without adapters.
    adapter
        Digest of it; empty for none.
    """
    if not adapter:
        return namespace
    about = {**json.loads(namespace.about), "adapter": adapter}
    return Namespace.of(about, namespace.layers, namespace.row_bytes, namespace.shadow_bytes)
