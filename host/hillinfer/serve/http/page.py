# SPDX-License-Identifier: Apache-2.0
"""The page at `/`: one file, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi.responses import HTMLResponse, Response

_FILE = Path(__file__).with_name("page.html")


class Page:
    """Gives the page out, and lets it run its own script alone."""

    def __init__(self) -> None:
        self._text = _FILE.read_text(encoding="utf-8")
        script = re.search(r"<script>(.*?)</script>", self._text, re.DOTALL)
        style = re.search(r"<style>(.*?)</style>", self._text, re.DOTALL)
        assert script is not None
        assert style is not None
        policy = (
            f"default-src 'none'; script-src {_hash(script[1])}; style-src {_hash(style[1])}; "
            "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
        )
        self._headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }

    async def show(self) -> Response:
        """`GET /`."""
        return HTMLResponse(self._text, headers=self._headers)


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
