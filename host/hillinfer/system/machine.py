# SPDX-License-Identifier: Apache-2.0
"""Memory, processor and GPUs of this machine, and which features they have."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# --- Peak memory of this process ---

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def peak_rss_bytes() -> int:
    """Return the peak resident set in bytes since the start, or since the last reset."""
    try:
        peak = re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        peak = None
    if peak is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(peak.group(1)) * 1024


def reset_peak_rss() -> None:
    """Start the peak anew from what is held now, where the kernel allows it."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return


# --- Available memory ---

_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class MemoryFacts:
    """Memory of this machine and of the control group the process runs in, in bytes.

    Parameters
    ----------
    total_bytes
        Physical memory.
    available_bytes
        What can be taken without swapping, whichever bound is tightest.
    limit_bytes
        The tightest control-group limit; None where there is none.
    address_bytes
        Address space that this process may still reserve (`ulimit -v`); None where nothing limits
        it.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    address_bytes: int | None = None

    @classmethod
    def read(cls, root: Path = Path("/")) -> MemoryFacts:
        """Read what the kernel says below `root`: memory, control groups, address space."""
        amounts = {
            name: int(kib) * 1024
            for name, kib in re.findall(
                r"^(\w+):\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE
            )
        }
        available, limit = amounts["MemAvailable"], None
        for group_limit, used in _group_limits(root):
            available = min(available, max(0, group_limit - used))
            limit = group_limit if limit is None else min(limit, group_limit)
        address = _address_space(root)
        if address is not None:
            available = min(available, address)
        return cls(amounts["MemTotal"], available, limit, address)


def _address_space(root: Path) -> int | None:
    limit = re.search(
        r"^Max address space\s+(\d+)\s", _text(root / "proc/self/limits"), re.MULTILINE
    )
    used = re.search(r"^VmSize:\s+(\d+) kB", _text(root / "proc/self/status"), re.MULTILINE)
    if limit is None or used is None:
        return None
    return max(0, int(limit.group(1)) - int(used.group(1)) * 1024)


def _group_limits(root: Path) -> list[tuple[int, int]]:
    """Return (limit, bytes that cannot be given back) of every limited group of this process."""
    limits = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base, names = (
                root / "sys/fs/cgroup",
                ("memory.max", "memory.current", "inactive_file"),
            )
        elif "memory" in controllers.split(","):
            base, names = (
                root / "sys/fs/cgroup/memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        # A limit on any group above this one binds as well. In a container the path may name
        # folders that are not mounted; what is mounted is then the container's own group.
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if base not in (folder, *folder.parents):
                break
            limits += _limit_of(folder, *names)
    return limits


def _limit_of(
    folder: Path, limit_name: str, usage_name: str, reclaimable_name: str
) -> list[tuple[int, int]]:
    limit, usage = _text(folder / limit_name).strip(), _text(folder / usage_name).strip()
    if not limit.isdigit() or not usage.isdigit() or int(limit) >= _UNLIMITED:
        return []
    reclaimable = re.search(
        rf"^{reclaimable_name} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE
    )
    return [(int(limit), int(usage) - (int(reclaimable.group(1)) if reclaimable else 0))]


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


# --- The processor ---

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


# --- GPUs ---


@dataclass(frozen=True)
class GpuFacts:
    """One GPU.

    Its name is the driver's; bytes are those of device memory.
    """

    name: str
    free_bytes: int
    total_bytes: int


def visible_gpus() -> tuple[GpuFacts, ...] | None:
    """Return the GPUs that torch can use; None where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(
        GpuFacts(torch.cuda.get_device_name(index), *torch.cuda.mem_get_info(index))
        for index in range(torch.cuda.device_count())
    )


# --- Number types ---


class NumberType(StrEnum):
    """What `--dtype` takes."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    def resolve(self, own: torch.dtype, device: str, processor: ProcessorFacts) -> torch.dtype:
        """Return the torch type to load a model in.

        AUTO is the model's own type; on a CPU it is float32 where that is faster: for float16
        always, for bfloat16 where the processor does not multiply it in hardware. `own` is the type
        of the weights as stored, `device` is `cpu` or `cuda`.
        """
        import torch

        if self is not NumberType.AUTO:
            chosen = getattr(torch, self.value)
            assert isinstance(chosen, torch.dtype)
            return chosen
        slow = own is torch.float16 or (own is torch.bfloat16 and not processor.fast_bfloat16)
        return torch.float32 if device == "cpu" and slow else own
