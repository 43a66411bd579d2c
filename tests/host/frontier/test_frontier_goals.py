# SPDX-License-Identifier: Apache-2.0
"""Equal quality, figures and goals of the report, from rows made by hand."""

from dataclasses import replace

import pytest
from bench.bench_cases import measured_row

from hillinfer.model_shape import ModelShape, StoredType
from hillinfer_bench.figures.frontier_figure import frontier_figure
from hillinfer_bench.frontier.equal import default_row, equal_qualities
from hillinfer_bench.frontier.modelled import Machine, Place
from hillinfer_bench.frontier.report import TimedModel, frontier_report, report_text
from hillinfer_bench.frontier.sweep import Setting, SweptRow, curves
from hillinfer_bench.frontier.swept import SWEPT
from hillinfer_bench.frontier.times import ALL_CODED, TimedRow, parts_of
from hillinfer_bench.quality.table import Measures

SHAPE = ModelShape(4, 32, 32, 128, StoredType.BFLOAT16, 100_000)
MACHINE = Machine("opt-6.7b", 60.0, 50e9, 2e9, 2 * 2**30, 0.2, SHAPE)
# KL by system and setting: HillInfer's default has .004.
KLS = {
    "hillinfer-coded": {0.1: 0.01, 0.2: 0.004, 0.3: 0.002},
    "hillinfer": {0.1: 0.016, 0.2: 0.004, 0.3: 0.001},
    "h2o-all-keys": {0.1: 0.016, 0.2: 0.001},
    "infinigen": {0.2: 0.04, 0.3: 0.0004},
    "leoam": {0.45: 0.5, 0.9: 0.005},
    "quest": {0.6: 0.008, 0.9: 0.002},
    "four-bit": {3: 0.02, 4: 0.003},
}
MS = {
    "floor": 60.0,
    "hillinfer-coded": 100.0,
    "hillinfer-today": 150.0,
    "hillinfer": 200.0,
    "full-drive": 1000.0,
    "h2o-all-keys": 600.0,
    "infinigen": 300.0,
    "quest": 450.0,
    "hillinfer-coded-in-memory": 50.0,
    "full-memory": 110.0,
    "four-bit-memory": 80.0,
    "hillinfer-all-coded-in-memory": 90.0,
}


IN_MEMORY = "in memory"
PARTS = {
    "": [name for name in MS if not name.endswith("-memory")],
    IN_MEMORY: ["floor", *(name for name in MS if name.endswith("-memory"))],
}


def swept(kls=KLS):
    made = []
    for name, own in kls.items():
        for value, kl in own.items():
            system = SWEPT[name]
            measures = (Measures(1.0, kl * 0.5, 0.9), Measures(1.0, kl * 1.5, 1.0))
            share = system.row_share(value, 4096, SHAPE)
            made.append(SweptRow(Setting(system, value), measures, share, 0.1))
    return made


def timed(model="opt-6.7b", **changes):
    given = MS | changes
    return [
        TimedRow(
            measured_row(name, ms, model=model, drive_read_bytes=ms, part=part), "some setting"
        )
        for part, names in PARTS.items()
        for name, ms in given.items()
        if ms is not None and name in names
    ]


def report(rows=None, timed_models=None):
    rows = swept() if rows is None else rows
    if timed_models is None:
        timed_models = [
            TimedModel("real", True, timed("real"), replace(MACHINE, model="real")),
            TimedModel("opt-6.7b", False, timed(), MACHINE),
        ]
    equal = equal_qualities(default_row(rows), curves(rows))
    return frontier_report(rows, equal, timed_models, {"model": "real"})


def goal(made, words):
    (found,) = [one for one in made["goals"] if words in one["goal"]]
    return found


def test_every_figure_of_the_report():
    made = report()
    assert made["kl_share_of_exact_alpha_01"] == pytest.approx(0.004 / 0.016)
    assert made["drive_bytes_share"] == pytest.approx(100 / 150)
    assert made["decode_speedup"] == pytest.approx(1.5)
    ratios = made["equal_quality"]
    assert ratios["full-drive"] == pytest.approx(10.0)
    assert ratios["h2o-all-keys"] == pytest.approx(6.0)
    assert ratios["infinigen"] == pytest.approx(3.0)
    assert ratios["quest"] == pytest.approx(4.5)
    # No setting of this one is as good.
    assert ratios["leoam"] is None
    assert made["equal_quality_from"]["leoam"]["source"] == (
        "not reached by any setting: 0.9 has a KL of 0.005"
    )
    assert made["equal_quality_from"]["four-bit"]["source"] == "modelled, opt-6.7b"
    # The twin: another time has another ratio.
    slower = [TimedModel("opt-6.7b", False, timed(**{"hillinfer-coded": 120.0}), MACHINE)]
    assert report(timed_models=slower)["equal_quality"]["full-drive"] == pytest.approx(1000 / 120)


