# SPDX-License-Identifier: Apache-2.0
"""Bringing a stored prefix from another host: range reads over HTTP, every byte compared.

Where both hosts have another transport, the bytes of a range come by that, and the rest as before.

What comes is a guess until it was compared: a sheet's token numbers are hashed to the key that was
asked for, and rows and shadows have the sheet's checksums. So a drive, a network or an eviction in
between cost time and nothing else. Whoever has the key of the hosts is believed: a host could send
wrong rows with right checksums of them.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import aligned_buffer
from hillinfer.errors import HillInferError
from hillinfer.secrecy.pages import Place
from hillinfer.secrecy.store_keys import NoKeys
from hillinfer.store.extent import Sheet, read_sheets
from hillinfer.store.keys import (
    CHUNK_GROUPS,
    CHUNK_TOKENS,
    ExtentShape,
    Namespace,
    group_keys,
    group_sums,
    root_key,
)
from hillinfer.store.prefix import StoredPrefix
from hillinfer.store.store import Store
from hillinfer.store.writer import PrefixWriter
from hillinfer_hosts.announcing import host_client
from hillinfer_hosts.extents import MOST_RANGE_BYTES
from hillinfer_hosts.transports import DirectMemory
from hillinfer_model.kernel_spec import GROUP_TOKENS

EXTENTS, NAMESPACES, TRANSPORTS = "/extents/", "/namespaces/", "/transports/"
POOL_HEADER = "X-HillInfer-Pool"
# What a host was met as, and where its memory is; an answer says how many bytes were put there.
INTO_HEADER, WRITTEN_HEADER = "X-HillInfer-Into", "X-HillInfer-Written"
# Of an answer that has no rows.
_MOST_TOLD_BYTES = 1 << 20
# A host that sends nothing for so long is given up.
_SILENT_SECONDS = 2.0
# Of one range, where a layer's rows are not more.
_RANGE_BYTES = 8 << 20


class TransferError(HillInferError):
    """A prefix, or the rest of one, did not come; it is computed."""


@dataclass(frozen=True)
class Wanted:
    """A prefix that another host is said to hold.

    Parameters
    ----------
    namespace
        Digest of its namespace.
    ids
        Token numbers of the prompt, as far as it is wanted.
    salt
        Of the tenant.
    """

    namespace: bytes
    ids: tuple[int, ...]
    salt: bytes = b""


@dataclass(frozen=True)
class Brought:
    """What came.

    Parameters
    ----------
    tokens
        That this host has of the prompt now, what it had before included.
    new_tokens, byte_count
        That came, and what was read of the other host for it.
    seconds
        What it took.
    failure
        Why no more came; empty where everything did.
    direct_bytes
        Of those that were read, what another transport than HTTP brought.
    """

    tokens: int
    new_tokens: int
    byte_count: int
    seconds: float
    failure: str = ""
    direct_bytes: int = 0


class HostReader:
    """Reads extents of another host.

    Parameters
    ----------
    url
        Of its agent.
    key
        What hosts share; empty for none.
    deadline
        When to give up, in seconds of `time.monotonic`. A host that falls silent just before it is
        given up up to two seconds later.
    direct
        Memory that the other host may write to by a transport that both have; None for HTTP alone.

    Attributes
    ----------
    byte_count, direct_bytes
        What it read, and what of it came by that transport.
    """

    def __init__(
        self, url: str, key: str, deadline: float, direct: DirectMemory | None = None
    ) -> None:
        left = max(0.0, deadline - time.monotonic())
        self._client = host_client(url, key, left)
        self._deadline, self._direct = deadline, direct
        # A host that sends a little now and then lets no read of its headers run out of time.
        self._end = threading.Timer(left, self._client.close)
        self._end.daemon = True
        self._end.start()
        # What the other host knows this one as, once it was told.
        self._known: str | None = None
        self.byte_count, self.direct_bytes = 0, 0

    def namespace(self, digest: bytes) -> Namespace:
        """Return a namespace of the other host's store; TransferError where it is not that one."""
        content, _ = self._got("GET", NAMESPACES + digest.hex(), _MOST_TOLD_BYTES)
        try:
            told = json.loads(content)
            found = Namespace(
                str(told["about"]),
                *(int(told[one]) for one in ("layers", "row_bytes", "shadow_bytes")),
            )
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise TransferError("the other host tells of no namespace") from error
        if found.digest != digest:
            raise TransferError("the other host tells of another namespace")
        return found

    def read(self, key: bytes, first: int, size: int, into: NDArray[np.uint8]) -> bytes:
        """Fill memory with bytes of the extent that a prefix ends in; return its store's identity.

        Raises
        ------
        TransferError
            Where the other host has it no more, or does not answer as it should.
        """
        pool = b""
        for start in range(0, size, MOST_RANGE_BYTES):
            stop = min(start + MOST_RANGE_BYTES, size)
            wanted = {"Range": f"bytes={first + start}-{first + stop - 1}"}
            told = self._range(EXTENTS + key.hex(), wanted, into[start:stop])
            self.byte_count += stop - start
            try:
                pool = bytes.fromhex(told.get(POOL_HEADER, ""))
            except ValueError as error:
                raise TransferError("the other host names no store") from error
        return pool

    def close(self) -> None:
        """Let the connection go."""
        self._end.cancel()
        self._client.close()

    def _range(self, path: str, headers: dict[str, str], into: NDArray[np.uint8]) -> httpx.Headers:
        """Fill memory with a range, by whatever transport; return what the answer's headers say."""
        self._introduce()
        if self._direct is None:
            return self._sent(path, headers, into)
        with self._direct.taken(len(into)) as landing:
            if landing is None:
                return self._sent(path, headers, into)
            place = {INTO_HEADER: f"{self._known} {landing.ctypes.data}"}
            return self._sent(path, headers | place, into, landing)

    def _introduce(self) -> None:
        """Tell the other host where this one's memory is, once; without it HTTP brings all."""
        if self._direct is None or self._known is not None:
            return
        told = base64.b64encode(self._direct.introduction).decode()
        path = TRANSPORTS + self._direct.name
        try:
            answer, _ = self._got("POST", path, _MOST_TOLD_BYTES, json={"introduction": told})
            self._known = str(json.loads(answer)["peer"])
        except (TransferError, KeyError, TypeError, ValueError, RecursionError):
            self._direct = None

    def _sent(
        self,
        path: str,
        headers: dict[str, str],
        into: NDArray[np.uint8],
        landing: NDArray[np.uint8] | None = None,
    ) -> httpx.Headers:
        """Take a range from an answer's body, or from memory that it says was written to."""
        content, told = self._got("GET", path, len(into), headers=headers)
        if landing is not None and told.get(WRITTEN_HEADER) == str(len(into)) and not content:
            into[:] = landing
            self.direct_bytes += len(into)
        elif len(content) == len(into):
            into[:] = np.frombuffer(content, np.uint8)
        else:
            raise TransferError("the other host sent fewer bytes than were asked for")
        return told

    def _got(
        self, method: str, path: str, most_bytes: int, **asked: Any
    ) -> tuple[bytearray, httpx.Headers]:
        """Return a body of so many bytes at most, and what its headers say."""
        content = bytearray()
        asked["headers"] = asked.get("headers", {}) | {"Accept-Encoding": "identity"}
        # Of each read. Whoever is still connecting at the deadline has nothing to close then, and
        # looks behind it.
        asked["timeout"] = min(self._left(), _SILENT_SECONDS)
        asked["extensions"] = {"trace": lambda *_: self._left()}
        try:
            with self._client.stream(method, path, **asked) as answer:
                if answer.status_code not in (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT):
                    raise TransferError(f"the other host answers with status {answer.status_code}")
                for part in answer.iter_raw():
                    content += part
                    if len(content) > most_bytes:
                        raise TransferError("the other host sends more than was asked for")
                    self._left()
                return content, answer.headers
        except (httpx.HTTPError, RuntimeError, ValueError) as error:
            # What is closed at the deadline says so in several ways.
            self._left()
            raise TransferError(f"the other host does not answer: {error}") from error

    def _left(self) -> float:
        """Return the seconds that are left; TransferError where none are."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TransferError("bringing rows from another host takes too long")
        return left


def bring(store: Store, reader: HostReader, wanted: Wanted) -> Brought:
    """Store what another host holds of a prompt, as far as this one does not.

    Parameters
    ----------
    store
        This host's.
    reader
        Of the other host.
    wanted
        Which prefix.

    Raises
    ------
    TransferError
        Where the other host does not answer, or tells of no such namespace. What fails behind that
        is told as `Brought.failure`.
    """
    began = time.monotonic()
    ids = wanted.ids[: len(wanted.ids) // GROUP_TOKENS * GROUP_TOKENS]
    space = reader.namespace(wanted.namespace)
    found = store.find(space, ids, wanted.salt)
    before = 0 if found is None else found.tokens
    failure, tokens = "", before
    writer = None
    try:
        writer = store.writer(space, ids, found, wanted.salt)
        if writer is not None:
            keys = group_keys(root_key(space.digest, wanted.salt), ids)
            parts = _Parts(reader, ExtentShape.of(space), space.digest, wanted.salt)
            for position in range(before // CHUNK_TOKENS, -(-len(keys) // CHUNK_GROUPS)):
                parts.bring(position, keys, before // GROUP_TOKENS, writer)
                tokens = writer.published_tokens
    except TransferError as error:
        failure = str(error)
    finally:
        _close(writer, found)
    seconds = time.monotonic() - began
    counts = tokens - before, reader.byte_count, seconds
    return Brought(tokens, *counts, failure, reader.direct_bytes)


def _close(writer: PrefixWriter | None, found: StoredPrefix | None) -> None:
    if writer is not None:
        writer.close()
    if found is not None:
        found.close()


class _Parts:
    """Brings chunks one by one.

    Parameters
    ----------
    reader
        Of the other host.
    shape
        Of the extents.
    namespace, salt
        What keys begin with.
    """

    def __init__(
        self, reader: HostReader, shape: ExtentShape, namespace: bytes, salt: bytes
    ) -> None:
        self._reader, self._shape, self._namespace = reader, shape, namespace
        self._root = root_key(namespace, salt)

    def bring(self, position: int, keys: list[bytes], known: int, writer: PrefixWriter) -> None:
        """Bring a chunk's groups behind those that are known, and publish them.

        Raises
        ------
        TransferError
            Where it does not come, or is not what its checksums say.
        """
        first = position * CHUNK_GROUPS
        stop = min(first + CHUNK_GROUPS, len(keys))
        name = keys[stop - 1]
        parent = keys[first - 1] if first else self._root
        sheet = self._sheet(name, parent, keys[first:stop])
        begin = max(known - first, 0)
        for layer, rows in self._rows(name, sheet, begin, stop - first):
            writer.write(layer, first + begin, rows)
        if sheet.header.has_shadow and stop - first - begin == CHUNK_GROUPS:
            for layer, shadow in self._shadows(name, sheet):
                writer.write_shadow(layer, position, shadow)
        # What computing took there counts here: what is worth keeping is ranked by it.
        writer.cost_per_group = sheet.header.cost / sheet.header.groups
        writer.publish(stop * GROUP_TOKENS)
        if writer.is_ended or writer.published_tokens < stop * GROUP_TOKENS:
            raise TransferError("this host's store takes no more")

    def _sheet(self, name: bytes, parent: bytes, keys: list[bytes]) -> Sheet:
        size = self._shape.sheets_bytes
        memory = aligned_buffer(size)
        pool = self._reader.read(name, 0, size, memory)
        place = Place(pool, 0, 0)
        for _, sheet in read_sheets(memory[:size], self._shape, place, NoKeys()):
            own = sheet.header
            if (
                own.namespace == self._namespace
                and own.parent == parent
                and sheet.group_keys[: len(keys)] == keys
            ):
                return sheet
        raise TransferError("what the other host sent is not the chunk that was asked for")

    def _rows(
        self, name: bytes, sheet: Sheet, begin: int, stop: int
    ) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield a layer's rows of some groups, layers of whole chunks in long ranges."""
        shape = self._shape
        size = (stop - begin) * shape.group_bytes
        is_whole = size == shape.object_bytes
        joined = max(1, _RANGE_BYTES // size) if is_whole else 1
        for layer in range(0, shape.layers, joined):
            count = min(joined, shape.layers - layer)
            memory = aligned_buffer(count * size)[: count * size]
            self._reader.read(name, shape.rows_at(layer, begin), count * size, memory)
            for at in range(count):
                rows = memory[at * size : (at + 1) * size].reshape(-1, shape.row_bytes)
                sums = group_sums(rows, sheet.row_salts(layer + at, begin, stop))
                if (sums != sheet.row_sums[layer + at, begin:stop]).any():
                    raise TransferError(f"rows of layer {layer + at} came as others")
                yield layer + at, rows

    def _shadows(self, name: bytes, sheet: Sheet) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        shape = self._shape
        size = shape.layers * shape.shadow_bytes
        memory = aligned_buffer(size)[:size]
        self._reader.read(name, shape.shadow_at(0), size, memory)
        for layer in range(shape.layers):
            shadow = memory[layer * shape.shadow_bytes : (layer + 1) * shape.shadow_bytes]
            if group_sums(shadow, sheet.shadow_salt(layer))[0] != sheet.shadow_sums[layer]:
                raise TransferError(f"the key shadows of layer {layer} came as others")
            yield layer, shadow
