# SPDX-License-Identifier: Apache-2.0
"""All rows of one run of `hillinfer-bench storing`, and the goals that they say something about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from hillinfer_bench.report.kinds import MachineKind
from hillinfer_bench.storing.cost import CostRow
from hillinfer_bench.storing.damage import Losses
from hillinfer_bench.storing.first_token import FirstToken
from hillinfer_bench.storing.goals import StoreGoal, at_least, at_most, goals_text, unmeasured
from hillinfer_bench.storing.mixed_load import MixedLoad
from hillinfer_bench.storing.opening import OpenRow
from hillinfer_bench.storing.rivals import CHUNK_FILES, LLAMA_CPP, SESSION, VLLM
from hillinfer_bench.storing.sealed import SealedRow
from hillinfer_bench.storing.shared import SharedRow
from hillinfer_bench.storing.speed import LookupRow, StreamRow
from hillinfer_bench.storing.together import TogetherRow
from hillinfer_bench.traces.request_trace import SYNTHETIC
from hillinfer_bench.traces.table import TraceRow, verdicts

# Of a mixed load that says something.
_LEAST_LOOKUPS = 100


@dataclass
class Measured:
    """Rows; None where one was not taken.

    Parameters
    ----------
    streams, sealed, opening, shared, together, lookups
        Speed.
    saved
        Traces, replayed by the default and by others.
    kills, flips, calls, mixed
        What damage cost.
    model
        First token and storing of the real model, and the machine.
    failed
        Why a row is missing, by its name.
    """

    streams: list[StreamRow] = field(default_factory=list)
    sealed: SealedRow | None = None
    opening: OpenRow | None = None
    shared: SharedRow | None = None
    together: TogetherRow | None = None
    lookups: LookupRow | None = None
    saved: list[TraceRow] = field(default_factory=list)
    kills: Losses | None = None
    flips: Losses | None = None
    calls: Losses | None = None
    mixed: MixedLoad | None = None
    model: tuple[FirstToken, CostRow, MachineKind] | None = None
    failed: dict[str, str] = field(default_factory=dict)

    def goals(self, peers: Sequence[dict[str, Any]] = ()) -> list[StoreGoal]:
        """Return every goal with what was reached.

        Parameters
        ----------
        peers
            Rows of other runtimes, as `RivalRow`.
        """
        return [
            *self._of_streams(),
            *self._of_model(peers),
            *self._of_opening(),
            *self._of_shared(),
            *self._of_lookups(),
            *self._of_traces(),
            *self._of_damage(),
        ]

    def as_record(self) -> dict[str, Any]:
        """Return all rows for the report."""
        record: dict[str, Any] = {
            "streams": [
                asdict(row) | {"share_of_drive": row.share_of_drive} for row in self.streams
            ],
            "damage": {
                name: asdict(losses)
                for name in ("kills", "flips", "calls")
                if (losses := getattr(self, name)) is not None
            },
            "failed": self.failed,
        }
        if self.sealed is not None:
            record["encrypted"] = self.sealed.as_record()
        if self.opening is not None:
            record["opening"] = asdict(self.opening) | {"allowed_share": self.opening.allowed_share}
        if self.shared is not None:
            record["shared"] = asdict(self.shared)
        if self.together is not None:
            record["together"] = asdict(self.together)
        if self.lookups is not None:
            record["lookups"] = asdict(self.lookups)
        if self.saved:
            record["traces"] = [asdict(row) for row in self.saved]
        if self.mixed is not None:
            record["mixed_load"] = asdict(self.mixed)
        if self.model is not None:
            first, cost, kind = self.model
            record["first_token"] = asdict(first) | {
                "allowed_seconds": first.allowed_seconds,
                "possible_seconds": first.possible_seconds,
                "shared_processor_seconds": first.shared_processor_seconds,
                "drive_seconds": first.drive_seconds,
            }
            # Beside `hidden_share`, which is a goal.
            record["hidden_possible"] = first.hidden_possible
            record["storing"] = asdict(cost)
            record |= kind.as_record()
        return record

    def text(self, goals: Sequence[StoreGoal], peers: Sequence[dict[str, Any]]) -> str:
        """Return the rows and the goals for reading."""
        return "\n".join([*self._lines(peers), goals_text(goals)])

    # --- goals -----------------------------------------------------------------------------

    def _why(self, name: str) -> str:
        return self.failed.get(name, "not in this run")

    def _of_streams(self) -> Iterator[StoreGoal]:
        if not self.streams:
            for name, goal in (("stream_share_of_drive", ">= 0.9"), ("extra_bytes", "<= 0.02")):
                yield unmeasured(name, goal, self._why("streams"))
        else:
            least = min(self.streams, key=lambda row: row.share_of_drive)
            timed = [
                rounds for row in self.streams for rounds in (row.stream_seconds, row.drive_seconds)
            ]
            yield at_least("stream_share_of_drive", least.share_of_drive, 0.9, *timed)
            yield at_most("extra_bytes", max(row.extra_bytes for row in self.streams), 0.02)
            yield at_most("extra_written", max(row.extra_written for row in self.streams), 0.02)
        if self.together is None:
            yield unmeasured("together_share_of_drive", ">= 0.9", self._why("together"))
        else:
            row = self.together
            both, most = (row.stream_seconds, row.drive_seconds), row.possible_share
            name, share = "together_share_of_drive", row.share_of_drive
            yield at_least(name, share, 0.9, *both, allowed=most)

    def _of_model(self, peers: Sequence[dict[str, Any]]) -> Iterator[StoreGoal]:
        if self.model is None:
            yield unmeasured("ttft_speedup_vs_recompute", ">= 50", self._why("model"))
            return
        first, cost, _ = self.model
        own = first.stored_seconds
        reached = median(own)
        possible, hidden = first.possible_seconds, first.hidden_reached
        most = first.recompute_seconds / possible
        yield at_least("ttft_speedup_vs_recompute", first.speedup, 50, own, allowed=most)
        yield at_most("ttft_over_allowed", reached / first.allowed_seconds, 1, own)
        yield at_least("hidden_share", hidden, 0.8, own, allowed=first.hidden_possible)
        rows = {row["name"]: row for row in [*map(asdict, first.rivals), *peers]}
        limits = {CHUNK_FILES: 0.75, SESSION: 1.0, LLAMA_CPP: 1.0, VLLM: 0.05}
        names = {
            CHUNK_FILES: "ttft_over_chunk_files",
            SESSION: "ttft_over_session",
            LLAMA_CPP: "ttft_over_llama_cpp",
            VLLM: "ttft_over_vllm",
        }
        for rival, limit in limits.items():
            row = rows.get(rival)
            if row is None or not row["seconds"]:
                why = "not asked" if row is None else row["skipped"]
                yield unmeasured(names[rival], f"<= {limit:g}", why)
            else:
                theirs = median(row["seconds"])
                timed = own, row["seconds"]
                share, least = reached / theirs, possible / theirs
                yield at_most(names[rival], share, limit, *timed, allowed=least)
        yield at_most("storing_share_of_prefill", cost.share, 0.05, cost.ratios)

    def _of_opening(self) -> Iterator[StoreGoal]:
        if self.opening is None:
            yield unmeasured("open_share_of_stream", "the shadow's share", self._why("opening"))
            return
        row = self.opening
        timed = row.open_seconds, row.stream_seconds, row.drive_seconds
        yield at_most("open_share_of_stream", row.share, row.allowed_share, *timed)

    def _of_shared(self) -> Iterator[StoreGoal]:
        names = "cache_open_over_allowed", "second_cache_milliseconds", "second_cache_bytes"
        row = self.shared
        if row is None:
            every = *names, "shared_step_over_session"
            for name, goal in zip(every, (1, 20, 0, 1.03), strict=True):
                yield unmeasured(name, f"<= {goal:g}", self._why("shared"))
            return
        taken, second = row.open_seconds, row.second_seconds
        share, least = (
            median(taken) / row.allowed_seconds,
            row.possible_seconds / row.allowed_seconds,
        )
        yield at_most(names[0], share, 1, taken, row.drive_seconds, allowed=least)
        yield at_most(names[1], 1e3 * median(second), 20, second)
        yield at_most(names[2], row.second_bytes, 0)
        yield at_most("shared_step_over_session", row.step_ratio, 1.03)

    def _of_lookups(self) -> Iterator[StoreGoal]:
        if self.lookups is None:
            yield unmeasured("lookup_p99_milliseconds", "<= 5", self._why("lookups"))
            return
        row = self.lookups
        # Of what a server does all day: all but the drive's reads of a prompt's first lookup.
        again, index, first = row.again_milliseconds, row.index_milliseconds, row.first_milliseconds
        yield at_most("lookup_p99_milliseconds", row.p99(again), 5, again, allowed=row.possible_p99)
        yield at_most("lookup_index_p99_milliseconds", row.p99(index), 5, index)
        name, most = "lookup_first_p99_milliseconds", row.possible_first_p99
        yield at_most(name, row.p99(first), 5, first, allowed=most)

    def _of_traces(self) -> Iterator[StoreGoal]:
        names = "saved_seconds_over_lru", "saved_on_synthetic_over_lru", "admission_under_better"
        if not self.saved:
            for name, goal in zip(names, (">= -0.5", ">= 3", "<= 1"), strict=True):
                yield unmeasured(name, goal, self._why("saved"))
            return
        told = verdicts(self.saved)
        yield at_least(names[0], min(one.product_over_lru for one in told), -0.5)
        synthetic = (one.product_over_lru for one in told if one.trace == SYNTHETIC)
        yield at_least(names[1], min(synthetic), 3)
        yield at_most(names[2], max(one.under_better for one in told), 1)

    def _of_damage(self) -> Iterator[StoreGoal]:
        every = [one for one in (self.kills, self.flips, self.calls) if one is not None]
        every += [] if self.mixed is None else [self.mixed.losses]
        if self.kills is None:
            yield unmeasured("kills", ">= 500", self._why("kills"))
        else:
            yield at_least("kills", self.kills.runs, 500)
            yield at_most("slowest_opening", self.kills.slowest_opening, 1)
        yield at_most("wrong_tokens", sum(one.wrong_tokens for one in every), 0)
        yield at_most("lost_chunks", sum(one.lost_chunks for one in every), 0)
        yield at_most("leaks", sum(one.leaks for one in every), 0)
        yield at_most("errors", sum(one.errors for one in every), 0)
        if self.flips is None:
            yield unmeasured("flips_undetected", "<= 0", self._why("flips"))
        else:
            yield at_most("flips_undetected", self.flips.wrong_tokens, 0)
        if self.mixed is None:
            yield unmeasured("mixed_load_seconds", ">= 1200", self._why("mixed"))
        else:
            yield at_least("mixed_load_seconds", self.mixed.seconds, 1200)
            # Of those that came to their end: a starved machine gives each no more than one.
            looked = sum(one.lookups for one in self.mixed.work)
            yield at_least("mixed_load_lookups", looked, _LEAST_LOOKUPS)

    # --- for reading -----------------------------------------------------------------------

    def _lines(self, peers: Sequence[dict[str, Any]]) -> Iterator[str]:
        for row in self.streams:
            yield (
                f"{row.shape:>14}: {row.tokens} tokens, {row.byte_count / 1e6:.0f} MB of rows, "
                f"{row.gigabytes_per_second:.2f} GB/s, {row.share_of_drive:.2f} of plain 1 MiB "
                "reads"
            )
        if self.sealed is not None:
            yield self.sealed.line()
        if self.together is not None:
            yield (
                f"{self.together.processes} processes at once: "
                f"{self.together.share_of_drive:.2f} of as many that read plainly"
            )
        if self.opening is not None:
            one = self.opening
            yield (
                f"opening {one.tokens} tokens: {median(one.open_seconds):.3f} s; streaming "
                f"{median(one.stream_seconds):.3f} s"
            )
        if self.shared is not None:
            yield self.shared.line()
        if self.lookups is not None:
            yield (
                f"lookup of {self.lookups.tokens} tokens, p99: index "
                f"{self.lookups.p99(self.lookups.index_milliseconds):.1f} ms, first "
                f"{self.lookups.p99(self.lookups.first_milliseconds):.1f} ms (median "
                f"{median(self.lookups.first_milliseconds):.1f}; reading its sheets alone "
                f"{median(self.lookups.sheet_milliseconds):.1f}), again "
                f"{self.lookups.p99(self.lookups.again_milliseconds):.1f} ms, possible "
                f"{self.lookups.possible_p99:.1f} ms"
            )
        if self.model is not None:
            first, _, _ = self.model
            yield (
                f"first token, {first.stored_tokens} stored and {first.new_tokens} new tokens: "
                f"{median(first.stored_seconds):.2f} s (reading {median(first.read_seconds):.2f}, "
                f"computing {median(first.compute_seconds):.2f}); recomputing "
                f"{first.recompute_seconds:.1f}"
            )
            yield first.line()
            for rival in [*map(asdict, first.rivals), *peers]:
                told = f"{median(rival['seconds']):.2f} s" if rival["seconds"] else rival["skipped"]
                yield f"  {rival['name']}: {told}"
        if self.mixed is not None:
            yield (
                f"mixed load: {self.mixed.processes} processes, {self.mixed.seconds:.0f} s, "
                f"{self.mixed.killed} killed, {sum(one.lookups for one in self.mixed.work)} prompts"
            )
