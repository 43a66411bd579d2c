# SPDX-License-Identifier: Apache-2.0
"""The HLS C++ as an execution: launches in, buffers out."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np

from hillinfer_hw.csim_build import TESTBENCH, Scheduling, build_kernel, compile_sources
from hillinfer_model.beats import Beats
from hillinfer_model.choices import KeyMode
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec
from hillinfer_model.launch_result import STATUS_FILL, LaunchResult
from hillinfer_model.score_launch import ScoreLaunch
from hillinfer_model.shadow_launch import ShadowLaunch

# Beats in front of and behind every buffer that a kernel writes, to see writes beside it.
_GUARD_BEATS = 64
_GUARD_BYTE = 0x5C
# The buffer of keys, which is read in manual bursts, among those that a kernel reads.
_KEYS = 1


class CsimError(RuntimeError):
    """A simulated kernel wrote beside a buffer, or its streams complained; the message says how."""


@dataclass(frozen=True)
class CsimExecution:
    """Runs launches in the compiled HLS C++ (design, section 7).

    Parameters
    ----------
    scheduling
        Whether processes run one after another, or as threads over bounded streams.
    depths
        Depths of streams in place of those of the pragmas, for tests; only with threads.
    skews
        Rounds that what is written into a stream leaves late, by its name; only with threads.
    seed
        Of skews of 0 to 32 rounds for every other stream; 0 for none. Only with threads.
    build
        Makes the library of a kernel, a spec and a scheduling; tests make it of other sources.
    """

    scheduling: Scheduling = Scheduling.SEQUENTIAL
    depths: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    skews: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    seed: int = 0
    build: Callable[[str, KernelSpec, Scheduling], Path] = build_kernel

    @property
    def name(self) -> str:
        """`csim` or `csim-threads`."""
        return "csim-threads" if self.scheduling is Scheduling.THREADS else "csim"

    def score(self, spec: KernelSpec, launch: ScoreLaunch) -> LaunchResult:
        """Run `score_tokens`.

        Raises
        ------
        HardwareSpecError
            Where no kernel is built for the spec.
        MissingToolError, CsimBuildError
            Where it cannot be built.
        CsimError
            Where the simulation finds a fault that does not show in the buffers.
        """
        reads = [launch.segments, launch.shadow]
        if spec.key_mode is KeyMode.FP16:
            reads.append(launch.statistics)
        reads.append(launch.queries)
        scalars = [launch.segments.shape[0], launch.scope, launch.launch_id]
        return self._run("score_tokens", spec, reads, launch.scores, scalars)

    def make_shadow(self, spec: KernelSpec, launch: ShadowLaunch) -> LaunchResult:
        """Run `make_shadow`; raises as `score` does."""
        reads = [launch.segments, launch.rows, launch.statistics]
        scalars = [launch.segments.shape[0], launch.launch_id]
        return self._run("make_shadow", spec, reads, launch.shadow, scalars)

    def close(self) -> None:
        """Do nothing: what was compiled stays for the next one."""

    def _run(
        self,
        kernel: str,
        spec: KernelSpec,
        reads: list[Beats],
        output: Beats,
        scalars: list[int],
    ) -> LaunchResult:
        library = ctypes.CDLL(str(self.build(kernel, spec, self.scheduling)))
        inputs = [np.ascontiguousarray(buffer) for buffer in reads]
        status = np.full((scalars[0], BEAT_BYTES), STATUS_FILL, dtype=np.uint8)
        guarded = [_guard(buffer) for buffer in (output, status)]
        pointers = [ctypes.c_void_p(buffer.ctypes.data) for buffer in inputs]
        pointers += [ctypes.c_void_p(_inside(buffer).ctypes.data) for buffer in guarded]
        numbers = [ctypes.c_uint32(number) for number in scalars]
        self._set_streams(library)
        keys = pointers[_KEYS]
        with stdout_of_libraries() as said, _port_of_keys(library, keys, inputs[_KEYS].shape[0]):
            getattr(library, kernel)(*pointers, *numbers)
        self._unset_streams(library)
        if said:
            raise CsimError(f"{kernel} ({self.name}): {said[0]}")
        for name, buffer in zip(("output", "status"), guarded, strict=True):
            _check_guards(buffer, f"{kernel} ({self.name}): a write beside the {name} buffer")
        return LaunchResult(*(_inside(buffer).copy() for buffer in guarded))

    def _set_streams(self, library: ctypes.CDLL) -> None:
        for name, depth in self.depths.items():
            library.set_stream_depth(name.encode(), depth)
        for name, skew in self.skews.items():
            library.set_stream_skew(name.encode(), skew)
        if self.seed:
            library.set_skew_seed(ctypes.c_uint32(self.seed))

    def _unset_streams(self, library: ctypes.CDLL) -> None:
        for name in self.depths:
            library.set_stream_depth(name.encode(), 0)
        for name in self.skews:
            library.set_stream_skew(name.encode(), -1)
        if self.seed:
            library.set_skew_seed(ctypes.c_uint32(0))


@contextmanager
def _port_of_keys(library: ctypes.CDLL, keys: ctypes.c_void_p, beats: int) -> Iterator[None]:
    """Tell the stand-in for manual bursts how long the buffer is, where the kernel uses them."""
    if not hasattr(library, "open_port"):
        yield
        return
    library.open_port(keys, ctypes.c_uint64(beats))
    yield
    library.close_port(keys)


def _guard(buffer: Beats) -> Beats:
    return np.pad(buffer, ((_GUARD_BEATS, _GUARD_BEATS), (0, 0)), constant_values=_GUARD_BYTE)


def _inside(guarded: Beats) -> Beats:
    return guarded[_GUARD_BEATS:-_GUARD_BEATS]


def _check_guards(guarded: Beats, message: str) -> None:
    guards = np.concatenate([guarded[:_GUARD_BEATS], guarded[-_GUARD_BEATS:]])
    if np.any(guards != _GUARD_BYTE):
        raise CsimError(message)


@contextmanager
def stdout_of_libraries() -> Iterator[list[str]]:
    """Yield a list that holds, after the block, what C++ wrote to standard output, if anything.

    The stream headers report reads while empty and leftover data there and nowhere else. What
    Python prints meanwhile, in other threads, is left alone.
    """
    said: list[str] = []
    name = "hearing.cpp"
    source = (TESTBENCH / name).read_text(encoding="utf-8")
    ears = ctypes.CDLL(str(compile_sources(name, {name: source}, [])))
    ears.heard_text.restype = ctypes.c_char_p
    try:
        # Within: an interrupt behind the call must not leave others waiting for their turn.
        ears.start_hearing()
        yield said
    finally:
        text = ears.heard_text().decode(errors="replace").strip()
        ears.stop_hearing()
        if text:
            said.append(text)
