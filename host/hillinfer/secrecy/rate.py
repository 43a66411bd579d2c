# SPDX-License-Identifier: Apache-2.0
"""What the cipher costs on this machine."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np

from hillinfer.drive.files import PAGE_BYTES, aligned_buffer
from hillinfer.secrecy.library import KEY_BYTES
from hillinfer.secrecy.page_engines import PageEngine, page_engine
from hillinfer.secrecy.pages import PageCipher, PageLayout, Place

_PAGES = 1024


@dataclass(frozen=True)
class CipherRate:
    """How fast one thread of this machine seals and opens pages of 4 KiB.

    Parameters
    ----------
    seal, open
        Bytes per second.
    library
        What did it, and its version.
    """

    seal: float
    open: float
    library: str

    @classmethod
    def measured(cls, engine: PageEngine | None = None) -> CipherRate:
        """Measure it over 4 MiB, which takes some milliseconds.

        Parameters
        ----------
        engine
            What does it; what stores take where None.

        Raises
        ------
        SecrecyError
            Where the library is not installed.
        """
        pages = aligned_buffer(_PAGES * PAGE_BYTES)
        pages[:] = np.frombuffer(os.urandom(len(pages)), np.uint8)
        engine = engine or page_engine()
        place, layout = Place(bytes(16), 0, 0), PageLayout.of_one_slot(_PAGES)
        cipher = PageCipher.begun(os.urandom(KEY_BYTES), place, layout, engine)
        started = time.perf_counter()
        sealed = cipher.seal(0, pages)
        between = time.perf_counter()
        cipher.open(0, sealed)
        ended = time.perf_counter()
        return cls(
            len(pages) / (between - started),
            len(pages) / (ended - between),
            engine.name,
        )
