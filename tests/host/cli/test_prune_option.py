# SPDX-License-Identifier: Apache-2.0
"""`hillinfer generate --prune`: deeper layers see fewer tokens of the prompt."""

import json
import re
import subprocess
from xml.etree import ElementTree

import pytest
from command import CHAT, PLAIN, read_report

from hillinfer.models.loader import load_model
from hillinfer.pruning.profile import found_schedule, keep_evidence
from hillinfer_bench.figures.prune_figure import read_seen_blocks

QUESTIONS = ("--question", "which cat sat?", "--question", "and which mat?")


@pytest.fixture
def long_text(tmp_path):
    document = tmp_path / "long.txt"
    document.write_text("".join(f"cat {i} sat on mat {i * 7 % 61}. " for i in range(60)))
    return document


@pytest.fixture
def generate(command, tiny_folder, cold_dir, long_text, tmp_path, monkeypatch):
    """Run the command and return its outcome and report; `code` is what is expected."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments, code=0):
        report = tmp_path / "run.json"
        report.unlink(missing_ok=True)
        outcome = command(
            *("generate", "--model", tiny_folder, "--cold-dir", cold_dir, "--report", report),
            *("--max-new-tokens", 6, "--prefill-chunk", 200, "--prompt-file", long_text),
            *(*PLAIN, *arguments),
        )
        assert outcome.code == code, outcome.err
        return outcome, read_report(report) if report.exists() else None

    return run


def test_each_question_chooses_its_blocks(generate):
    _, report = generate(*QUESTIONS, "--prune", "1:25%")
    tokens = report["document_tokens"]
    for answer in report["answers"]:
        read, whole = answer["pruned"], tokens + answer["question_tokens"]
        blocks = -(-whole // 64)
        assert read["schedule"] == "1:25%"
        assert read["tokens"][0] == whole
        assert [len(one) for one in read["kept"]] == [max(1, round(blocks / 4))]
        assert read["tokens"][1] == 64 * (len(read["kept"][0]) - 1) + (whole - 1) % 64 + 1
        # The first block, the last one and whatever the question reaches stay.
        assert {0, blocks - 1} <= set(read["kept"][0])
        assert read["boundary_bytes"] > whole
        assert read["choosing_seconds"] + read["deep_seconds"] <= answer["question_seconds"]
        # One stage behind one cut.
        assert read["band_seconds"] == [read["deep_seconds"]]
    assert report["settings"]["prune"] == "1:25%"
    outcome, alone = generate(*QUESTIONS[2:], "--prune", "1:25%")
    # On a fork as by itself.
    assert alone["answers"][0]["token_ids"] == report["answers"][1]["token_ids"]
    assert alone["answers"][0]["pruned"]["kept"] == report["answers"][1]["pruned"]["kept"]
    said = " ".join(outcome.err.split())
    assert f"1:25%: layers saw {alone['prompt_tokens']} tokens" in said
    assert "of the FLOPs were saved" in said
    _, plain = generate(*QUESTIONS)
    assert plain["kv_bytes"] > report["kv_bytes"]
    assert all(answer["pruned"] is None for answer in plain["answers"])
    assert plain["settings"]["prune"] is None


def shown(outcome):
    """Return what progress said: stage, tokens, of how many, tokens/s."""
    line = re.compile(r"^(prefill|layers 1 to 1|decode): (\d+)/(\d+) tokens, ([\d.]+) tokens/s$")
    found = [line.match(one) for one in outcome.err.splitlines()]
    return [(one[1], int(one[2]), int(one[3]), float(one[4])) for one in found if one]


def test_progress_has_a_stage_of_deeper_layers_before_decoding(generate):
    # With a chat all tokens of both answers come.
    outcome, report = generate(*QUESTIONS, *CHAT, "--prune", "1:25%")
    assert "layers from 1 on read it with each question" in outcome.err
    stages = [(name, total) for name, done, total, _ in shown(outcome) if done == total]
    document, deeper = (
        report["document_tokens"],
        [answer["pruned"]["tokens"][1] for answer in report["answers"]],
    )
    expected = [("prefill", document)]
    for tokens in deeper:
        expected += [("layers 1 to 1", tokens), ("decode", 6)]
    assert stages == expected
    # Chunk by chunk.
    assert ("layers 1 to 1", 200, deeper[0]) in [one[:3] for one in shown(outcome)]
    # The first token comes out of reading, and no reading counts in the rate of the others.
    decoding = [one for one in shown(outcome) if one[0] == "decode"]
    assert [one[3] for one in decoding if one[1] == 1] == [0.0, 0.0]
    for one, answer in zip(
        [one for one in decoding if one[1] == 6], report["answers"], strict=True
    ):
        assert 5 / one[3] < answer["decode_seconds"] + answer["question_seconds"] / 2
    outcome, _ = generate(*QUESTIONS)
    assert "layers" not in outcome.err
    assert {one[0] for one in shown(outcome)} == {"prefill", "decode"}


def test_a_prompt_is_read_where_its_deeper_layers_are(generate):
    """Without a question nothing waits, and prefill ends behind the last layer."""
    outcome, report = generate("--prune", "1:25%")
    assert "on read it with each question" not in outcome.err
    *before, deep, prefill = [one[:3] for one in shown(outcome) if one[0] != "decode"]
    tokens = report["answers"][0]["pruned"]["tokens"][1]
    assert deep == ("layers 1 to 1", tokens, tokens)
    assert prefill == ("prefill", report["document_tokens"], report["document_tokens"])
    assert all(done < total for name, done, total in before)


def test_a_prompt_without_questions_chooses_at_its_end(generate):
    _, report = generate("--prune", "1:25%", "--prune-ranker", "recent")
    read = report["answers"][0]["pruned"]
    blocks = -(-report["document_tokens"] // 64)
    count = max(1, round(blocks / 4))
    # The first block counts as one of them.
    assert read["kept"][0] == [0, *range(blocks - count + 1, blocks)]
    _, compared = generate("--prune", "1:25%", "--compare", "full")
    # The ordinary cache reads all of it.
    _, plain = generate("--alpha", 1.0)
    assert compared["comparison"]["texts"] == [plain["answers"][0]["text"]]


def test_a_question_keeps_as_much_as_its_weights_say(generate):
    _, report = generate(*QUESTIONS, "--prune", "1:mass=60%")
    for answer in report["answers"]:
        read = answer["pruned"]
        blocks = -(-read["tokens"][0] // 64)
        assert read["schedule"] == "1:mass=60%"
        assert 2 < len(read["kept"][0]) < blocks
        assert read["flop_limit"] > 1


def test_auto_takes_what_was_found_of_these_weights_and_nothing_else(generate, tiny_folder):
    outcome, report = generate("--prune", "auto")
    assert "nothing is pruned: run hillinfer prune-profile" in " ".join(outcome.err.split())
    assert report["answers"][0]["pruned"] is None
    model = load_model(str(tiny_folder)).model
    file = keep_evidence(model, {"schedule": "1:50%", "ranker": "paper"})
    assert file.stat().st_mode & 0o777 == 0o600
    outcome, report = generate("--prune", "auto")
    assert "prune: 1:50%, as prune-profile found (paper)" in outcome.err
    assert report["answers"][0]["pruned"]["schedule"] == "1:50%"
    # What another rule does not find takes nothing from it.
    keep_evidence(model, {"schedule": None, "ranker": "recent"})
    assert found_schedule(model) == ("1:50%", "paper")
    for wrong in (
        '{"schedule": 5, "ranker": "paper"}',
        '{"schedule": null}',
        "[",
        '{"a": 1}',
        '{"schedule": "x", "ranker": "paper"}',
    ):
        file.write_text(wrong)
        assert found_schedule(model) is None
    _, report = generate("--prune", "auto")
    assert report["answers"][0]["pruned"] is None
    model.get_decoder().layers[0].mlp.up_proj.weight.data[0, 0] += 1
    # Other weights have no evidence of these.
    other = keep_evidence(model, {"schedule": "1:25%", "ranker": "weights"})
    assert other != file


def test_what_a_profile_finds_is_kept(command, tiny_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    outcome = command("prune-profile", tiny_folder, "--documents", 1, "--tokens", 600)
    assert outcome.code == 0, outcome.err
    (file,) = (tmp_path / "cache" / "hillinfer" / "schedules").iterdir()
    assert json.loads(file.read_text())["schedule"] is None


def test_documents_that_a_model_has_no_positions_for_are_refused(command, tiny_folder):
    told = command("prune-profile", tiny_folder, "--documents", 1, "--tokens", 4090).error_line()
    assert "and the model 4096 positions: lower --tokens" in told


def test_a_picture_of_what_layers_saw(generate, command, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install 'hillinfer[figures]'")
    _, report = generate(*QUESTIONS, "--prune", "1:25%")
    run, out = tmp_path / "run.json", tmp_path / "kept.svg"
    drawn = command("prune-picture", run, "--out", out)
    assert drawn.code == 0, drawn.err
    assert ElementTree.parse(out).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert "layers 0 to 0 saw 100% of it" in drawn.out
    for one, answer in zip(read_seen_blocks(run), report["answers"], strict=True):
        blocks = -(-answer["pruned"]["tokens"][0] // 64)
        assert one.seen[0].tolist() == [True] * blocks
        assert one.seen[1].nonzero()[0].tolist() == answer["pruned"]["kept"][0]
    report["answers"][0]["pruned"]["kept"] = [[10**6]]
    for said in (json.dumps(report), "[]", '{"answers": 3}', '{"answers": [{"pruned": {}}]}'):
        run.write_text(said)
        assert "is no report of hillinfer generate" in command("prune-picture", run).error_line()
    run.write_text('{"answers": [{"pruned": null}]}')
    assert "is of a run that pruned nothing" in command("prune-picture", run).error_line()


@pytest.mark.parametrize("asked", [QUESTIONS[2:], ()])
def test_what_is_kept_is_read_whole_behind_the_answer(asked, generate, tmp_path):
    """A session and a store have what they would have of a document that was read whole at once."""
    # A session has codes of four bits, where less memory may take fewer.
    cut = ("--prune", "1:25%", "--shadow", "int4")
    stored = ("--store", tmp_path / "store", "--store-size", "64MiB", *cut[2:])
    pruned = (*cut, "--save-session", tmp_path / "s", *stored)
    outcome, report = generate(*asked, *pruned)
    tokens = report["document_tokens"]
    (answer,) = report["answers"] or [None]
    if asked:
        assert answer["pruned"]["tokens"][1] < tokens
        assert answer["token_ids"] == generate(*asked, *cut)[1]["answers"][0]["token_ids"]
    assert (report["completion"]["done"], report["completion"]["tokens"]) == (tokens, tokens)
    assert report["store"]["found_tokens"] == 0
    assert report["store"]["stored_tokens"] == tokens // 64 * 64
    assert "tokens in every layer" in outcome.err
    assert report["session"]["saved_bytes"] > 0
    _, plain = generate(*QUESTIONS[2:], *cut[2:])
    for again in (("--session", tmp_path / "s"), stored):
        # All of it is there, so nothing is left out of it.
        _, found = generate(*QUESTIONS[2:], *again, *(() if "--session" in again else pruned[:2]))
        assert found["answers"][0]["pruned"] is None
        assert found["answers"][0]["token_ids"] == plain["answers"][0]["token_ids"]
        assert found["completion"] is None
    assert found["store"]["found_tokens"] == tokens // 64 * 64


def test_what_a_store_lacks_of_a_document_is_read_in_stages(generate, long_text, tmp_path):
    stored = ("--store", tmp_path / "store", "--store-size", "64MiB")
    _, first = generate(*QUESTIONS[2:], *stored)
    longer = tmp_path / "longer.txt"
    longer.write_text(long_text.read_text() + "".join(f"dog {i} ran. " for i in range(90)))
    given = (*QUESTIONS[2:], *stored, "--prompt-file", longer)
    outcome, report = generate(*given, "--prune", "1:25%")
    found = report["store"]["found_tokens"]
    assert found == first["document_tokens"] // 64 * 64
    read = report["answers"][0]["pruned"]
    assert read["brought"] == found
    assert read["tokens"][0] == report["document_tokens"] + report["answers"][0]["question_tokens"]
    assert found < read["tokens"][1] < found + (read["tokens"][0] - found) / 2
    assert f"of which a store or a session had {found}" in outcome.err
    # It is whole in the store then, behind the answer, and loses nothing any more.
    tokens = report["document_tokens"]
    assert report["completion"]["done"] == tokens
    assert report["store"]["stored_tokens"] == tokens // 64 * 64 - found
    _, again = generate(*given, "--prune", "1:25%")
    assert again["store"]["found_tokens"] == tokens // 64 * 64
    assert again["answers"][0]["pruned"] is None


def test_exact_reuse_stores_nothing_that_was_read_in_stages(generate, tmp_path):
    stored = ("--store", tmp_path / "store", "--store-size", "64MiB", "--reuse", "exact")
    _, report = generate(*QUESTIONS, "--prune", "1:25%", *stored)
    assert report["completion"]["done"] == report["document_tokens"]
    assert report["store"]["stored_tokens"] == 0


def test_a_document_is_read_whole_while_a_question_is_awaited(
    started, tiny_folder, long_text, cold_dir, tmp_path
):
    process = started(
        *("generate", "--model", tiny_folder, "--cold-dir", cold_dir, "--max-new-tokens", 6),
        *("--prefill-chunk", 200, "--prompt-file", long_text, "--prune", "1:25%", "--interactive"),
        *("--report", tmp_path / "run.json"),
        stdin=subprocess.PIPE,
    )
    said = b""
    while b"read whole now" not in said:
        said += (line := process.stderr.readline())
        assert line, said.decode()
    out, _ = process.communicate(b"which cat sat?\n", timeout=60)
    assert process.returncode == 0
    report = read_report(tmp_path / "run.json")
    assert report["completion"]["done"] == report["document_tokens"]
    (answer,) = report["answers"]
    assert answer["pruned"] is None
    assert out.decode().startswith(answer["text"])


def test_a_question_that_is_there_at_once_is_answered_at_once(
    command, tiny_folder, long_text, cold_dir
):
    outcome = command(
        *("generate", "--model", tiny_folder, "--cold-dir", cold_dir, "--max-new-tokens", 6),
        *("--prefill-chunk", 200, "--prompt-file", long_text, "--prune", "1:25%", "--interactive"),
        stdin="which cat sat?\nand which mat?\n",
    )
    assert outcome.code == 0, outcome.err
    assert len(outcome.out.splitlines()) >= 2


@pytest.mark.parametrize(
    ("asked", "sealed"), [(QUESTIONS, "no"), (QUESTIONS, "yes"), (QUESTIONS[2:], "yes")]
)
def test_the_least_budget_holds_what_bands_take(
    asked, sealed, generate, command, tiny_folder, cold_dir, long_text
):
    """A budget in bytes that is taken is enough in the middle, too; one less is refused at once."""
    own = ("--encrypt-cold-pool", sealed, "--shadow", "int4", "--prune", "1:25%")

    def refused(budget):
        outcome = command(
            *("generate", "--model", tiny_folder, "--cold-dir", cold_dir, "--max-new-tokens", 6),
            *("--prefill-chunk", 200, "--prompt-file", long_text, *PLAIN, *asked, *own),
            *("--dram-budget", f"{budget}B"),
        )
        # Nothing ends in its middle.
        assert outcome.code in (0, 2), outcome.err
        return re.search(r"this context needs ([\d.]+) MiB", outcome.err)

    # What it says has one digit behind the point.
    said = float(refused(1 << 20)[1])
    lower, upper = int((said - 0.06) * (1 << 20)), int((said + 0.06) * (1 << 20))
    assert refused(lower)
    while upper - lower > 512:
        middle = (lower + upper) // 2
        lower, upper = (middle, upper) if refused(middle) else (lower, middle)
    _, report = generate(*asked, *own, "--dram-budget", f"{upper}B")
    assert report["answers"][0]["pruned"]["tokens"][1] < report["document_tokens"]
    assert report["dram_peak_bytes"] <= upper


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--prune", "half"), "prune='half': 'half' is no cut"),
        (("--prune", "0:50%"), "layer 0 has no layer before it"),
        (("--prune", "1:50%", "--prune-ranker", "best"), "--prune-ranker best: choose one of"),
        (
            ("--prune", "1:mass=90%", "--prune-ranker", "token"),
            "ranker='token' gives scores that do not",
        ),
        (("--prune", "1:50%", "--session", "s"), "--prune has nothing to leave out of a session"),
        (("--prune", "7:50%"), "the model has layers 0 to 1"),
    ],
)
def test_bad_options_are_refused(generate, given, said):
    outcome, report = generate(*given, "--question", "which?", code=2)
    assert said in outcome.error_line()
    assert report is None or report["error"]
