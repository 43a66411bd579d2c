# SPDX-License-Identifier: Apache-2.0
"""Modelled steps of the paper's machine, against cases that are worked out by hand."""

import math
from dataclasses import replace

import pytest

from hillinfer.doctor.profile import ModelFigures
from hillinfer_bench.study.figures import (
    beta_sweep,
    modelled_record,
    modelled_row,
    modelled_table,
)
from hillinfer_bench.study.machines import CLAIMS, PAPER_MACHINE, SOURCES, EdgeMachine
from hillinfer_bench.study.modelled import (
    SYSTEM_MODELS,
    Abstracts,
    AllKeys,
    CodedHillInfer,
    FreeScores,
    FullCache,
    HillInfer,
    Placed,
    Prefetching,
    Workload,
    hit_rate,
)

# One layer, two heads of 25 channels: keys of 100 bytes, rows of 200; 5,000 weights of attention.
MODEL = ModelFigures("opt", 1, 50, 50, 2, 2, 25)
# A GPU in no time, 1,000 tokens' rows in DRAM; 10,000 keys a second scored, 1,000 rows moved.
MACHINE = EdgeMachine(
    gpu_bytes=1e9,
    gpu_memory=math.inf,
    gpu_flops=math.inf,
    gpu_work=0.0,
    host_bytes=200_000.0,
    host_scoring=1e6,
    link=200_000.0,
    drive=20_000.0,
    drive_write=math.inf,
    card_link=20_000.0,
    card_stream=1e5,
    card_bytes=0.0,
    card_memory=1e5,
)


def placed(tokens, machine=MACHINE, alpha=0.2):
    return Placed(machine, Workload(MODEL, tokens, 0, 1, alpha))


def test_everything_in_memory_takes_the_link():
    here = placed(1000)
    # 1,000 rows at 1,000 a second; 0.6 of it; 30 of 100 bytes scored at 1e6 bytes a second.
    assert FullCache().step(here) == pytest.approx(1.0)
    assert AllKeys().step(here) == pytest.approx(0.6)
    roomy = placed(1000, replace(MACHINE, host_bytes=1e9))
    assert Prefetching().step(roomy) == pytest.approx(0.2 + 0.03)
    assert Abstracts().step(roomy) == pytest.approx(0.2 + (1 / 64 + 0.4 / 16) * 0.2)


def test_what_memory_has_no_room_for_takes_the_drive():
    # 1,000 rows at 1,000 a second and 1,000 at 100.
    assert FullCache().step(placed(2000)) == pytest.approx(1.0 + 10.0)
    assert FullCache().cold(placed(2000)) == 1000
    # Partial keys take 0.15 of 2,000 rows of DRAM: 700 are left.
    assert Prefetching().cold(placed(2000)) == 1300
    assert Prefetching().step(placed(2000)) == pytest.approx(0.2 * (0.7 + 13.0) + 0.06)


def test_weights_that_the_gpu_has_no_room_for_come_each_step():
    weights = MODEL.layer_weights * 2
    small = replace(MACHINE, gpu_bytes=weights - 20_000.0)
    assert placed(10, small).streamed_weights == 20_000
    assert FullCache().step(placed(10, small)) == pytest.approx(0.01 + 0.1)
    # They are in DRAM, too.
    assert placed(2000, small).hosted_most() == 900
    assert placed(2000).hosted_most() == 1000


@pytest.mark.parametrize(
    ("share", "hits"), [(0.0, 0.0), (0.1, 0.3035), (0.2, 0.607), (0.3, 0.7665), (0.4, 0.926)]
)
def test_hits_lie_on_lines_between_what_was_measured(share, hits):
    assert hit_rate(share, 0.2) == pytest.approx(hits)
    assert hit_rate(0.7, 0.2) == pytest.approx(0.963)
    assert hit_rate(1.0, 0.2) == pytest.approx(1.0)