def test_settings_of_equal_quality_are_interpolated_and_compared_in_bytes():
    own, ten, three = report()["settings"]
    assert (own["kl"], ten["kl"], three["kl"]) == (pytest.approx(0.004), 0.01, 0.003)
    coded, exact = own["systems"]["hillinfer-coded"], own["systems"]["hillinfer"]
    assert (coded["value"], exact["value"]) == (0.2, pytest.approx(0.2))
    # Half way between .016 and .001 in the logarithm.
    assert own["systems"]["h2o-all-keys"]["value"] == pytest.approx(0.15)
    assert exact["bytes_of_hillinfer"] == pytest.approx(exact["share"] / coded["share"])
    assert own["systems"]["four-bit"]["value"] == 4
    assert "the next setting there is" in own["systems"]["four-bit"]["why"]
    assert own["systems"]["leoam"]["share"] is own["systems"]["leoam"]["bytes_of_hillinfer"] is None
    assert three["systems"]["quest"]["value"] < 0.9
    assert own["systems"]["four-bit"]["modelled_ms"].keys() == {
        f"{model}, {place}" for model in ("real", "opt-6.7b") for place in Place
    }


@pytest.mark.parametrize(
    ("words", "reached", "met"),
    [
        ("KL of the default", 0.25, True),
        ("drive bytes of a step", 0.667, False),
        ("decode speed over today's", 1.5, False),
        ("ahead of the full cache on the drive", 10.0, True),
        ("speed over full-drive", 10.0, True),
        ("speed over h2o-all-keys", 6.0, False),
        ("speed over infinigen", 3.0, False),
        ("speed over leoam", None, None),
        ("speed over quest", 4.5, True),
        ("16-bit full cache, all in DRAM", 2.2, True),
        ("4-bit full cache", 1.6, True),
    ],
)
def test_goals_beside_what_was_reached(words, reached, met):
    found = goal(report(), words)
    assert found["met"] is met
    if reached is not None:
        assert found["reached"] == pytest.approx(reached)


def test_goals_say_what_bytes_and_rates_allow_and_how_much_of_it_was_reached():
    found = goal(report(), "speed over h2o-all-keys")
    # Limits of rows made by hand are half of their times.
    assert (found["allowed"], found["share_of_allowed"]) == (6.0, 1.0)
    assert goal(report(), "KL of the default")["allowed"] is None
    # Bytes of both, modelled for the same budget: what the key shadow leaves holds codes or rows.
    shadow = 65 / 512
    rows = {
        name: SWEPT[name].row_share(value, 4096, SHAPE)
        for name, value in (("hillinfer-coded", 0.2), ("hillinfer", 0.1))
    }
    held = (0.2 - shadow) / shadow
    # In the file a token's 2,080 bytes are padded to a multiple of 64.
    ours = 0.02 + (rows["hillinfer-coded"] - 0.02) * (1 - held) * 2112 / 2080
    theirs = rows["hillinfer"] * (1 - (0.2 - shadow))
    found = goal(report(), "drive bytes of a step")
    assert found["allowed"] == pytest.approx(ours / theirs, abs=1e-3)
    assert found["share_of_allowed"] == pytest.approx(ours / theirs / (2 / 3), abs=1e-3)


