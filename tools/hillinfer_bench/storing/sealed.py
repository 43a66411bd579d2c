# SPDX-License-Identifier: Apache-2.0
"""What encryption costs a store: a stream of a sealed prompt beside one of a plain one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from hillinfer.secrecy.key_sources import KeyFile
from hillinfer.secrecy.pages import CipherRate
from hillinfer_bench.storing.speed import StreamRow, measure_stream


@dataclass(frozen=True)
class SealedRow:
    """One shape, stored plainly and encrypted, one after the other.

    Parameters
    ----------
    plain, sealed
        Reading either back.
    rate
        Of the cipher alone, in one thread.
    """

    plain: StreamRow
    sealed: StreamRow
    rate: CipherRate

    @property
    def share_of_plain(self) -> float:
        """Rate of the sealed stream over that of the plain one, medians."""
        return median(self.plain.stream_seconds) / median(self.sealed.stream_seconds)

    @property
    def tag_share(self) -> float:
        """What tags take, of a plain extent's bytes."""
        return (1 + self.sealed.extra_bytes) / (1 + self.plain.extra_bytes) - 1

    def as_record(self) -> dict[str, object]:
        """Return it for the report."""
        return {
            "shape": self.plain.shape,
            "plain": asdict(self.plain),
            "sealed": asdict(self.sealed),
            "share_of_plain": self.share_of_plain,
            "share_of_drive": self.sealed.share_of_drive,
            "tag_share": self.tag_share,
            "cipher": asdict(self.rate),
        }

    def line(self) -> str:
        """Return it for the table."""
        return (
            f"encrypted, {self.sealed.shape}: {self.sealed.gigabytes_per_second:.2f} GB/s, "
            f"{self.share_of_plain:.2f} of plain, {self.sealed.share_of_drive:.2f} of plain 1 MiB "
            f"reads; stored in {self.sealed.store_seconds:.1f} s (plain "
            f"{self.plain.store_seconds:.1f}), tags {self.tag_share:.2%}; cipher alone "
            f"{self.rate.seal / 1e9:.2f} GB/s sealing, {self.rate.open / 1e9:.2f} opening"
        )


def measure_sealed(
    place: Path, name: str, tokens: int, layers: int, rounds: int, say: Callable[[str], None]
) -> SealedRow:
    """Store a prompt of some shape plainly and encrypted; parameters as of `measure_stream`."""
    place.mkdir()
    plain = measure_stream(place / "plain", name, tokens, layers, rounds, say)
    shutil.rmtree(place / "plain")
    key = KeyFile(place / "key")
    sealed = measure_stream(place / "sealed", name, tokens, layers, rounds, say, key)
    shutil.rmtree(place)
    return SealedRow(plain, sealed, CipherRate.measured())
