# SPDX-License-Identifier: Apache-2.0
"""What the processor is good at, as far as speed depends on it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_FAST_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True)
class ProcessorFacts:
    """Name, usable cores and instruction-set flags.

    Parameters
    ----------
    name
        As the kernel calls it, empty where it does not say.
    cores
        Cores that this process may run on.
    flags
        Instruction-set extensions, in the kernel's spelling (`flags` on x86, `Features` on Arm).
    """

    name: str
    cores: int
    flags: frozenset[str]

    @classmethod
    def read(cls, cpuinfo: Path = Path("/proc/cpuinfo")) -> ProcessorFacts:
        """Read the first processor's entry."""
        try:
            text = cpuinfo.read_text()
        except OSError:
            text = ""
        name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
        return cls(
            name=name.group(1).strip() if name else "",
            cores=len(os.sched_getaffinity(0)),
            flags=frozenset(flags.group(1).split()) if flags else frozenset(),
        )

    @property
    def fast_bfloat16(self) -> bool:
        """Whether matrices multiply in bfloat16 in hardware.

        Without it PyTorch falls back to a bfloat16 product that is many times slower than float32.
        """
        return not self.flags.isdisjoint(_FAST_BFLOAT16)


def largest_cache_bytes(cache: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return the size of the processor's largest cache, 0 where Linux does not tell."""
    sizes = [0]
    for file in cache.glob("index*/size"):
        found = re.fullmatch(r"(\d+)K\s*", file.read_text())
        if found:
            sizes.append(int(found.group(1)) << 10)
    return max(sizes)