def test_what_bytes_allow_counts_whole_units_and_what_memory_holds_beside_rows():
    coded, exact = SWEPT["hillinfer-coded"], SWEPT["hillinfer"]
    # SmolLM2-135M's: rows of 768 bytes, codes of 128 in the file; nothing but what ranks fits.
    shape = ModelShape(30, 3, 9, 64, StoredType.FLOAT16, 8192)
    assert exact.read_share(0.1, 33 / 256, shape, 1) == pytest.approx(0.1)
    # A sector of 512 bytes has parts of 4/3 rows, and four codes.
    of_rows = 1 - 0.9 ** (4 / 3)
    assert exact.read_share(0.1, 0.0, shape, 512) == pytest.approx(of_rows)
    of_codes = 1 - (1 - 0.18) ** 4
    rows = 0.02 + 0.18 * 33 / 256
    found = coded.read_share(rows, 0.0, shape, 512)
    assert found == pytest.approx(1 - 0.98 ** (4 / 3) + of_codes / 6)
    # The twin: of pages of 4 KiB nearly all are read.
    assert coded.read_share(rows, 0.0, shape, 4096) > 2 * found
    machine = replace(MACHINE, shape=shape, unit_bytes=512)
    less = replace(machine, beside={"hillinfer": 0.05})
    assert less.drive_bytes(exact, 0.1) > machine.drive_bytes(exact, 0.1)
    assert less.drive_bytes(coded, 0.05) == machine.drive_bytes(coded, 0.05)


@pytest.mark.parametrize(
    ("own_limit", "flagged", "floor_ms", "verdict"),
    [
        (50.0, 0.1, None, "limit reached"),
        (50.0, 0.5, None, "missed"),
        # Of a limit of 7.3 times 0.82 were reached, of one of 8 three quarters, and 10 is no limit.
        (41.0, 0.1, None, "limit reached"),
        (37.5, 0.1, None, "missed"),
        (30.0, 0.1, None, "missed"),
        # A loop whose fastest step takes 0.9 of this leaves 6.7 times, which judges nothing.
        (30.0, 0.1, 50.0, "missed"),
        (41.0, 0.1, 50.0, "limit reached"),
    ],
)
def test_a_goal_that_bytes_forbid_is_reached_from_four_fifths_of_its_limit_on(
    own_limit, flagged, floor_ms, verdict
):
    rows = [
        replace(one, row=replace(one.row, limit_ms=own_limit, spread=flagged, dram_read_bytes=0.0))
        if one.row.system == "hillinfer-coded"
        else one
        for one in timed(floor=floor_ms)
    ]
    made = report(timed_models=[TimedModel("opt-6.7b", False, rows, MACHINE)])
    found = goal(made, "speed over h2o-all-keys")
    assert found["met"] is False
    assert found["allowed"] == pytest.approx(300 / own_limit, abs=1e-3)
    assert found["forbidden"] is (300 / own_limit < 8.56)
    assert found["verdict"] == verdict


@pytest.mark.parametrize(
    ("floor_ms", "theirs", "own"),
    [
        # Rows have limits of half of their times. The loop's fastest step takes 0.9 of its median,
        # and KV of a gigabyte a tenth of a second.
        (20.0, 500.0, 118.0),
        (100.0, 500.0, 190.0),
        (500.0, 550.0, 550.0),
        # Where no loop was measured bytes and rates are left.
        (None, 500.0, 50.0),
    ],
)
def test_goals_say_what_the_models_loop_leaves_and_are_not_judged_by_it(floor_ms, theirs, own):
    rows = []
    for one in timed(floor=floor_ms):
        row = replace(one.row, dram_read_bytes=3e9 if one.row.system == "full-memory" else 1e9)
        if (row.system, row.part) == ("floor", IN_MEMORY):
            # Of its own turns, which were slower.
            row = replace(row, min_ms=2 * row.min_ms)
        rows.append(replace(one, row=row))
    models = [
        TimedModel("real", True, rows, None),
        TimedModel("opt-6.7b", False, rows, MACHINE),
    ]
    made = report(timed_models=models)
    left = pytest.approx(theirs / own, abs=1e-3)
    for words in ("ahead of the full cache on the drive", "speed over full-drive"):
        found = goal(made, words)
        assert (found["reached"], found["allowed"]) == (10.0, 10.0)
        assert found["allowed_with_loop"] == left
        assert (found["share_of_allowed"], found["forbidden"]) == (1.0, False)
    ratio = made["equal_quality_from"]["full-drive"]
    assert (ratio["allowed"], ratio["allowed_with_loop"]) == (10.0, pytest.approx(theirs / own))
    told = f"; with the model's loop {found['allowed_with_loop']:g} are left"
    if found["allowed_with_loop"] < 8.56:
        assert found["share_with_loop"] == pytest.approx(10 / found["allowed_with_loop"], abs=2e-3)
        told += f", and {found['share_with_loop']:.0%} of that is reached"
    else:
        assert found["share_with_loop"] is None
    assert told in report_text(made)
    found = goal(made, "16-bit full cache, all in DRAM")
    loop = None if floor_ms is None else 2 * 0.9 * floor_ms
    in_memory = 2.2 if loop is None else (loop + 300) / (loop + 100)
    assert found["allowed_with_loop"] == pytest.approx(in_memory, abs=1e-3)
    assert found["allowed"] == 2.2


