# SPDX-License-Identifier: Apache-2.0
"""`hillinfer generate` with short prompts and everything else left as it is."""

import pytest
from command import CHAT, PLAIN, read_report


@pytest.fixture
def ask(command, tiny_folder, cold_dir, tmp_path):
    """Generate from the tiny model and return the outcome and the report."""

    def ask(*arguments, stdin=""):
        report = tmp_path / "run.json"
        given = ("generate", "--model", tiny_folder, "--cold-dir", cold_dir, "--report", report)
        outcome = command(*given, *PLAIN, *arguments, stdin=stdin)
        assert outcome.code == 0, outcome.err
        found = read_report(report)
        assert found["dram_peak_bytes"] <= found["dram_budget_bytes"]
        assert "warning" not in outcome.err
        return outcome, found

    return ask


# Answers of 64 tokens pass what the shorter of the prompts end at.
@pytest.mark.parametrize(
    ("tokens", "new_tokens"),
    [(tokens, 1) for tokens in (1, 2, 5, 36, 37, 64, 128)]
    + [(tokens, 64) for tokens in (1, 30, 64, 200)],
)
def test_the_defaults_work(ask, tokens, new_tokens):
    outcome, report = ask("--prompt", "a" * tokens, "--max-new-tokens", new_tokens)
    assert report["prompt_tokens"] == tokens
    assert 1 <= report["new_tokens"] <= new_tokens
    assert outcome.out == report["answers"][0]["text"] + "\n"
    assert "is taken" not in outcome.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--question", "a"),
        ("--question", "a", *CHAT),
        ("--question", "a", "--question", "b", "--compare", "full"),
        ("--question", "a", "--question", "b", "--prefill-chunk", 1, "--sparse-question"),
        ("--compare", "full"),
        ("--alpha", "1e-9"),
        ("--kept-sinks", 0, "--kept-recent", 1),
        ("--kept-recent", 5000),
        ("--device", "golden"),
    ],
    ids=str,
)
def test_options_work_with_a_short_prompt(ask, arguments):
    ask("--prompt", "a", "--max-new-tokens", 3, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--question", "a", "--question", "b", "--compare", "full", "--sparse-question"),
        ("--kept-sinks", 0, "--kept-recent", 1, "--prefill-chunk", 1),
        ("--kept-recent", 5000, "--device", "golden", "--alpha", "1e-9"),
    ],
    ids=str,
)
def test_options_work_with_a_group_of_tokens(ask, arguments):
    ask("--prompt", "abcde " * 6, "--max-new-tokens", 3, *arguments)


def test_a_share_that_is_too_small_is_raised_and_said_once(ask):
    outcome, report = ask("--prompt", "abc", "--max-new-tokens", 2, "--dram-budget", "25%")
    (said,) = [line for line in outcome.err.splitlines() if "is taken" in line]
    assert said.startswith("DRAM budget: 25% of this context is ")
    assert report["dram_budget_bytes"] > report["kv_bytes"]


def test_bytes_that_are_too_few_are_refused_with_two_numbers(command, tiny_folder, cold_dir, ask):
    arguments = ("--prompt", "abc", "--max-new-tokens", 2, "--exact", 1)
    least = ask(*arguments, "--shadow", "int4")[1]["dram_budget_bytes"]
    outcome = command(
        *("generate", "--model", tiny_folder, "--cold-dir", cold_dir, *arguments),
        *(*PLAIN, "--shadow", "int4", "--dram-budget", least - 1),
    )
    budget, _, needs = outcome.error_line().partition(" is too small: this context needs ")
    assert budget.rpartition(" of ")[2] != needs.partition(" (")[0]


def test_questions_typed_about_a_short_document(ask, tmp_path):
    document = tmp_path / "short.txt"
    document.write_text("a")
    outcome, report = ask(
        *("--prompt-file", document, "--interactive", "--max-new-tokens", 2), stdin="b?\nc?\n"
    )
    assert len(report["answers"]) == 2
    assert outcome.out == "".join(answer["text"] + "\n" for answer in report["answers"])


def test_a_session_of_a_short_document(ask, tmp_path):
    question = ("--question", "hi", "--max-new-tokens", 5)
    whole, _ = ask("--prompt", "abc", *question)
    ask("--prompt", "abc", "--save-session", tmp_path / "session")
    for source in ((), ("--prompt", "abc")):
        resumed, report = ask("--session", tmp_path / "session", *source, *question)
        assert resumed.out == whole.out
        assert report["session"]["reused_tokens"] == report["document_tokens"]


@pytest.mark.parametrize("prompt", ["", " ", "\n\t"])
def test_an_empty_prompt_is_refused_in_one_line(command, tiny_folder, prompt, tmp_path):
    file = tmp_path / "empty.txt"
    file.write_text(prompt)
    for given, stdin in (
        (("--prompt", prompt), ""),
        (("--prompt-file", file), ""),
        (("--prompt-file", "-"), prompt),
    ):
        line = command("generate", "--model", tiny_folder, *given, stdin=stdin).error_line()
        assert "is empty: give a text to read" in line


def test_a_prompt_whose_every_character_is_dropped_is_refused_in_one_line(
    command, tmp_path, cold_dir
):
    from tiny_folder import character_tokenizer, save_tiny
    from tokenizers import normalizers

    tokenizer = character_tokenizer(chat_template=None)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    folder = save_tiny(tmp_path / "model", tokenizer=tokenizer)
    outcome = command("generate", "--model", folder, "--cold-dir", cold_dir, "--prompt", "\u200b")
    assert "the prompt has no tokens" in outcome.error_line()


def test_a_device_that_no_kernel_is_built_for_is_refused_before_anything_is_read(
    command, tiny_folder, cold_dir
):
    given = ("--model", tiny_folder, "--cold-dir", cold_dir, "--prompt", "a" * 60)
    outcome = command("generate", *given, "--device", "csim")
    assert "device=csim: head_dim=16 is not supported" in outcome.error_line()