def test_the_papers_system_balances_host_and_card():
    here, system = placed(1000), HillInfer()
    # All on the host: 1,000 at 10,000 a second, 200 rows at 1,000.
    assert system.attending(here, 1000) == pytest.approx(0.1 + 0.2)
    # Half and half: hits are .9383 of 200 on the host; the card scores 500 at 1,000 a second.
    hits = 0.926 + 0.074 * 0.1 / 0.6
    host, card = 0.05 + 0.2 * hits, 0.5 + 200 * (1 - hits) / 100
    assert system.attending(here, 500) == pytest.approx(max(host, card))
    chosen = system.hosted(here)
    assert 500 < chosen < 1000
    assert all(
        system.attending(here, chosen) <= system.attending(here, one) for one in system.splits(here)
    )
    # M0 bounds it.
    assert HillInfer().hosted(placed(4000)) <= 1000
    assert FreeScores().step(placed(4000)) < HillInfer().step(placed(4000))


def test_codes_are_an_eighth_of_a_row():
    roomy = placed(1000, replace(MACHINE, host_bytes=1e9, card_stream=1.0, card_memory=1.0))
    system = CodedHillInfer("coded")
    # Shadows of 25 bytes at 1e6 a second; 20 rows and 180 eighths at 1,000 a second.
    assert system.step(roomy) == pytest.approx(0.025 + (20 + 180 / 8) / 1000)
    assert system.step(replace(roomy, load=replace(roomy.load, alpha=0.3))) > system.step(roomy)


def test_a_faster_rate_makes_nothing_slower():
    base = placed(3000)
    for name in ("host_scoring", "link", "drive", "card_stream", "card_link", "host_bytes"):
        faster = replace(base, machine=replace(MACHINE, **{name: 2 * getattr(MACHINE, name)}))
        for system in SYSTEM_MODELS:
            assert system.step(faster) <= system.step(base) * (1 + 1e-9), (name, system.name)


def test_both_printed_betas_are_where_their_sweep_is_least():
    rows, optima = beta_sweep(PAPER_MACHINE, 8192)
    machine, key, row, alpha = PAPER_MACHINE, 8192, 16384, 0.2
    fc, fs = machine.host_scoring / key, machine.card_stream / key
    bc, bs = machine.link / row, machine.card_link / row
    # Equation 4 and section 5.4 as printed.
    four = bc * fc * (bs + alpha * fs) / (bs * fs * (bc + alpha * fc))
    five = fc * (bs * bc + alpha * bc * fs + alpha * bs * fs) / (bs * fs * (bc + alpha * fc))
    assert optima == pytest.approx({"equation 4": four, "section 5.4": five})
    for name, beta in optima.items():
        least = min(rows, key=lambda one: one.step_seconds[name]).beta
        assert beta / 1.1 < least < beta * 1.1


def test_the_papers_machine_at_batch_10():
    row = modelled_row("14", "opt-6.7b", 1920, 10, PAPER_MACHINE)
    # 10 sequences of 1,984 tokens, 32 layers, 16 KiB a row.
    assert row.kv_gb == pytest.approx(10 * 1984 * 32 * 16384 / 1e9)
    assert row.drive_gb == 0
    # 128 steps of all rows over 25 GB/s, and the prompt: what the paper has above 50 s.
    steps = 128 * row.kv_gb / 25
    assert steps < row.run_seconds["full"] < steps + 5
    assert row.run_seconds["full"] > 50 > 25 > row.run_seconds["paper's hillinfer"]
    assert row.speedups("paper's hillinfer")["full"] == pytest.approx(
        row.run_seconds["full"] / row.run_seconds["paper's hillinfer"]
    )


def test_the_record_has_every_rate_with_its_source_and_every_claim():
    record = modelled_record()
    assert record["label"] == "modelled"
    assert set(record["rates"]) == set(vars(PAPER_MACHINE)) == set(SOURCES)
    assert all(one["source"] for one in record["rates"].values())
    assert set(record["claims"]) == set(CLAIMS) == {"12", "13", "14", "15", "16a", "16b"}
    table = modelled_table(record)
    assert table.count("| opt-6.7b | 1920 |") == 2 * (2 + 6 + 6)
    assert "longchat-7b* | 36864" in table