@pytest.mark.parametrize(("own", "allowed"), [(80.0, 6.0), (60.0, 8.0), (None, None)])
def test_goals_say_what_the_middle_rates_allow_and_are_not_judged_by_it(own, allowed):
    """H2O-like takes 6 times as long, where the best rates allow 8, and reaches 3 quarters."""
    rows = []
    for one in timed():
        row = one.row
        if row.system == "hillinfer-coded":
            row = replace(row, limit_ms=37.5, middle_limit_ms=own)
        rows.append(replace(one, row=row))
    made = report(timed_models=[TimedModel("opt-6.7b", False, rows, MACHINE)])
    found = goal(made, "speed over h2o-all-keys")
    assert (found["reached"], found["allowed"]) == (6.0, 8.0)
    assert (found["verdict"], found["share_of_allowed"]) == ("missed", 0.75)
    assert found["allowed_by_middle"] == allowed
    assert found["share_by_middle"] == (None if allowed is None else 6 / allowed)
    ratio = made["equal_quality_from"]["h2o-all-keys"]
    assert ratio["allowed_by_middle"] == allowed
    lines = report_text(made).splitlines()
    (line,) = (one for one in lines if "speed over h2o-all-keys" in one)
    told = "the middle rates between the turns allow"
    assert (told in line) is (allowed is not None)
    if allowed is not None:
        assert line.endswith(f"; {told} {allowed:g}, and {6 / allowed:.0%} of that is reached")


def test_flagged_rows_meet_no_goal():
    noisy = [
        replace(one, row=replace(one.row, spread=0.5)) if one.row.system == "full-drive" else one
        for one in timed()
    ]
    made = report(timed_models=[TimedModel("opt-6.7b", False, noisy, MACHINE)])
    found = goal(made, "speed over full-drive")
    assert (found["met"], found["flagged"]) == (False, True)


def test_the_worst_shape_counts():
    both = [
        TimedModel("opt-6.7b", False, timed(), MACHINE),
        TimedModel("llama-13b", False, timed("llama-13b", **{"full-drive": 800.0}), MACHINE),
    ]
    made = report(timed_models=both)
    assert made["equal_quality"]["full-drive"] == pytest.approx(8.0)
    assert goal(made, "speed over full-drive")["met"] is False
    assert goal(made, "decode speed over today's")["row"] == "not measured"


def test_what_was_not_timed_is_modelled_and_judges_nothing():
    without = [one for one in timed() if one.row.system != "hillinfer-coded"]
    made = report(timed_models=[TimedModel("opt-6.7b", False, without, MACHINE)])
    coded = MACHINE.milliseconds(
        SWEPT["hillinfer-coded"], SWEPT["hillinfer-coded"].row_share(0.2, 4096, SHAPE), Place.DRIVE
    )
    full = 60 + 1e3 * 0.8 * MACHINE.kv_bytes / MACHINE.drive
    assert made["equal_quality"]["full-drive"] == pytest.approx(full / coded)
    assert made["equal_quality_from"]["full-drive"]["source"] == "modelled, opt-6.7b"
    found = goal(made, "speed over full-drive")
    assert found["met"] is None
    assert found["reached"] == pytest.approx(full / coded, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "reached", "over", "met"),
    [
        ({}, 1.6, "four-bit-memory", True),
        ({"hillinfer-all-coded-in-memory": 60.0}, 1.2, "hillinfer-all-coded-in-memory", True),
        ({"four-bit-memory": None}, 1.8, "hillinfer-all-coded-in-memory", True),
        ({"hillinfer-coded-in-memory": 100.0}, 0.8, "four-bit-memory", False),
    ],
)
def test_the_faster_four_bit_cache_that_was_timed_judges(changes, reached, over, met):
    models = [TimedModel("opt-6.7b", False, timed(**changes), MACHINE)]
    found = goal(report(timed_models=models), "4-bit full cache")
    assert (found["reached"], found["met"]) == (pytest.approx(reached), met)
    assert found["row"].endswith(f", over {over}")
    # Limits of rows made by hand are half of their times.
    assert found["allowed"] == pytest.approx(reached)


