# SPDX-License-Identifier: Apache-2.0
"""The study of many documents in little memory: small, whole, and with what its goals name."""

import json
import signal
import threading
from contextlib import contextmanager
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from waiting import until

from hillinfer.catalogue.measuring import ProbeWishes
from hillinfer.catalogue.records import RestingTimes
from hillinfer.errors import SettingsError
from hillinfer.models.loader import load_model
from hillinfer.placement.policies import LeastRecentlyUsed
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.store.store import Store
from hillinfer_bench.evicpress import topics
from hillinfer_bench.evicpress.comparing import GOALS, compared
from hillinfer_bench.evicpress.harness import Harness
from hillinfer_bench.evicpress.notes import Notes
from hillinfer_bench.evicpress.played import ENGINE, Played, first_tokens_at, rate_curve
from hillinfer_bench.evicpress.plays import AllFitsPlay, PlacedPlay, Play, play_together
from hillinfer_bench.evicpress.rivals import SERVED, Rival, lru, rivals
from hillinfer_bench.evicpress.run import EvicPressRequest
from hillinfer_bench.evicpress.served import ServedDocuments
from hillinfer_bench.evicpress.sized import (
    SHADOWED,
    SizedStudy,
    shadowed_quality,
    sized_rivals,
)
from hillinfer_bench.evicpress.workload import Asked, WorkloadSize, mooncake_workload
from hillinfer_bench.figures.evicpress_figure import StudyRecordError, read_rivals

KEYS = {*GOALS, "kills", "wrong_tokens"}


def test_what_is_no_report_is_not_drawn(tmp_path):
    file = tmp_path / "report.json"
    row = {"rival": "one", "first_token_p50": 1.0, "agreement": 1.0, "rate_curve": [[1, 2]]}
    file.write_text(json.dumps({"rows": [row]}))
    assert read_rivals(file)[0].curve == ((1.0, 2.0),)
    for changes in ({"rate_curve": [[1]]}, {"agreement": -1}, {"first_token_p50": "1"}):
        file.write_text(json.dumps({"rows": [row | changes]}))
        with pytest.raises(StudyRecordError, match="is not of hillinfer-bench evicpress"):
            read_rivals(file)
    with pytest.raises(StudyRecordError, match="cannot read"):
        read_rivals(tmp_path / "none")


@contextmanager
def interrupted_at(file, part):
    """Send an interrupt to the main thread once a file tells that a part is done."""

    ended = threading.Event()

    def interrupt():
        until(lambda: ended.is_set() or f'"part": "{part}"' in notes(), 300)
        if not ended.is_set():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def notes():
        return file.read_text() if file.exists() else ""

    # Whoever started the tests in the background ignores interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    watching = threading.Thread(target=interrupt)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()
        signal.signal(signal.SIGINT, before)


