# SPDX-License-Identifier: Apache-2.0
"""`hillinfer generate --save-session` and `--session`."""

import subprocess
from contextlib import contextmanager

import pytest
import torch
from command import CHAT, PLAIN, files_of_one_page, read_report
from tiny_folder import save_tiny
from tiny_models import TinyModel
from torch.nn.modules.module import register_module_parameter_registration_hook

import hillinfer
from hillinfer.generate.prompt import DocumentPrompt, PromptForm, PromptStyle, QuestionPrompt
from hillinfer.models.loader import load_model
from hillinfer.sessions.opening import SavedSession

QUESTIONS = ("--question", "which cat?", "--question", "what is on a mat?")
SHADOW = ("--shadow", "int4")


@pytest.fixture
def long_document(tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("".join(f"cat {i} sat on mat {i * 7 % 61}. " for i in range(100)))
    return file


@pytest.fixture
def generate(command, tiny_folder, cold_dir, tmp_path):
    """Run the command and return its outcome and report; `code` is what is expected."""

    def run(*arguments, code=0, stdin=""):
        report = tmp_path / "run.json"
        report.unlink(missing_ok=True)
        outcome = command(
            *("generate", "--model", tiny_folder, "--cold-dir", cold_dir, "--report", report),
            *("--max-new-tokens", 6, *PLAIN, *arguments),
            stdin=stdin,
        )
        assert outcome.code == code, outcome.err
        return outcome, read_report(report) if report.exists() else None

    return run


def test_a_saved_document_answers_as_one_just_read(generate, long_document, tmp_path):
    """As a chat; without one in the test below."""
    asked = ("--prompt-file", long_document, *CHAT, *SHADOW)
    saving, report = generate(*asked, "--save-session", tmp_path / "session")
    assert saving.out == ""
    assert "session saved: " in saving.err
    assert report["answers"] == []
    assert report["session"]["saved_bytes"] > report["kv_bytes"]
    assert report["session"]["copied_row_bytes"] == 0
    # Codes of a session's segments would be written beside its rows.
    questions = (*QUESTIONS, "--alpha", "0.1")
    # A session says itself how it was read.
    session = ("--session", tmp_path / "session", *CHAT)
    fresh, expected = generate(*asked, *questions)
    answered, own = generate(*session, *questions)
    assert answered.out == fresh.out
    assert own["document_tokens"] == own["session"]["reused_tokens"] == expected["document_tokens"]
    assert own["prompt_tokens"] == expected["prompt_tokens"]
    assert [one["token_ids"] for one in own["answers"]] == [
        one["token_ids"] for one in expected["answers"]
    ]
    assert own["cold_write_bytes"] < expected["cold_write_bytes"] / 4
    typed, _ = generate(
        *(*session, "--interactive", "--alpha", "0.1"),
        stdin="which cat?\n",
    )
    assert typed.out == expected["answers"][0]["text"] + "\n"


def test_saving_does_not_change_the_answers(generate, long_document, tmp_path):
    asked = ("--prompt-file", long_document, *QUESTIONS, *SHADOW)
    plain, _ = generate(*asked)
    saving, report = generate(*asked, "--save-session", tmp_path / "session")
    assert saving.out == plain.out
    assert report["session"]["save_error"] is None
    again, _ = generate("--session", tmp_path / "session", *QUESTIONS)
    assert again.out == plain.out
    # With the very same document nothing is read.
    again, report = generate(*asked, "--session", tmp_path / "session")
    assert again.out == plain.out
    assert report["session"]["reused_tokens"] == report["document_tokens"]


def test_a_document_that_starts_the_same_is_read_on(generate, long_document, tmp_path):
    generate("--prompt-file", long_document, *SHADOW, "--save-session", tmp_path / "session")
    other = tmp_path / "other.txt"
    other.write_text(long_document.read_text()[:2150] + "a dog came. " * 20)
    asked = ("--prompt-file", other, "--question", "which dog?", *SHADOW)
    fresh, expected = generate(*asked)
    used, report = generate(*asked, "--session", tmp_path / "session")
    assert used.out == fresh.out
    assert report["session"]["reused_tokens"] == 2048
    assert f"2048 of {expected['document_tokens']} tokens are reused" in used.err
    assert report["document_tokens"] == expected["document_tokens"]
    # The whole prompt again, without a question: what starts the answer must be computed.
    asked = ("--prompt-file", other, *SHADOW)
    fresh, _ = generate(*asked)
    used, report = generate(*asked, "--session", tmp_path / "session")
    assert used.out == fresh.out
    assert report["session"]["reused_tokens"] == 2048
    _, report = generate(
        *("--prompt-file", other, *SHADOW, "--session", tmp_path / "session"),
        *("--save-session", tmp_path / "second"),
    )
    assert report["session"]["reused_tokens"] == 2048
    with SavedSession(tmp_path / "second") as second:
        second.verify()
        assert second.tokens == report["document_tokens"]
    # Nothing in common is said.
    other.write_text("a dog came. " * 120)
    asked = ("--prompt-file", other, "--question", "which dog?", *SHADOW)
    fresh, _ = generate(*asked)
    used, report = generate(*asked, "--session", tmp_path / "session")
    assert "no whole segment of 1024 tokens in common" in used.err
    assert used.out == fresh.out
    assert report["session"]["reused_tokens"] == 0


def test_comparison_with_a_session(generate, document, tmp_path):
    generate("--prompt-file", document, *SHADOW, "--save-session", tmp_path / "session")
    _, report = generate(
        *("--session", tmp_path / "session", "--question", "which cat?", "--alpha", 1),
        *("--compare", "full"),
    )
    assert report["comparison"]["equal_answers"] == 1


REFUSED = (
    (("--shadow", "int8"), "shadow is int4 in the session and int8 here"),
    (("--dtype", "bfloat16"), "compute type is float32 in the session and bfloat16"),
    (PLAIN, "prompt style is chat in the session"),
    (("--dram-budget", "100KiB"), "the DRAM budget of 100.0 KiB is too small"),
    (("--max-new-tokens", 5000), "more than the model's 4096 positions"),
)


@contextmanager
def weights_in_memory():
    """Give the weights that models get meanwhile, but for those that have no memory."""
    told = []

    def given(module, name, weight):
        if weight is not None and weight.device.type != "meta":
            told.append(name)

    hook = register_module_parameter_registration_hook(given)
    try:
        yield told
    finally:
        hook.remove()


def test_what_does_not_fit_is_refused_before_weights_are_loaded(generate, document, tmp_path):
    generate("--prompt-file", document, *SHADOW, *CHAT, "--save-session", tmp_path / "session")
    asked = ("--session", tmp_path / "session", "--question", "which?", *CHAT)
    for arguments, message in REFUSED:
        with weights_in_memory() as loaded:
            outcome, _ = generate(*asked, *arguments, code=2)
        assert message in outcome.error_line()
        assert loaded == []
    # The twin: what fits is loaded.
    with weights_in_memory() as loaded:
        generate(*asked)
    assert loaded


def test_other_weights_are_refused(generate, command, document, tmp_path, cold_dir):
    generate("--prompt-file", document, *SHADOW, "--save-session", tmp_path / "session")
    other = save_tiny(tmp_path / "other", TinyModel(head_dim=16, seed=5))
    outcome = command(
        *("generate", "--model", other, "--cold-dir", cold_dir, "--question", "which?"),
        *("--session", tmp_path / "session", *PLAIN),
    )
    assert "does not fit: weights is " in outcome.error_line()


def test_options_that_make_no_sense(generate, document, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "note").write_text("mine")
    for arguments, message in (
        (("--session", tmp_path / "none", "--question", "a"), "there is no session"),
        (("--session", tmp_path / "none"), "add --question"),
        (
            ("--session", tmp_path, "--question", "a", "--save-session", tmp_path / "b"),
            "needs a document",
        ),
        (("--prompt-file", document, "--save-session", tmp_path / "taken"), "is not empty"),
        (
            ("--prompt-file", document, "--save-session", tmp_path / "b", "--compare", "full"),
            "add --question",
        ),
    ):
        outcome, _ = generate(*arguments, code=2)
        assert message in outcome.error_line()
    assert not (tmp_path / "b").exists()


def test_a_session_saved_in_python_needs_its_document(
    generate, document, tmp_path, tiny_folder, cold_dir
):
    loaded = load_model(str(tiny_folder))
    ids = DocumentPrompt(loaded.tokenizer, document.read_text()).document_ids()
    with hillinfer.attach(loaded.model, cold_dir=cold_dir, dram_budget="64MiB") as hill:
        cache = hill.new_cache()
        with torch.no_grad():
            loaded.model(input_ids=torch.tensor([ids]), past_key_values=cache)
        cache.save_session(tmp_path / "session", tokenizer=loaded.tokenizer)
    asked = ("--session", tmp_path / "session", *CHAT)
    outcome, _ = generate(*asked, "--question", "a", code=2)
    assert "saved from Python" in outcome.error_line()
    outcome, report = generate(*(*asked, "--question", "which cat?", "--prompt-file", document))
    assert report["session"]["reused_tokens"] == len(ids)


def test_a_full_drive_while_saving_costs_no_answer(started, tiny_folder, tmp_path, cold_dir):
    # No group gets full, so the pool writes nothing, and two layers of open rows are too much.
    text = tmp_path / "short.txt"
    text.write_text("a cat sat on a red mat. ")
    asked = (
        *("generate", "--model", tiny_folder, "--prompt-file", text, "--cold-dir", cold_dir),
        *("--max-new-tokens", 6, "--threads", 1, "--question", "which cat?", *SHADOW),
        *PLAIN,
    )
    expected, _ = started(*asked).communicate(timeout=120)
    process = started(*asked, "--save-session", tmp_path / "s", prepare=files_of_one_page)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, err.decode()
    assert b"Traceback" not in err
    last = err.decode().splitlines()[-1]
    assert last.startswith("hillinfer: error: cannot save the session")
    assert "free space on the drive" in last
    assert out == expected
    assert [entry.name for entry in tmp_path.iterdir()] == ["short.txt"]


def test_another_process_answers(started, tiny_folder, long_document, tmp_path, cold_dir):
    common = ("generate", "--model", tiny_folder, "--cold-dir", cold_dir, "--threads", 1)
    common = (*common, "--max-new-tokens", 12)
    first = started(
        *common, "--prompt-file", long_document, *QUESTIONS, "--save-session", tmp_path / "s"
    )
    out, err = first.communicate(timeout=120)
    assert first.returncode == 0, err.decode()
    second = started(*common, "--session", tmp_path / "s", *QUESTIONS, stderr=subprocess.PIPE)
    again, err = second.communicate(timeout=120)
    assert second.returncode == 0, err.decode()
    assert again == out


def test_questions_need_no_document(tiny_folder):
    tokenizer = load_model(str(tiny_folder)).tokenizer
    for form, style in ((PromptForm.CHAT, PromptStyle.AUTO), (PromptForm.PLAIN, PromptStyle.PLAIN)):
        prompt = DocumentPrompt(tokenizer, "a cat", style)
        assert prompt.form is form
        ids = QuestionPrompt(tokenizer, form).question_ids("which cat?")
        assert ids == prompt.question_ids("which cat?")
    plain, chat = (QuestionPrompt(tokenizer, form).question_ids("a") for form in PromptForm)
    assert plain != chat