def test_a_four_bit_cache_that_was_not_timed_judges_nothing():
    without = {"four-bit-memory": None, "hillinfer-all-coded-in-memory": None}
    models = [TimedModel("opt-6.7b", False, timed(**without), MACHINE)]
    found = goal(report(timed_models=models), "4-bit full cache")
    assert (found["met"], found["row"]) == (None, "no times were taken")
    # Nor does one that had no room, and its row says why.
    rows = [
        replace(one, row=replace(one.row, median_ms=None, skipped="no room"))
        if one.row.system in without
        else one
        for one in timed()
    ]
    models = [TimedModel("opt-6.7b", False, rows, MACHINE)]
    found = goal(report(timed_models=models), "4-bit full cache")
    assert found["met"] is None
    assert "four-bit-memory: no room" in found["row"]


def test_a_cache_of_few_bits_is_compared_where_it_was_timed():
    # The KL of .004 takes 4 bits.
    drive = {"four-bit-drive": 700.0, "five-bit-drive": 100.0}
    rows = [
        *timed(),
        *(TimedRow(measured_row(name, ms, model="opt-6.7b"), "bits") for name, ms in drive.items()),
    ]
    made = report(timed_models=[TimedModel("opt-6.7b", False, rows, MACHINE)])
    assert made["equal_quality"]["four-bit"] == pytest.approx(7.0)
    assert made["equal_quality_from"]["four-bit"]["source"] == f"{rows[0].row.selection}, opt-6.7b"


def test_other_kls_have_times_and_ratios_of_their_own_and_judge_nothing():
    own = [
        TimedModel("real", True, timed("real"), replace(MACHINE, model="real")),
        TimedModel("opt-6.7b", False, timed(), MACHINE),
    ]
    slower = timed("real", **{"hillinfer-coded": 500.0})
    at = TimedModel("real", True, slower, replace(MACHINE, model="real"), 0.01)
    made, alone = report(timed_models=[*own, at]), report(timed_models=own)
    ratios = made["equal_quality_at"]
    assert list(ratios) == ["0.01"]
    assert ratios["0.01"]["real"]["full-drive"]["value"] == pytest.approx(2.0)
    assert alone["equal_quality_at"] == {}
    assert (made["goals"], made["equal_quality"]) == (alone["goals"], alone["equal_quality"])
    # Whichever was timed first.
    assert report(timed_models=[at, *own])["goals"] == alone["goals"]
    kls = [row["at_kl"] for row in made["times"]]
    assert kls == [pytest.approx(0.004)] * (len(kls) - len(slower)) + [0.01] * len(slower)
    text = report_text(made)
    assert "Times at a KL of 0.004:" in text
    assert "Times at a KL of 0.01:" in text
    assert "Times at a KL of 0.01:" not in report_text(alone)


def test_a_picture_marks_each_kl_and_few_bits_at_their_own():
    drive = [TimedRow(measured_row("four-bit-drive", 700.0, model="opt-6.7b"), "4 bits")]
    own = TimedModel("opt-6.7b", False, [*timed(), *drive], MACHINE)
    at = TimedModel("opt-6.7b", False, timed(), MACHINE, 0.01)
    figure = frontier_figure(report(timed_models=[own, at]))
    marks = {
        (float(line.get_xdata()[0]), round(float(line.get_ydata()[0]), 6))
        for line in figure.axes[1].lines
        if len(line.get_xdata()) == 1 and line.get_marker() != "None"
    }
    assert {(100.0, 0.004), (100.0, 0.01), (300.0, 0.004), (300.0, 0.01)} <= marks
    # 4 bits have a KL of .003, whatever is asked for.
    assert {(700.0, 0.003), (80.0, 0.003)} <= marks
    assert (700.0, 0.004) not in marks


def test_what_lies_in_memory_has_turns_of_its_own():
    names = ("hillinfer-coded", "five-bit-drive", "full-memory", "five-bit-memory")
    # A paper's shape has no room for all of them at once.
    assert parts_of((*names, "four-bit-memory", ALL_CODED)) == {
        "": ("hillinfer-coded",),
        "beside five-bit-drive": ("hillinfer-coded", "five-bit-drive"),
        "in memory": ("full-memory", "four-bit-memory"),
        "in memory, coded": ("five-bit-memory", ALL_CODED),
    }
    assert list(parts_of(("full-memory", "hillinfer-coded"))) == ["", "in memory"]


