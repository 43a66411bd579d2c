# SPDX-License-Identifier: Apache-2.0
"""What doctor says of exact and coded tokens, and that a budget it names keeps all codes."""

from dataclasses import replace

import numpy as np
import pytest
from test_plain_step import SHAPE, TOKENS, step

from hillinfer.doctor.profile import CodedNeed
from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.memory_budget import Accountant
from hillinfer.settings import Settings
from hillinfer.shadow.values import CODE_SHARE, ValueCodes, slot_bytes
from hillinfer.values import ByteSize

CODED = {"alpha": 0.2, "exact": 0.02}
# 8 heads of 64 channels: half a byte each and an exponent a head; 8 bytes of tables a slot.
SLOT = 8 * 64 // 2 + 8 + 8


def need(budget, tokens=TOKENS, **changes):
    settings = Settings().changed(dram_budget=ByteSize.parse(budget), **{**CODED, **changes})
    return CodedNeed(SHAPE, settings, tokens)


def kept_by_the_product(needed, byte_count):
    """How many codes of each layer `ValueCodes` keeps where so many bytes are left for them."""
    spec = kernel_spec(SHAPE, needed.settings)
    # Tables of row numbers are counted as well; the plan has them among the others.
    tables = 6 * SHAPE.layers * TOKENS
    made = ValueCodes(
        spec, SHAPE.layers, Accountant(byte_count + tables), lambda: 0, lambda _: None
    )
    made.find(0, np.array([needed.tokens - 1]), np.array([0]))
    made.fit()
    return made.held_bytes // (SHAPE.layers * slot_bytes(spec))


def test_all_codes_take_a_slot_for_each_token():
    assert need("60%").all_code_bytes == 4 * TOKENS * SLOT
    # Tables have whole steps of row numbers.
    assert need("60%", tokens=TOKENS - 1).all_code_bytes == 4 * TOKENS * SLOT
    assert need("60%", exact=1.0).all_code_bytes == 0
    assert need("60%", shadow="int2").all_code_bytes == 0


def test_the_named_budget_keeps_all_codes_and_a_byte_less_does_not():
    least = need("60%").least_budget_bytes
    enough, short = need(str(least)), need(str(least - 1))
    assert enough.kept_share == 1.0
    assert enough.kept_code_bytes == enough.all_code_bytes
    assert short.kept_share == pytest.approx(CODE_SHARE, abs=0.001)
    # The product does so with what the plan leaves.
    assert kept_by_the_product(enough, enough.all_code_bytes) == TOKENS
    assert kept_by_the_product(short, short.all_code_bytes - 1) < TOKENS


def test_findings_name_bytes_and_what_would_keep_all():
    short = need("25%")
    (finding,) = short.findings()
    assert finding.verdict == "warning"
    # 655 rows of 2048 bytes and 5899 codes of 264, in 4 layers.
    assert "5.1 MiB of rows of 655 exact tokens" in finding.found
    assert "5.9 MiB of codes of 5899 coded ones" in finding.found
    assert "all codes take 34.0 MiB of DRAM and do not fit" in finding.found
    assert f"{short.kept_share:.0%} are kept" in finding.found
    named = finding.fix.split()[1].removesuffix(",")
    (then,) = need(named).findings()
    assert then.verdict == "ok"
    assert then.fix is None
    assert then.found.endswith("all codes take 34.0 MiB of DRAM and fit")
    assert list(need("25%", exact=1.0).findings()) == []


def test_a_step_reads_exact_rows_and_rows_of_codes_that_are_not_kept():
    all_kept, some_kept = step("80%", **CODED), step("25%", **CODED)
    exact_share = 655 / TOKENS
    cold = TOKENS - all_kept.hosted
    assert cold > 0
    assert all_kept.cold_rows == pytest.approx(exact_share * cold)
    gone = 1 - need("25%").kept_share
    share = exact_share + (0.2 - exact_share) * gone
    assert some_kept.cold_rows == pytest.approx(share * (TOKENS - some_kept.hosted))
    # The twin: codes take memory of rows, so with none more rows are hot, and more are read.
    rows = step("80%", alpha=0.2)
    assert rows.hosted > all_kept.hosted
    assert rows.cold_rows == pytest.approx(0.2 * (TOKENS - rows.hosted))
    assert step("150%", **CODED).reading_seconds == 0


def test_all_exact_is_said_as_before():
    assert [one.name for one in step("40%", exact=1).findings("a shape")][1:] == ["query"]
    coded = list(step("40%", **CODED).findings("a shape"))
    assert [one.name for one in coded][1:] == ["coded tokens", "query"]
    assert "at alpha 0.2, exact 0.02)" in coded[0].found
    # A shape with a longer row needs more of it.
    wide = replace(need("40%"), shape=replace(SHAPE, head_dim=128))
    assert wide.need.exact_row_bytes == 2 * need("40%").need.exact_row_bytes
