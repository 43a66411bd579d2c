# SPDX-License-Identifier: Apache-2.0
"""What this machine can do and what is missing, each with its fix."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hillinfer.doctor.cards import (
    card_findings,
    find_cards,
    find_xrt_library,
    library_finding,
    xclbin_findings,
)
from hillinfer.doctor.finding import Finding, Verdict, python_version, run_packages, tool_findings
from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.directories import DriveFacts, prepared_cold_dir
from hillinfer.drive.engine_table import engine_text, why_no_ring
from hillinfer.drive.files import IOMode
from hillinfer.errors import HillInferError, SettingsError
from hillinfer.models.registry_model import REGISTRY_MODELS
from hillinfer.native.library import NativeError, native_library
from hillinfer.rates.kept_rates import KeptRates
from hillinfer.secrecy.key_sources import WithoutKey
from hillinfer.secrecy.library import CIPHER, SecrecyError
from hillinfer.secrecy.pages import CipherRate
from hillinfer.store.database import Database
from hillinfer.store.pool_files import StoreError, StorePlaces
from hillinfer.store.store import Store
from hillinfer.system.machine import MemoryFacts, ProcessorFacts, visible_gpus
from hillinfer.values import format_bytes

_OLDEST_PYTHON = (3, 11)
_SPEED_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16")


def diagnose(
    cold_dir: Path | None,
    xclbin: Path | None = None,
    calls: DriveCalls | None = None,
    store: Path | None = None,
) -> tuple[Finding, ...]:
    """Look at Python, packages, processor, memory, GPU, drive, store, model, tools and cards.

    `cold_dir` is the directory of the cold pool, the default one where None; `xclbin` an image of a
    card's kernels to check, or None; `calls` how the drive is reached; `store` the store that is
    named, or None.
    """
    return (
        _python(),
        *_packages(),
        _processor(),
        _native_library(),
        _memory(),
        _gpu(),
        _drive(cold_dir, calls),
        _read_engine(calls or DriveCalls()),
        encryption_finding(),
        store_finding(store, calls),
        *_rates(),
        *_models(),
        *tool_findings(),
        library_finding(find_xrt_library()),
        *card_findings(find_cards()),
        *(xclbin_findings(xclbin, cold_dir) if xclbin is not None else ()),
    )


def _python() -> Finding:
    if sys.version_info[:2] < _OLDEST_PYTHON:
        return Finding("python", Verdict.MISSING, python_version(), "install Python 3.11 or newer")
    return Finding("python", Verdict.OK, python_version())


def _packages() -> Iterator[Finding]:
    for package in run_packages():
        verdict = Verdict.OK if package.supported else Verdict.MISSING
        found = package.version or "not installed"
        if package.version and not package.supported:
            found += f", outside {package.window}"
        yield Finding(package.name, verdict, found, package.fix)


def _processor() -> Finding:
    processor = ProcessorFacts.read()
    flags = [flag for flag in _SPEED_FLAGS if flag in processor.flags]
    found = f"{processor.name or 'unnamed'}, {processor.cores} cores, {' '.join(flags) or 'plain'}"
    if not processor.fast_bfloat16:
        found += "; no bfloat16 in hardware, so --dtype auto takes float32 for bfloat16 models"
    return Finding("processor", Verdict.OK, found)


def _native_library() -> Finding:
    try:
        variant = native_library().variants[0]
    except NativeError as error:
        return Finding("native library", Verdict.MISSING, "not usable", str(error))
    return Finding("native library", Verdict.OK, f"{variant}")


def _memory() -> Finding:
    memory, limit = MemoryFacts.read(), "no control group limit"
    if memory.limit_bytes is not None:
        limit = f"control group limit {format_bytes(memory.limit_bytes)}"
    free, total = format_bytes(memory.available_bytes), format_bytes(memory.total_bytes)
    return Finding("memory", Verdict.OK, f"{free} free of {total}, {limit}")


def _gpu() -> Finding:
    gpus = visible_gpus()
    if gpus is None:
        return Finding("GPU", Verdict.OPTIONAL, "unknown without torch")
    if not gpus:
        return Finding("GPU", Verdict.OPTIONAL, "none that torch can use; models run on the CPU")
    named = (f"{gpu.name}, {format_bytes(gpu.free_bytes)} free" for gpu in gpus)
    return Finding("GPU", Verdict.OK, "; ".join(named))


def _drive(cold_dir: Path | None, calls: DriveCalls | None) -> Finding:
    try:
        drive = DriveFacts.probe(prepared_cold_dir(cold_dir), calls)
    except HillInferError as error:
        return Finding("cold directory", Verdict.MISSING, "unusable", str(error))
    found = (
        f"{drive.directory} on {drive.filesystem}, {format_bytes(drive.free_bytes)} free, "
        f"{drive.io_mode} I/O"
    )
    verdict = Verdict.WARNING if drive.warning else Verdict.OK
    return Finding("cold directory", verdict, found, drive.warning)


def _read_engine(calls: DriveCalls) -> Finding:
    reason = why_no_ring(calls)
    if reason is None:
        return Finding("drive reads", Verdict.OK, engine_text("uring"))
    # Threads read the same bytes, with more work for the processor.
    found = f"{engine_text('threads')}; no io_uring: {reason}"
    return Finding("drive reads", Verdict.OK, found)


def encryption_finding() -> Finding:
    """Say how fast this machine seals and opens pages of an encrypted store; takes milliseconds."""
    try:
        rate = CipherRate.measured()
    except SecrecyError as error:
        return Finding("encryption", Verdict.OPTIONAL, "of stores, off by default", str(error))
    found = (
        f"{CIPHER} by {rate.library}, {rate.seal / 1e9:.1f} GB/s sealing and "
        f"{rate.open / 1e9:.1f} GB/s opening pages, measured in one thread"
    )
    return Finding("encryption", Verdict.OK, found)


def _rates() -> Iterator[Finding]:
    with suppress(SettingsError):
        yield from rates_findings(KeptRates.of_user())


def rates_findings(kept: KeptRates) -> Iterator[Finding]:
    """Yield a line per kept rates; measure nothing."""
    for key, rates in kept.all():
        found = (
            f"fc {_text(rates.f_c)}, fs {_text(rates.f_s)}, Bc {_text(rates.b_c)}, "
            f"Bs {_text(rates.b_s)}, sharing {1e6 * rates.sharing:.0f} us a step "
            f"(measured, one layer; {key.threads} threads, {key.filesystem}, "
            f"kernel {key.spec_hash[:8]}, scope {key.scope})"
        )
        yield Finding(f"rates of {key.device}", Verdict.OK, found)


def _text(rate: float) -> str:
    return f"{rate / 1e6:.2f} M tokens/s" if rate else "none"


def _models() -> Iterator[Finding]:
    for model in REGISTRY_MODELS.values():
        if model.present:
            yield Finding(f"model {model.name}", Verdict.OK, str(model.folder))
        else:
            fix = f"hillinfer fetch {model.name}"
            yield Finding(f"model {model.name}", Verdict.OPTIONAL, "not fetched yet", fix)


# --- The store that a run would use ---

_NAME = "store"


def store_finding(directory: Path | None, calls: DriveCalls | None = None) -> Finding:
    """Say what a store takes, what room it has left, how it is read and whether its index is whole.

    `directory` is None where none is named; `calls` is how its drives are reached, the operating
    system itself where None.
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
