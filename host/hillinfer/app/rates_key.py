# SPDX-License-Identifier: Apache-2.0
"""What rates depend on: they hold for nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from hillinfer.machine.drive import filesystem_of
from hillinfer.machine.processor import ProcessorFacts
from hillinfer.native.library import LIBRARY
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import KernelSpec


@dataclass(frozen=True)
class RatesKey:
    """Machine, kernel and device that rates were measured with.

    Parameters
    ----------
    processor, cores, threads
        Its name, cores this process may use and compute threads.
    filesystem, drive
        Of the cold directory: the type of the file system and the number of its device.
    io
        Read engine: `uring` or `threads`.
    library
        SHA-256 of the native library.
    spec_hash, scope, row_bytes
        What is scored and what a row takes.
    device
        Name in the table of devices.
    xclbin
        SHA-256 of the image of the card's kernels; empty where there is none.
    """

    processor: str
    cores: int
    threads: int
    filesystem: str
    drive: str
    io: str
    library: str
    spec_hash: str
    scope: str
    row_bytes: int
    device: str
    xclbin: str

    @classmethod
    def of(
        cls,
        spec: KernelSpec,
        scope: Scope,
        row_bytes: int,
        cold_dir: Path,
        io: str,
        threads: int,
        device: str,
        xclbin: Path | None,
    ) -> RatesKey:
        """Look at this machine.

        Parameters
        ----------
        spec, scope, row_bytes
            Of the model.
        cold_dir
            Directory of the cold pool, which exists.
        io
            Name of the read engine.
        threads
            Compute threads.
        device, xclbin
            As in the settings; the image must be readable.
        """
        processor = ProcessorFacts.read()
        return cls(
            processor=processor.name,
            cores=processor.cores,
            threads=threads,
            filesystem=filesystem_of(cold_dir),
            drive=str(cold_dir.stat().st_dev),
            io=io,
            library=_sum(LIBRARY),
            spec_hash=spec.digest().hex(),
            scope=scope.value,
            row_bytes=row_bytes,
            device=device,
            xclbin="" if xclbin is None else _sum(xclbin),
        )


def _sum(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
