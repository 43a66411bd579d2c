# SPDX-License-Identifier: Apache-2.0
"""However a command ends: the text, the report, one line and the documented exit status."""

import json
import shutil

import pytest
from command import PLAIN
from forked import (
    AFTER,
    CLOSED,
    FULL,
    NO_READER,
    READER_LEAVES,
    TERMINAL,
)

# Every subcommand with something that ends it before it does anything.
REFUSED = {
    "generate": ("generate", "--alpha", "2"),
    "interactive": ("generate", "--interactive", "--question", "who?"),
    "doctor": ("doctor", "--profile", "no-shape"),
    "fetch": ("fetch", "no-model"),
    "models": ("models", "--no-such-option"),
    "quality": ("quality", "--context", "0"),
    "precision": ("precision", "--context", "0"),
    "pools": ("pools", "--context", "0"),
    "pool-picture": ("pool-picture", "/nowhere/file", "--out", "/proc/picture.png"),
    "trace-picture": ("trace-picture", "/nowhere/file"),
    "store-picture": ("store-picture", "/nowhere/file"),
    "documents-picture": ("documents-picture", "/nowhere/file"),
    "prune-picture": ("prune-picture", "/nowhere/file"),
    "store-put": ("store", "put", "--prompt", "text", "--store", "/nowhere/store"),
    "store-import": ("store", "import", "/nowhere/session", "--store", "/nowhere/store"),
    "documents-ls": ("documents", "ls", "--store", "/nowhere/store"),
    "documents-put": ("documents", "put", "/nowhere/file", "--store", "/nowhere/store"),
    "documents-measure": ("documents", "measure", "name", "--store", "/nowhere/store"),
    "documents-plan": ("documents", "plan", "--store", "/nowhere/store"),
    "specs": ("specs", "no-preset"),
    "serving": ("serving", "--rounds", "0"),
    "hosts": ("hosts", "--copies", "0"),
    "evicpress": ("evicpress", "--documents", "0"),
    "decode": ("decode", "--plan", "no-plan", "--out", "/proc/bench.json"),
    "no-command": ("no-such-command",),
}
DONE = {
    "help": ("--help",),
    "nothing": (),
    "help-of-generate": ("generate", "--help"),
    "list-of-models": ("models",),
    "specs-of-one": ("specs", "smollm2-135m", "--key-mode", "int4", "--tokens", "64"),
}
STATUS = {CLOSED: 2, FULL: 2, NO_READER: 141}
# What wraps all commands looks at the streams, before any of them and behind it: each command meets
# one kind of stream in turn, and a few of every sort of end meet all.
ALL_STREAMS = ("generate", "no-command", "help", "list-of-models")
MET = [
    (name, stream)
    for turn, name in enumerate([*REFUSED, *DONE])
    for stream in (STATUS if name in ALL_STREAMS else [[*STATUS][turn % len(STATUS)]])
]


