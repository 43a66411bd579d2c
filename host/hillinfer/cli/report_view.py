# SPDX-License-Identifier: Apache-2.0
"""A run's report for people, on standard error."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from hillinfer.byte_size import format_bytes
from hillinfer.run_report import RunReport


def show_report(report: RunReport, console: Console) -> None:
    """Print the report as one table, and a second one side by side where there is a comparison."""
    table = Table(title="HillInfer report", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in report_lines(report):
        table.add_row(name, value)
    console.print(table)
    if report.comparison is not None:
        console.print(_comparison_table(report))


def report_lines(report: RunReport) -> list[tuple[str, str]]:
    """Return the report as pairs of a name and what is to be said."""
    statistics = report.statistics
    decode = report.decode_counts
    settings = report.settings
    steps = max(1, sum(answer.decode_steps for answer in report.answers))
    budget_share = statistics.dram_budget_bytes / max(1, statistics.kv_bytes)
    lines = [
        (
            "model",
            f"{report.model['name']} ({report.model['model_type']}, {report.model['dtype']})",
        ),
        (
            "selection",
            f"alpha {settings['alpha']}, {settings['rule']}, {settings['scope']}, shadow "
            f"{settings['shadow']}, device {settings['device']}",
        ),
        ("tokens", f"{report.prompt_tokens} prompt, {report.new_tokens} new"),
        (
            "prefill",
            f"{report.prefill_seconds:.1f} s, {report.prefill_tokens_per_second:.1f} tokens/s",
        ),
        ("decode", f"{report.decode_tokens_per_second:.2f} tokens/s"),
        ("KV cache", f"{format_bytes(statistics.kv_bytes)} of rows"),
        (
            "DRAM",
            f"peak {format_bytes(statistics.dram_peak_bytes)} of a budget of "
            f"{format_bytes(statistics.dram_budget_bytes)} ({budget_share:.0%} of the KV cache)",
        ),
        (
            "  at the peak",
            f"hot rows {format_bytes(statistics.hot_bytes)}, shadow "
            f"{format_bytes(statistics.shadow_bytes)}, staging "
            f"{format_bytes(statistics.staging_bytes)}, other "
            f"{format_bytes(statistics.other_bytes)}",
        ),
        ("process", f"peak {format_bytes(report.peak_rss_bytes)} resident, weights included"),
        (
            "selected",
            f"{statistics.selected_share:.1%} of the context per step; "
            f"{statistics.hot_hit_rate:.1%} of selected rows were hot",
        ),
        ("hot pools", _pools_text(report)),
        (
            "drive",
            f"{format_bytes(statistics.cold_write_bytes)} written, "
            f"{format_bytes(statistics.cold_read_bytes)} read for "
            f"{format_bytes(statistics.cold_useful_bytes)} asked for",
        ),
        (
            "  reads",
            f"{statistics.cold_reads}, {statistics.io_mode} I/O by {statistics.io_engine}, "
            f"waited {statistics.drive_wait_seconds:.1f} s",
        ),
        (
            "  per new token",
            f"{format_bytes(decode['cold_read_bytes'] / steps)} read for "
            f"{format_bytes(decode['cold_useful_bytes'] / steps)} asked for, waited "
            f"{decode['drive_wait_seconds'] / steps * 1e3:.1f} ms",
        ),
    ]
    if report.session is not None and report.session.path is not None:
        lines.append(
            (
                "session",
                f"{report.session.reused_tokens} tokens of {report.session.path} reused, opened in "
                f"{report.session.open_seconds:.1f} s",
            )
        )
    if statistics.kernel_launches or statistics.device_lost:
        share = statistics.device_scored_tokens / max(statistics.scored_tokens, 1)
        lines.append(
            (
                "device",
                f"{statistics.kernel_launches} launches scored "
                f"{statistics.device_scored_tokens} tokens, {share:.1%} of all"
                + ("; then it was LOST and the host went on" if statistics.device_lost else ""),
            )
        )
    if report.machine["gpu"]:
        lines.append(
            (
                "GPU",
                f"{format_bytes(statistics.host_to_device_bytes)} to it, "
                f"{format_bytes(statistics.device_to_host_bytes)} from it, through "
                f"{format_bytes(statistics.gpu_staging_bytes)} of {statistics.gpu_staging} memory",
            )
        )
    if statistics.fp16_overflows:
        lines.append(
            ("FP16", f"{statistics.fp16_overflows} values were too large and became the largest")
        )
    return lines


def _pools_text(report: RunReport) -> str:
    statistics, settings = report.statistics, report.settings
    rates = statistics.layer_hit_rates
    lowest, highest = rates.index(min(rates)), rates.index(max(rates))
    return (
        f"{settings['pool_policy']}, sizes {settings['pool_sizes']}; "
        f"{statistics.promoted_rows} rows promoted, {statistics.demoted_rows} demoted; hit rate "
        f"{rates[lowest]:.1%} in layer {lowest} to {rates[highest]:.1%} in layer {highest}"
    )


def _comparison_table(report: RunReport) -> Table:
    other = report.comparison
    assert other is not None
    table = Table(title="Side by side", title_justify="left")
    for heading in ("", "HillInfer", "ordinary cache"):
        table.add_column(heading)
    table.add_row("prefill", f"{report.prefill_seconds:.1f} s", f"{other.prefill_seconds:.1f} s")
    table.add_row(
        "decode",
        f"{report.decode_tokens_per_second:.2f} tokens/s",
        f"{other.decode_tokens_per_second:.2f} tokens/s",
    )
    table.add_row(
        "cache in memory",
        format_bytes(report.statistics.dram_peak_bytes),
        format_bytes(other.kv_bytes),
    )
    table.add_row(
        "peak resident while generating",
        format_bytes(other.hillinfer_peak_rss_bytes),
        format_bytes(other.peak_rss_bytes),
    )
    for number, (answer, text) in enumerate(zip(report.answers, other.texts, strict=True), start=1):
        table.add_row(
            f"answer {number}: first {other.equal_tokens[number - 1]} of "
            f"{len(answer.token_ids)} tokens equal",
            answer.text.strip(),
            text.strip(),
        )
    return table
