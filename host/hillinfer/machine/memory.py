# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may still take, whatever limits it: machine, groups, `ulimit`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

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
