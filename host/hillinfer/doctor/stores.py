# SPDX-License-Identifier: Apache-2.0
"""What `hillinfer doctor` says about the store that a run would use."""

from __future__ import annotations

from pathlib import Path

from hillinfer.doctor.finding import Finding, Verdict
from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.files import IOMode
from hillinfer.errors import HillInferError
from hillinfer.secrecy.key_sources import WithoutKey
from hillinfer.store.database import Database
from hillinfer.store.pool_files import StoreError, StorePlaces
from hillinfer.store.store import Store
from hillinfer.values import format_bytes

_NAME = "store"


def store_finding(directory: Path | None, calls: DriveCalls | None = None) -> Finding:
    """Say what a store takes, what room it has left, how it is read and whether its index is whole.

    Parameters
    ----------
    directory
        Of the store that is named; None where none is.
    calls
        How its drives are reached; the operating system itself where None.
    """
    if directory is None:
        return Finding(
            _NAME,
            Verdict.OPTIONAL,
            "none is named, so what is read is not kept",
            "hillinfer store init DIR --size 200GB, then --store DIR or HILLINFER_STORE=DIR",
        )
    if not Store.exists(directory):
        fix = f"hillinfer store init {directory} --size 200GB"
        return Finding(_NAME, Verdict.WARNING, f"{directory} holds no store", fix)
    try:
        places = StorePlaces.read(directory)
        index = _index_text(places)
        with Store(directory, calls=calls, key=WithoutKey()) as opened:
            numbers, cap = opened.statistics(), opened.rules.max_writes_per_day
            modes = [file.io_mode for file in opened.files]
    except HillInferError as error:
        return Finding(_NAME, Verdict.WARNING, f"{directory} is not usable", str(error))
    written = format_bytes(numbers["written_day_bytes"])
    most = "" if cap is None else f" of at most {format_bytes(cap)}"
    found = (
        f"{directory}, {format_bytes(places.size)}, room for {format_bytes(numbers['free_bytes'])} "
        f"more, {numbers['chunks']} chunks, {'/'.join(dict.fromkeys(modes))} I/O, {index}, "
        f"{written}{most} written in 24 hours"
    )
    if IOMode.BUFFERED in modes:
        fix = "its file system allows no direct I/O, so the page cache holds rows, too"
        return Finding(_NAME, Verdict.WARNING, found, fix)
    return Finding(_NAME, Verdict.OK, found)


def _index_text(places: StorePlaces) -> str:
    """Say how the index is before the store is opened, which makes a broken one anew."""
    if not places.index.exists():
        return "index made anew"
    try:
        Database(places.index, places.pool).close()
    except StoreError:
        return "index made anew, it was broken"
    return "index whole"