def test_a_small_study_plays_every_rival_within_the_budget(command, tiny_folder, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install 'hillinfer[figures]'")
    out = tmp_path / "evicpress.json"
    arguments = (
        *("evicpress", "--model", tiny_folder, "--dir", tmp_path, "--documents", 2),
        *("--requests", 6, "--shortest", 128, "--longest", 192, "--budget", 0.4, "--alpha", 1),
        *("--probes", 1, "--questions", 1, "--kills", 2, "--topic-questions", 0, "--out", out),
        *("--instances", 2),
        *("--picture", tmp_path / "evicpress.svg", "--sized", 1, "--sized-alpha", 0.1),
    )
    notes = tmp_path / "evicpress" / "notes.jsonl"
    # It breaks off in its middle, and goes on where it was.
    with interrupted_at(notes, "rivals"):
        assert command(*arguments).code == 130
    noted = {one.get("part"): one.get("found") for one in map(json.loads, notes.open())}
    assert not out.exists()
    outcome = command(*arguments)
    assert outcome.code == 0, outcome.err
    report = json.loads(out.read_text())
    # Nothing was read, measured or played anew: no time is the same twice.
    for number, document in enumerate(report["documents"]):
        assert document["prefill_seconds"] == noted[f"prefill {number}"]
        assert document["whole_profile"] == noted[f"whole profile {number}"]
        assert document["usual_profile"] == noted[f"usual profile {number}"]
    assert report["figures"].keys() >= KEYS
    assert (report["figures"]["kills"], report["figures"]["wrong_tokens"]) == (2, 0)
    rows = {row["rival"]: row for row in report["rows"]}
    for name in (one.name for one in rivals((1.0,))):
        played = Played(**noted["rivals"][name]).figures()
        assert rows[name]["first_token_p50"] == played["first_token_p50"]
    # What the engine's buffers take is more than the budget of so few tokens.
    assert rows.keys() == {one.name for one in rivals((1.0,))} | {"all held, nobody"}
    assert list(report["left_out"]) == ["ours served"]
    assert (report["sittings"], "timed in 2 sittings" in outcome.out) == (2, True)
    assert rows["all held, nobody"]["forms"] == {"held": 6}
    assert rows.pop("all held, nobody")["dram_peak_bytes"] == report["all_bytes"]
    for name, row in rows.items():
        assert row["dram_peak_bytes"] <= report["budget_bytes"] < report["all_bytes"], name
        assert sum(row["forms"].values()) == 6
        assert 0 < row["first_token_p50"] <= row["first_token_p95"]
    assert rows["recompute"]["forms"] == {"text": 6}
    assert rows["recompute"]["agreement"] == rows["held + LRU"]["agreement"] == 1.0
    assert rows["held + LRU"]["read_bytes"] > 0 == rows["recompute"]["read_bytes"]
    assert rows["int4 + LRU"]["forms"].keys() <= {"rows", "int4"}
    assert rows["int4 + LRU"]["moves"] > 0
    assert rows["IMPRESS-like, 0.5"]["read_bytes"] > 0
    assert rows["IMPRESS-like, 0.5"]["forms"] == {"important-0.5": 6}
    for row in rows.values():
        rates, seconds = zip(*row["rate_curve"], strict=True)
        assert list(rates) == sorted(rates)
        assert min(seconds) >= row["first_token_p50"] * 0.99
    sized = report["sized"]
    assert sized["all_bytes"] == 131072 * sum(one["tokens"] for one in report["documents"])
    for row in sized["rows"]:
        assert row["dram_peak_bytes"] <= sized["budget_bytes"], row
        assert row["first_token_p50"] > 0
    assert min(sized["bytes_a_second"].values()) > 0
    assert sized["figures"]["ttft_vs_lru_p50"] > 0
    assert sized["figures"]["ours"].startswith("ours, α 0.1")
    assert sized["figures"]["ttft_vs_lru_p50_possible"] > 0
    drawn = ElementTree.parse(tmp_path / "evicpress.svg").getroot()
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    (lru,) = (one for one in read_rivals(out) if one.name == "held + LRU")
    assert (lru.agreement, len(lru.curve)) == (1.0, 9)
    assert not (tmp_path / "evicpress").exists()
    figures = report["figures"]
    for name in ("ttft_vs_lru_p50", "ttft_vs_lru_p95", "ttft_vs_paper_policy"):
        possible = figures[f"{name}_possible"]
        assert figures[f"{name}_of_possible"] == pytest.approx(figures[name] / possible)
    assert 0.98 <= figures["placement_share_of_optimum"] <= figures["placement_mean_share"] <= 1.001
    assert report["goals"]["ttft_vs_lru_p50"]["possible"] == figures["ttft_vs_lru_p50_possible"]
    for name in ("share_of_optimum", "ttft_vs_int8_lru"):
        assert f"{name}: " in outcome.out


def timed_alike(stored, resting):
    """Return a document whose forms take fixed times, so that no clock says where it is placed."""
    forms = [replace(one, opening_seconds=0.01, token_seconds=0.01) for one in stored.usual.forms]
    return replace(stored, usual=replace(stored.usual, resting=resting, forms=tuple(forms)))


def test_a_server_plays_and_its_engine_has_a_place_among_larger_files(tiny_folder, tmp_path):
    loaded = load_model(str(tiny_folder), say=lambda line: None)
    workload = mooncake_workload(loaded.tokenizer, WorkloadSize(2, 5, 128, 192))
    notes = Notes(tmp_path, {"a": 1})
    Store.create(tmp_path / "store", 64 << 20)
    with Store(tmp_path / "store") as store:
        # More than all rows, because buffers of an engine are more than so few rows.
        prompts = StoredPrompts(store, loaded.model)
        study = Harness(loaded.model, prompts, workload, 40.0, notes)
        for seed in range(2):
            stored = study.store(ProbeWishes(1, 1, seed=seed))
            study.stored[-1] = timed_alike(stored, RestingTimes(text=1.0, rows=0.1, token=0.01))
        server = ServedDocuments(loaded, store, study, tmp_path)
        assert server.budget > study.budget
        served, beside = server.play(SERVED, lru("held"))
        assert len(served.first_tokens) == len(served.agreements) == 5
        named = {"rows", "held", "int8", "mixed4", "shadow-int4", "lead-0.1"}
        assert {*served.forms} <= named
        # The documents were there before anybody asked.
        assert served.forms[0] not in {"rows", ENGINE}
        assert served.moves > 0
        assert 0 < served.dram_peak <= server.budget
        assert beside.forms == ["held"] * 5
        # The twin: where a document is computed anew sooner than read, the engine answers.
        study.stored[:] = [
            timed_alike(one, RestingTimes(text=1e-6, rows=0.1, token=0.01)) for one in study.stored
        ]
        anew, _ = server.play(SERVED, lru("held"))
        assert anew.forms == [ENGINE] * 5
        assert shadowed_quality({"ours, α 1": served}) is None
        assert shadowed_quality({"ours served": replace(served, forms=[ENGINE] * 5)}) <= 1.0
        names = [one.name for one in sized_rivals((1.0,))]
        assert names[0] == "held + LRU"
        assert names[-3:] == ["ours, α 1", "optimum, α 1", "ours, α 1, shadows"]
        shadows = Rival("shadows", (SHADOWED,), lambda: LeastRecentlyUsed(SHADOWED))
        for quality, forms in ((None, []), (0.75, [SHADOWED])):
            larger = SizedStudy(study, 4, 0.5, quality, tmp_path)
            try:
                assert larger.forms_of(shadows) == forms
                if forms:
                    found = larger.play([shadows])[shadows]
                    assert {*found.forms} <= {"rows", SHADOWED}
                    assert SHADOWED in found.forms
                    kept = [0.75 if one == SHADOWED else 1.0 for one in found.forms]
                    assert found.agreements == kept
                    assert found.figures()["token_p50"] is None
                    assert 0 < found.dram_peak <= larger.budget
            finally:
                larger.files.close()


def test_a_profile_follows_users_to_another_topic(tiny_folder, capsys):
    asked = ["--model", str(tiny_folder), "--tokens", "512", "--questions", "6", "--judge", "3"]
    assert topics.main([*asked, "--forms", "held", "int8", "knorm-0.2", "--floor", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    before, _, fresh = found["topic_switch_forms"]
    assert before == fresh == "knorm-0.2"
    own, best = found["topic_switch_agreements"][1:]
    assert found["topic_switch_points"] == pytest.approx(100 * (best - own))
    # The twin: where all is to be kept, nothing slips.
    assert topics.main([*asked, "--forms", "held", "knorm-0.2", "--floor", "1"]) == 0
    exact = json.loads(capsys.readouterr().out)
    assert exact["topic_switch_forms"] == ["held"] * 3
    assert (exact["topic_switch_points"], exact["topic_switch_renewals"]) == (0.0, 0)


def test_notes_go_on_behind_a_torn_line_and_forget_no_folder_of_others(tmp_path):
    def noted(notes, name, found):
        return notes.part(name, lambda: found, lambda one: one, lambda one: one)

    notes = Notes(tmp_path, {"a": 1})
    assert (noted(notes, "one", 1), notes.sittings) == (1, 1)
    file = notes.folder / "notes.jsonl"
    file.write_text(file.read_text() + '{"part": "two", "fou')
    again = Notes(tmp_path, {"a": 1})
    assert [noted(again, "one", 5), noted(again, "two", 2), again.sittings] == [1, 2, 2]
    third = Notes(tmp_path, {"a": 1})
    assert [noted(third, "two", 5), third.sittings] == [2, 3]
    # Another study begins anew.
    assert noted(Notes(tmp_path, {"a": 2}), "one", 7) == 7
    for text in (None, "", "[1]\n", '{"a": 2}\n', "no json\n"):
        other = tmp_path / f"other{text}".replace("\n", "")
        (other / "evicpress").mkdir(parents=True)
        if text is not None:
            (other / "evicpress" / "notes.jsonl").write_text(text)
        with pytest.raises(SettingsError, match="its folder evicpress is not of a study"):
            Notes(other, {"a": 1})
        assert (other / "evicpress").exists()


def test_who_waits_waits_for_those_before():
    # The second comes while the first is answered, the third when all is done.
    assert first_tokens_at([0.0, 1.0, 10.0], [0.5, 0.5, 0.5], [2.0, 2.0, 2.0]) == [0.5, 1.5, 0.5]
    curve = rate_curve([5.0, 6.0, 7.0, 8.0], [1.0] * 4, [1.0] * 4)
    assert [round(rate, 6) for rate, _ in curve] == [round(n / 10, 6) for n in range(1, 10)]
    # Arrivals in even steps never wait below the rate that one answers at.
    assert {seconds for _, seconds in curve[:6]} == {1.0}


def test_identities_come_back_in_the_order_of_the_trace(tiny_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    size = WorkloadSize(5, 40, 128, 512)
    workload = mooncake_workload(tokenizer, size)
    assert len(workload.documents) == 5
    assert all(128 <= len(one.ids) <= 512 and not len(one.ids) % 64 for one in workload.documents)
    times = [one.time for one in workload.requests]
    assert times == sorted(times)
    assert {one.document for one in workload.requests} <= set(range(5))
    assert len(workload.requests) > len({one.document for one in workload.requests})
    assert workload == mooncake_workload(tokenizer, size)
    # The twin: other identities with another seed.
    assert (
        workload.requests != mooncake_workload(tokenizer, WorkloadSize(5, 40, 128, 512, 1)).requests
    )
    with pytest.raises(SettingsError, match="documents=100000: the trace has"):
        mooncake_workload(tokenizer, WorkloadSize(100000))


class Told(Play):
    """Tells a list what is asked of it."""

    def __init__(self, name, told):
        self.name, self.told = name, told

    def begin(self, now):
        self.told.append((self.name, "begin", now))

    def ask(self, asked):
        self.told.append((self.name, "ask", asked.document))

    def settle(self, asked):
        self.told.append((self.name, "settle", asked.document))

    def finish(self):
        self.told.append((self.name, "finish"))


def test_every_rival_answers_a_request_before_the_next_one_comes():
    told = []
    requests = [Asked(float(number), number) for number in range(8)]
    play_together([Told(name, told) for name in "abc"], requests)
    assert told[:3] == [(name, "begin", 0.0) for name in "abc"]
    assert told[-3:] == [(name, "finish") for name in "abc"]
    firsts = set()
    for number in range(8):
        answers, moves = told[3 + 6 * number :][:3], told[6 + 6 * number :][:3]
        assert sorted(answers) == [(name, "ask", number) for name in "abc"]
        # Nobody's forms move while others answer.
        assert sorted(moves) == [(name, "settle", number) for name in "abc"]
        firsts.add(answers[0][0])
    # Nobody is always first.
    assert len(firsts) > 1


def test_documents_are_placed_before_anybody_asks(tiny_folder, tmp_path):
    loaded = load_model(str(tiny_folder), say=lambda line: None)
    workload = mooncake_workload(loaded.tokenizer, WorkloadSize(2, 4, 128, 192))
    notes = Notes(tmp_path, {"a": 1})
    Store.create(tmp_path / "store", 64 << 20)
    with Store(tmp_path / "store") as store:
        prompts = StoredPrompts(store, loaded.model)
        study = Harness(loaded.model, prompts, workload, 0.6, notes)
        for seed in range(2):
            study.store(ProbeWishes(1, 1, seed=seed))
        every = {one.name: one for one in rivals((1.0,))}
        wanted = [lru("held"), every["paper, α 1"], every["ours, α 1"], every["optimum, α 1"]]
        plays = [PlacedPlay(study, one) for one in wanted]
        fits = AllFitsPlay(study)
        play_together([*plays, fits], workload.requests)
    assert fits.played.forms == fits.managed.forms == ["held"] * 4
    for rival, play in zip(wanted, plays, strict=True):
        # There is room for one of the two before the first request.
        assert 0 < play.played.dram_peak <= study.budget, rival.name
        assert play.played.moves > 0
        whole = {
            (one.form, one.tier): (one.quality, one.first_token)
            for number in study.numbers
            for one in study.known_options(number, "rows")
            if number == play.played.documents[0]
        }
        assert play.played.expected[0] in whole.values()
    first = plays[0].played
    assert "held" in first.forms
    # The last one that was stored is the one that was used last.
    assert (first.forms[0] == "held") == (first.documents[0] == 1)


def played(first_token, agreement):
    expected = [(agreement, first_token)] * 4
    forms = ["held"] * 4
    return Played(
        [first_token] * 4, [0.1] * 4, [agreement] * 4, [0, 1, 2, 3], forms, expected=expected
    )


def test_figures_are_of_the_soonest_that_agrees_enough():
    found = {}
    for rival in rivals((0.3, 3.0, 9.0)):
        found[rival] = played(1.0, 1.0)
        if rival.name == "ours, α 0.3":
            found[rival] = played(0.1, 0.9)
        elif rival.name == "ours, α 3":
            found[rival] = played(0.25, 0.98)
        elif rival.name == "ours, α 9":
            found[rival] = played(0.5, 0.99)
        elif rival.name == "int8 + LRU":
            found[rival] = played(0.5, 1.0)
        elif rival.name == "int4 + LRU":
            found[rival] = played(0.4, 0.97)
        elif rival.name == "optimum, α 3":
            found[rival] = played(0.2, 1.0)
        elif rival.name == "recompute":
            found[rival] = played(4.0, 1.0)
    figures = compared(found, played(0.125, 1.0))
    assert figures["ours"] == "ours, α 3"
    assert figures["ttft_vs_lru_p50"] == figures["ttft_vs_lru_p95"] == 4.0
    assert figures["ttft_vs_int8_lru"] == 2.0
    assert figures["worst_tenth_agreement"] == 0.98
    gained, possible = 3 * 0.98 - 0.25 + 1.0, 3 - 0.2 + 1.0
    assert figures["share_of_optimum"] == pytest.approx(gained / possible)
    # At 0.99 another one counts.
    assert (figures["ours_at_99"], figures["ttft_vs_int4_lru_at_99"]) == ("ours, α 9", 0.8)
    # Who has all in memory takes half as long as ours.
    assert figures["ttft_vs_lru_p50_possible"] == 8.0
    assert figures["ttft_vs_lru_p50_of_possible"] == 0.5
    # What is timed changes nothing of what was expected.
    ours = next(rival for rival in found if rival.name == "ours, α 3")
    found[ours] = replace(found[ours], first_tokens=[0.2] * 4)
    again = compared(found, played(0.125, 1.0))
    assert again["share_of_optimum"] == figures["share_of_optimum"]
    assert again["timed_share_of_optimum"] > figures["timed_share_of_optimum"]
    # Where none agrees enough, the one that agrees most.
    for rival in found:
        if rival.name.startswith("ours, α"):
            found[rival] = played(0.1, 0.5 + rival.alpha / 100)
    least = compared(found, played(0.125, 1.0))
    assert (least["ours"], least["ours_at_99"]) == ("ours, α 9", None)
    assert least["ttft_vs_int4_lru_at_99"] is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budget_part": 0.0}, "budget=0.0 is no share"),
        ({"alphas": (-1.0,)}, "must be one number of seconds"),
        ({"kills": -1}, "kills=-1, sized=2, topic-questions=20, instances=1000: give 1 or"),
        ({"sized_alphas": ()}, "must be one number of seconds"),
    ],
)
def test_requests_that_mean_nothing_are_refused(changes, said, tmp_path):
    with pytest.raises(SettingsError, match=said):
        EvicPressRequest("m", tmp_path, tmp_path / "out", WorkloadSize(), **changes)
    for size in ({"documents": 0}, {"shortest": 10}, {"shortest": 900, "longest": 800}):
        with pytest.raises(SettingsError):
            WorkloadSize(**size)
