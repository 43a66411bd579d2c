# SPDX-License-Identifier: Apache-2.0
"""One line of the report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BenchRow:
    """One system on one case, or why it was not measured.

    Parameters
    ----------
    model, type
        Name, and the type it computes in.
    layers, all_layers
        Layers that were measured, and those of the whole model.
    context, batch, alpha, budget_share, shadow
        As in `Case`.
    part
        As in `Case`.
    system
        Its name.
    selection
        `measured selection` or `modelled selection`.
    chosen
        What the system chose for itself.
    shadow_used
        Format of HillInfer's shadow, where `shadow` may leave the choice to it; None for others.
    skipped
        Why nothing was measured; all that follows is then None.
    min_ms, median_ms, spread
        Of one decode step of the whole batch; see `Timing`.
    step_ms
        Milliseconds of each measured step, in their order.
    flagged
        The spread is above 20 %.
    tokens_per_second
        From the median, all sequences together.
    kv_ms
        The median without that of the loop's floor, measured in the same turns: what holding and
        attending to the context costs. None where the floor was not measured.
    drive_read_bytes, drive_write_bytes, dram_read_bytes
        Counted per step.
    held_bytes, budget_bytes, rss_bytes
        Memory as the system counts it, M0, and by how much the process grew.
    hit_rate, io_mode
        As in `Counted`.
    predicted_layers
        Layers whose query is predicted and whose tokens are selected before their turn.
    memory_gbps
        The rate of memory that limits are made with.
    limit_ms, kv_limit_ms
        What bytes and rates allow, with and without the weights, where drive and memory are read
        at the same time; modelled.
    serial_limit_ms
        The first of them where one is read after the other.
    perplexity, agreement
        Of the decoded text, and the share of steps with the full cache's most probable token; None
        for random weights.
    """

    model: str
    type: str
    layers: int
    all_layers: int
    context: int
    batch: int
    alpha: float
    budget_share: float
    shadow: str
    system: str
    selection: str
    chosen: str = ""
    shadow_used: str | None = None
    skipped: str | None = None
    min_ms: float | None = None
    median_ms: float | None = None
    spread: float | None = None
    steps: int | None = None
    flagged: bool | None = None
    tokens_per_second: float | None = None
    kv_ms: float | None = None
    drive_read_bytes: float | None = None
    drive_write_bytes: float | None = None
    dram_read_bytes: float | None = None
    held_bytes: int | None = None
    budget_bytes: int | None = None
    rss_bytes: int | None = None
    hit_rate: float | None = None
    io_mode: str | None = None
    predicted_layers: int | None = None
    memory_gbps: float | None = None
    limit_ms: float | None = None
    serial_limit_ms: float | None = None
    kv_limit_ms: float | None = None
    perplexity: float | None = None
    agreement: float | None = None
    part: str = ""
    step_ms: tuple[float, ...] | None = None

    @property
    def case(self) -> tuple[object, ...]:
        """What rows of one comparison have in common."""
        return (
            self.model,
            self.type,
            self.context,
            self.batch,
            self.alpha,
            self.budget_share,
            self.shadow,
            self.part,
        )

    @property
    def name(self) -> str:
        """What tells the row from others, in one line."""
        part = "" if self.layers == self.all_layers else f" ({self.layers} of {self.all_layers})"
        return (
            f"{self.model}{part} {self.type}, {self.context} tokens, batch {self.batch}, "
            f"α {self.alpha:g}, budget {100 * self.budget_share:.12g}%, shadow {self.shadow}, "
            + (f"{self.part}, " if self.part else "")
            + self.system
        )
