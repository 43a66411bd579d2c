# SPDX-License-Identifier: Apache-2.0
"""Headers of requests and answers that a router passes on, byte for byte and as often as given."""

from __future__ import annotations

from collections.abc import Iterable

import httpx
from starlette.responses import Response

CHOSEN_HEADER = "X-HillInfer-Host"
Headers = list[tuple[bytes, bytes]]
# Of one hop alone (RFC 9110, 7.6.1), and what is made anew. The router has looked at the origin,
# and a replica would compare it with its own address.
_OF_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade", b"host", b"content-length", b"origin"),
    )
)


def passed(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers that go on to the next hop."""
    return [(name, value) for name, value in headers if name.lower() not in _OF_HOP]


def with_headers(response: Response, answer: httpx.Response, host: str) -> Response:
    """Give a response the headers of a replica's answer, and the name of its host.

    Parameters
    ----------
    response
        Whose own headers say how long it is, if anything.
    answer
        Of the replica.
    host
        Its name.
    """
    own = [one for one in response.raw_headers if one[0].lower() != b"content-type"]
    # Content is decoded on the way.
    theirs = [one for one in passed(answer.headers.raw) if one[0].lower() != b"content-encoding"]
    named = (CHOSEN_HEADER.lower().encode(), host.encode("latin-1", "replace"))
    response.raw_headers = [*own, *((name.lower(), value) for name, value in theirs), named]
    return response