@pytest.fixture
def place(tmp_path):
    """Folders of a run's own, which may be lost."""
    for name in ("cold", "reports"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
def generate(forked, tiny_folder, document, place):
    """Draw twenty tokens from the tiny model after four chunks of a document."""

    def run(*arguments, touch=None, **changes):
        return forked(
            *("generate", "--model", tiny_folder, "--prompt-file", document, "--threads", 1),
            *("--cold-dir", place / "cold", "--report", place / "reports" / "run.json"),
            *("--max-new-tokens", 20, "--dram-budget", "64MiB", "--temperature", 5),
            *("--prefill-chunk", 64, *PLAIN, *arguments),
            touches=None if touch is None else str(place / touch),
            **changes,
        )

    return run


# Passes that read the document, and one in the middle of the answer.
PREFILL, DECODE, LAST = 3, 16, 23


def report_of(place):
    return json.loads((place / "reports" / "run.json").read_text(encoding="utf-8"))


def one_line(ended):
    """Return the one line that says why a command ended."""
    assert "Traceback" not in ended.err
    assert "Exception ignored" not in ended.err
    lines = [line for line in ended.err.splitlines() if line.startswith("hillinfer: ")]
    lines = [line for line in lines if not line.startswith("hillinfer: warning: ")]
    assert len(lines) == 1, ended.err
    assert ended.last_line == lines[0]
    return lines[0]


@pytest.mark.parametrize(("name", "stream"), MET)
def test_an_output_that_takes_nothing_is_refused_at_once(forked, name, stream):
    ended = forked(*(REFUSED | DONE)[name], stdout=stream)
    assert ended.status == STATUS[stream], ended
    assert "standard output" in one_line(ended)


@pytest.mark.parametrize("stream", STATUS)
def test_nobody_to_tell_changes_no_status(forked, stream):
    for unheard in STATUS:
        ended = forked("models", stdout=stream, stderr=unheard)
        assert ended.status == STATUS[stream], unheard


@pytest.mark.parametrize("name", [*REFUSED, *DONE])
def test_messages_that_nobody_takes_change_nothing(forked, name):
    heard = forked(*(REFUSED | DONE)[name])
    assert heard.status == (2 if name in REFUSED else 0), heard
    assert bool(heard.out) == (name in DONE)
    if name in REFUSED:
        one_line(heard)
    for stream in [stream for one, stream in MET if one == name]:
        unheard = forked(*(REFUSED | DONE)[name], stderr=stream)
        assert (unheard.status, unheard.out) == (heard.status, heard.out), stream


def test_an_answer_needs_no_standard_error(generate, place):
    plain = generate()
    assert plain.status == 0, plain
    assert plain.out == report_of(place)["answers"][0]["text"] + "\n"
    assert len(plain.out) == 20
    # On a terminal a bar is drawn meanwhile, which must not take the text with it.
    for stream in (CLOSED, FULL, NO_READER, TERMINAL):
        ended = generate(stderr=stream)
        assert (ended.status, ended.out) == (0, plain.out), stream


STRIKES = {
    "SIGINT": (130, "hillinfer: interrupted (SIGINT)"),
    "SIGTERM": (143, "hillinfer: interrupted (SIGTERM)"),
    "SIGHUP": (129, "hillinfer: interrupted (SIGHUP)"),
    "EIO": (1, "the system refused: Input/output error (/some/file); check the drive"),
    "EMFILE": (1, "Too many open files; raise ulimit -n"),
    "MemoryError": (1, "memory ran out"),
    "torch memory": (1, "memory ran out (OutOfMemoryError"),
    "RLIMIT_AS": (1, "memory ran out"),
    "thread": (1, "the system starts no more threads: raise the limit of processes"),
    "defect": (1, "KeyError: 'nobody thought of this'; this is a defect of HillInfer"),
}


# While the document is read one of each kind: what is said of them is the same in both.
@pytest.mark.parametrize(
    ("strike", "forward"),
    [(strike, DECODE) for strike in STRIKES]
    + [(strike, PREFILL) for strike in ("SIGTERM", "EIO", "RLIMIT_AS", "thread", "defect")],
)
def test_whatever_strikes_the_text_and_the_report_are_there(generate, place, strike, forward):
    ended = generate(strike=strike, forward=forward)
    status, said = STRIKES[strike]
    assert ended.status == status, ended
    line = one_line(ended)
    assert said in line
    told = report_of(place)
    assert told["finish"] == ("interrupted" if "SIG" in strike else "failed")
    assert told["error"] is None if "SIG" in strike else told["error"] in line
    if forward == PREFILL:
        assert (ended.out, told["answers"]) == ("", [])
        assert told["document_tokens"] == 128
    else:
        (answer,) = told["answers"]
        assert ended.out == answer["text"] + "\n"
        assert len(answer["token_ids"]) == 12
        assert f"the text so far is on standard output and in {place}" in line
    assert list((place / "cold").iterdir()) == []


@pytest.mark.parametrize("strike", ["SIGINT", "defect"])
def test_what_strikes_after_the_answer_costs_neither(generate, place, strike):
    """While HillInfer is taken off the model, between the parts of a run."""
    ended = generate(strike=strike, forward=AFTER)
    assert ended.status == STRIKES[strike][0], ended
    assert STRIKES[strike][1] in one_line(ended)
    told = report_of(place)
    assert ended.out == told["answers"][0]["text"] + "\n"
    assert len(told["answers"][0]["token_ids"]) == 20
    assert list((place / "cold").iterdir()) == []


def test_a_reader_that_leaves_has_the_rest_in_the_report(generate, place):
    # Enough that it is gone long before the last of them.
    ended = generate("--max-new-tokens", 40, stdout=READER_LEAVES)
    assert ended.status == 141, ended
    line = one_line(ended)
    assert "nobody reads standard output any more" in line
    assert f"the text so far is in {place}" in line
    told = report_of(place)
    assert told["finish"] == "failed"
    assert told["answers"][0]["text"].startswith(ended.out)
    assert len(ended.out) < len(told["answers"][0]["token_ids"]) < 40


MODES = {
    "questions": (("--question", "who?", "--question", "where?"), 40),
    "interactive": (("--interactive",), 40),
    "compare": (("--question", "who?", "--compare", "full"), 26),
    "comparing": (("--question", "who?", "--compare", "full"), 40),
    "saving": (("--question", "who?"), 16),
    "singly": (("--question", "who?", "--sparse-question"), 24),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_way_to_ask_keeps_what_was_answered(generate, place, mode):
    strike = "defect" if mode == "singly" else "SIGTERM"
    arguments, forward = MODES[mode]
    if mode == "saving":
        arguments += ("--save-session", place / "session")
    ended = generate(*arguments, stdin=b"who?\nwhere?\n", strike=strike, forward=forward)
    assert ended.status == STRIKES[strike][0], ended
    assert STRIKES[strike][1] in one_line(ended)
    told = report_of(place)
    assert ended.out == "".join(answer["text"] + "\n" for answer in told["answers"])
    assert told["new_tokens"] > 0
    assert told["finish"] == ("interrupted" if strike == "SIGTERM" else "failed")
    if mode == "saving":
        again = generate("--session", place / "session", "--question", "who?")
        assert again.status == 0, again
        assert again.out.startswith(ended.out.strip("\n"))


def test_an_answer_that_breaks_off_costs_no_document_that_is_read_in_stages(
    generate, place, document
):
    """Its session and its rows in a store are there, and those of a document read whole."""
    document.write_text("".join(f"cat {i} sat on mat {i * 7 % 61}. " for i in range(30)))
    asked = ("--question", "who?")
    whole = generate(*asked)
    for strike in ("SIGINT", "defect"):
        session = place / strike / "session"
        kept = ("--store", place / strike / "store", "--store-size", "64MiB")
        pruned = ("--prune", "1:25%", "--save-session", session, *kept)
        ended = generate(*asked, *pruned, strike=strike, forward=DECODE + 10)
        assert ended.status == STRIKES[strike][0], ended
        assert STRIKES[strike][1] in one_line(ended)
        assert "to be kept; another interrupt ends it" in ended.err
        told = report_of(place)
        (answer,) = told["answers"]
        assert 0 < len(answer["token_ids"]) < 20
        tokens = told["document_tokens"]
        assert answer["pruned"]["tokens"][1] < tokens
        assert told["completion"]["done"] == tokens
        assert told["store"]["stored_tokens"] == tokens // 64 * 64
        again = generate("--session", session, *asked)
        assert again.status == 0, again
        assert again.out == whole.out
        assert generate(*asked, *kept).out == whole.out
        assert report_of(place)["store"]["found_tokens"] == tokens // 64 * 64


@pytest.mark.parametrize("arguments", [(), ("--question", "who?", "--question", "where?")])
def test_a_cold_directory_that_is_removed_costs_no_text(generate, place, arguments):
    ended = generate(*arguments, strike="remove", forward=DECODE, touch="cold")
    told = report_of(place)
    assert ended.out == "".join(answer["text"] + "\n" for answer in told["answers"])
    # Files of the pool have no names, so nothing is lost; a drive that says so is told.
    assert (ended.status, told["error"]) == (0, None), ended


@pytest.mark.parametrize(
    ("strike", "forward", "said"),
    [("become a file", DECODE, "Not a directory"), ("RLIMIT_FSIZE", LAST, "File too large")],
)
def test_a_report_that_loses_its_place_costs_no_text(generate, place, strike, forward, said):
    ended = generate(strike=strike, forward=forward, touch="reports")
    assert ended.status == 1, ended
    line = one_line(ended)
    assert "cannot write the report" in line
    assert said in line
    assert "the text so far is on standard output" in line
    assert len(ended.out) == 20
    assert not (place / "reports" / "run.json").exists()
    assert not list(place.rglob(".report-*"))


def test_where_the_traceback_of_a_defect_is(generate, place):
    ended = generate(strike="defect", forward=DECODE, environment={"HILLINFER_TRACEBACK": "1"})
    assert ended.status == 1
    assert "nobody thought of this" in ended.err.split("Traceback")[1]
    assert ended.last_line.startswith("hillinfer: error: KeyError")
    detail = report_of(place)["error_detail"]
    assert detail.startswith("Traceback")
    assert "nobody thought of this" in detail
    # The twin: what HillInfer says on purpose has none.
    shutil.rmtree(place / "reports")
    assert generate(strike="SIGTERM", forward=DECODE).status == 143
    assert report_of(place)["error_detail"] is None


@pytest.mark.parametrize("stdin", [None, b"", b"\xff\n"])
def test_interactive_without_questions_ends_well(generate, place, stdin):
    ended = generate("--interactive", stdin=stdin)
    assert (ended.status, ended.out) == (0, ""), ended
    assert report_of(place)["answers"] == []


def test_a_prompt_from_a_closed_standard_input_is_empty(forked, tiny_folder):
    ended = forked("generate", "--model", tiny_folder, stdin=None)
    assert ended.status == 2
    assert "the prompt from standard input is empty" in one_line(ended)


@pytest.mark.parametrize(("forward", "what", "told"), [(2, "/open", 2), (12, "the answer", 1)])
def test_an_interrupt_ends_what_a_chat_does_and_not_the_chat(
    forked, tiny_folder, document, place, forward, what, told
):
    asked = ("chat", "--model", tiny_folder, "--threads", 1, "--cold-dir", place / "cold")
    more = ("--max-new-tokens", 16, "--dram-budget", "64MiB", "--prefill-chunk", 64)
    lines = f"/open {document}\nwho?\n/open {document}\nwhere?\n".encode()
    strikes = {"strike": "SIGINT", "forward": forward}
    ended = forked(*asked, *more, stdin=lines, **strikes)
    assert ended.status == 0, ended
    assert f"{what} was interrupted; ask again" in ended.err
    assert ended.err.count(" tokens/s; ") == told
    # Other signals end it.
    ended = forked(*asked, *more, stdin=lines, **strikes | {"strike": "SIGTERM"})
    assert ended.status == 143
    assert "interrupted (SIGTERM)" in one_line(ended)
    assert list((place / "cold").iterdir()) == []