def test_rivals_on_the_drive_take_turns_with_hillinfer_two_at_a_time():
    rivals = ("h2o-all-keys", "infinigen", "leoam")
    assert parts_of((*rivals, "hillinfer-coded", "full-drive", "full-memory")) == {
        "": ("hillinfer-coded", "full-drive"),
        "beside h2o-all-keys and infinigen": ("hillinfer-coded", *rivals[:2]),
        "beside leoam": ("hillinfer-coded", "leoam"),
        "in memory": ("full-memory",),
    }


def test_a_rival_is_compared_with_the_row_of_its_own_turns():
    turns = [
        TimedRow(measured_row(name, ms, model="opt-6.7b", part="beside quest"), "some setting")
        for name, ms in (("floor", 60.0), ("hillinfer-coded", 120.0), ("quest", 600.0))
    ]
    rows = [one for one in timed() if one.row.system != "quest"]
    models = [TimedModel("opt-6.7b", False, [*rows, *turns], MACHINE)]
    made = report(timed_models=models)
    assert made["equal_quality"]["quest"] == pytest.approx(5.0)
    # Those of other turns keep theirs.
    assert made["equal_quality"]["full-drive"] == pytest.approx(10.0)
    # The twin: without such a row it is the first one's.
    alone = [TimedModel("opt-6.7b", False, [*rows, turns[0], turns[2]], MACHINE)]
    assert report(timed_models=alone)["equal_quality"]["quest"] == pytest.approx(6.0)
    assert "| opt-6.7b | quest, beside quest |" in report_text(made)


def test_no_sweep_of_the_default_leaves_the_told_kls():
    rows = [row for row in swept() if row.setting.system.name != "hillinfer-coded"]
    made = report(rows, [])
    assert [one["kl"] for one in made["settings"]] == [0.01, 0.003]
    assert made["kl_share_of_exact_alpha_01"] is None


def test_the_tables_have_every_system_and_goal():
    made = report()
    text = report_text(made)
    for name in (*KLS, *MS):
        assert f" {name} |" in text or f" {name}, in memory |" in text
    # Infinigen's row allows three times and no more, and that is what was reached.
    assert "- limit reached: speed over infinigen" in text
    assert "bytes and rates allow 3, which forbids the goal, and 100% of it is reached" in text
    assert "- missed: drive bytes of a step" in text
    assert "- met: speed over full-drive" in text
    assert "| leoam | not reached by any setting: 0.9 has a KL of 0.005 | | |" in text


def test_the_table_of_times_has_m0_and_what_a_process_grew_beyond_it():
    mib = 1 << 20
    grown = {"": 50 * mib, IN_MEMORY: 90 * mib}
    rows = [
        replace(
            one,
            row=replace(
                one.row, budget_bytes=46 * mib, held_bytes=45 * mib, rss_bytes=grown[one.row.part]
            ),
        )
        for one in timed()
    ]
    rows.append(replace(rows[0], row=replace(rows[0].row, system="leoam", median_ms=None)))
    text = report_text(report(timed_models=[TimedModel("opt-6.7b", False, rows, MACHINE)]))
    table = [line for line in text.splitlines() if line.startswith(("| opt-6.7b ", "| model "))]
    cells = {
        tuple(line.split(" | "))[1].removesuffix(", in memory"): line.strip("| ").split(" | ")
        for line in reversed(table)
    }
    assert cells["system"][6:9] == ["M0", "counted", "beyond M0"]
    assert cells["hillinfer-coded"][6:9] == ["46.0 MiB", "45.0 MiB", "4.0 MiB"]
    # M0 does not bound what has no drive.
    assert cells["full-memory"][6:9] == ["", "45.0 MiB", "90.0 MiB in all"]
    assert cells["floor"][6] == ""
    assert len({line.count("|") for line in table}) == 1
    # The twin: who stays within M0 grew by nothing beyond it.
    within = [replace(one, row=replace(one.row, rss_bytes=46 * mib)) for one in rows]
    text = report_text(report(timed_models=[TimedModel("opt-6.7b", False, within, MACHINE)]))
    assert "| 46.0 MiB | 45.0 MiB | 0 B |" in text
