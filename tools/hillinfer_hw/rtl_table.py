# SPDX-License-Identifier: Apache-2.0
"""The kernels that long runs of the RTL simulate, and the launches that each of them gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hillinfer_hw.memory_model import IDEAL, REALISTIC, MemoryModel
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.launch_shape import key_beats, row_beats
from hillinfer_model.presets import preset_spec

# Full segments of a launch: few where tokens have many beats, many where they have few, so that
# what a launch takes before its first beat and after its last weighs much the same everywhere.
LEAST_SEGMENTS, MOST_SEGMENTS = 4, 64
LAUNCH_BEATS = 36_000
# Tokens of a kernel's first row: as many as these beats hold, but at least as many as asked for.
KERNEL_BEATS, MOST_TOKENS = 1_000_000, 400_000
# Every longer launch ends in mid-group.
LAST_SEGMENT = 517
# Tokens from which on a launch must reach the goal with ideal memory. INT2 codes of small heads
# are read before what surrounds a launch is paid for: there it holds from twice as many.
SHORT = {KeyMode.FP16: 4096, KeyMode.INT8: 4096, KeyMode.INT4: 4096, KeyMode.INT2: 8192}


@dataclass(frozen=True)
class Kernel:
    """One kernel of the table; `rule` is None for make_shadow, which knows none."""

    preset: str
    mode: KeyMode
    rule: Rule | None

    @property
    def name(self) -> str:
        """Name of its top module."""
        return "make_shadow" if self.rule is None else "score_tokens"

    @property
    def spec(self) -> KernelSpec:
        """What it is rendered from."""
        return preset_spec(self.preset, self.mode, self.rule or Rule.RAW_SUM)


@dataclass(frozen=True)
class Case:
    """Launches that make one row: segments of `counts` tokens, `launches` times.

    `layout` is `shadow`, `keys` for a plane of nothing but keys, or `rows` for rows K‖V.
    """

    scope: Scope | None
    memory: MemoryModel
    counts: tuple[int, ...]
    launches: int = 1
    layout: str = "shadow"


def kernels(presets: list[str], modes: list[str], rules: list[str]) -> Iterator[Kernel]:
    """Yield the kernels of the table."""
    for preset in presets:
        for mode in map(KeyMode, modes):
            for rule in map(Rule, rules):
                yield Kernel(preset, mode, rule)
            if mode is not KeyMode.FP16:
                yield Kernel(preset, mode, None)


def cases(kernel: Kernel, tokens: int) -> list[Case]:
    """Return the rows of a kernel; the first scores at least `tokens`, the others one launch."""
    spec = kernel.spec
    full = spec.segment_tokens
    beats = key_beats(full, spec) if kernel.rule else full * row_beats(spec)
    segments = min(max(-(-LAUNCH_BEATS // beats), LEAST_SEGMENTS), MOST_SEGMENTS)
    usual = (full,) * segments + (LAST_SEGMENT,)
    short = (full,) * (SHORT[spec.key_mode] // full)
    layout = "keys" if kernel.rule is None or kernel.mode is KeyMode.FP16 else "shadow"
    scope = None if kernel.rule is None else Scope.LAYER
    wanted = max(tokens, min(KERNEL_BEATS * full // beats, MOST_TOKENS))
    launches = 1 if kernel.rule is None else -(-wanted // sum(usual))
    table = [
        Case(scope, IDEAL, usual, launches, layout),
        Case(scope, IDEAL, short, layout=layout),
        Case(scope, REALISTIC, usual, layout=layout),
    ]
    if kernel.rule is not None:
        table += [
            Case(Scope.KV_HEAD, IDEAL, usual, layout=layout),
            Case(Scope.KV_HEAD, IDEAL, short, layout=layout),
            Case(Scope.KV_HEAD, REALISTIC, usual, layout=layout),
        ]
    if layout == "keys":
        table += [Case(scope, memory, short, layout="rows") for memory in (IDEAL, REALISTIC)]
    return table
