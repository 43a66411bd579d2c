# SPDX-License-Identifier: Apache-2.0
"""`hillinfer generate` on a tiny model, end to end."""

import torch
from command import CHAT, PLAIN
from tiny_folder import character_tokenizer

import hillinfer
from hillinfer.generate.prompt import DocumentPrompt
from hillinfer.models.loader import load_model

REQUIRED_KEYS = {
    *("prompt_tokens", "new_tokens", "kv_bytes", "dram_budget_bytes", "dram_peak_bytes"),
    *("hot_bytes", "shadow_bytes", "staging_bytes", "other_bytes", "peak_rss_bytes"),
    *("cold_read_bytes", "cold_useful_bytes", "cold_write_bytes", "hot_hit_rate"),
    *("prefill_seconds", "decode_tokens_per_second"),
}


def test_report_has_every_required_number_and_they_agree(ask_tiny, document):
    # With a named format `auto` is the least budget that works, so most rows are cold.
    outcome, report = ask_tiny(
        *("--question", "which cat?", "--dram-budget", "auto", "--shadow", "int4", *CHAT)
    )
    assert report.keys() >= REQUIRED_KEYS
    assert all(isinstance(report[key], (int, float)) for key in REQUIRED_KEYS)
    prompt = DocumentPrompt(character_tokenizer(), document.read_text())
    assert report["prompt_tokens"] == len(prompt.document_ids()) + len(
        prompt.question_ids("which cat?")
    )
    answer = report["answers"][0]
    assert report["new_tokens"] == len(answer["token_ids"]) <= 12
    assert outcome.out == answer["text"] + "\n"
    # 2 layers of 2 KV heads, 16 channels, K and V, 2 bytes; the last token is never stored.
    assert report["kv_bytes"] == (report["prompt_tokens"] + report["new_tokens"] - 1) * 256
    parts = ("hot_bytes", "shadow_bytes", "staging_bytes", "other_bytes")
    assert sum(report[part] for part in parts) == report["dram_peak_bytes"]
    assert report["dram_peak_bytes"] <= report["dram_budget_bytes"]
    assert report["peak_rss_bytes"] > 10 * report["dram_peak_bytes"]
    assert report["cold_read_bytes"] >= report["cold_useful_bytes"] > 0
    assert report["decode"]["selected_tokens"] == report["selected_tokens"]
    assert 0 < report["selected_share"] < 1


def test_tokens_are_those_of_generate(ask_tiny, tiny_folder, cold_dir, document):
    chosen = ("--shadow", "int4", "--prefill-chunk", "64", *CHAT)
    _, report = ask_tiny("--question", "which cat?", "--alpha", "0.3", *chosen)
    loaded = load_model(str(tiny_folder))
    prompt = DocumentPrompt(loaded.tokenizer, document.read_text())
    document, question = prompt.document_ids(), prompt.question_ids("which cat?")
    with hillinfer.attach(
        loaded.model, alpha=0.3, dram_budget="64MiB", cold_dir=cold_dir
    ) as attachment:
        cache = attachment.new_cache()
        settings = {"do_sample": False, "past_key_values": cache, "prefill_chunk_size": 64}
        # The document alone first, as the command reads it: chunks decide about output bits.
        loaded.model.generate(torch.tensor([document]), max_new_tokens=1, **settings)
        ids = torch.tensor([document + question])
        out = loaded.model.generate(ids, max_new_tokens=12, **settings)
        cache.close()
    assert out[0, ids.shape[1] :].tolist() == report["answers"][0]["token_ids"]


def test_alpha_one_agrees_with_the_ordinary_cache(ask_tiny):
    outcome, report = ask_tiny("--question", "which cat?", "--alpha", "1", "--compare", "full")
    comparison = report["comparison"]
    assert comparison["equal_tokens"] == [report["new_tokens"]]
    assert comparison["equal_answers"] == 1
    assert comparison["texts"] == [report["answers"][0]["text"]]
    assert "ordinary cache" in outcome.err


def test_comparison_sees_other_tokens(ask_tiny):
    # The twin of the test above: a selection far too small must not pass as equal.
    _, report = ask_tiny(
        *("--question", "which cat?", "--alpha", "0.01", "--kept-recent", "1"),
        *("--kept-sinks", "0", "--compare", "full"),
    )
    assert report["comparison"]["equal_answers"] == 0
    assert report["comparison"]["equal_tokens"][0] < report["new_tokens"]


def test_questions_read_the_document_once_and_answer_as_if_asked_alone(ask_tiny):
    questions = ("which cat?", "what mat did cat 7 sit on?")
    outcome, together = ask_tiny("--question", questions[0], "--question", questions[1])
    alone = [ask_tiny("--question", question)[1]["answers"][0] for question in questions]
    assert [answer["token_ids"] for answer in together["answers"]] == [
        answer["token_ids"] for answer in alone
    ]
    assert alone[0]["token_ids"] != alone[1]["token_ids"]
    assert together["prompt_tokens"] == together["document_tokens"] + sum(
        answer["question_tokens"] for answer in alone
    )
    assert outcome.out == "".join(answer["text"] + "\n" for answer in alone)


def test_interactive_answers_as_options_do(command, tiny_folder, cold_dir, document, ask_tiny):
    questions = ("which cat?", "what mat did cat 7 sit on?")
    expected, _ = ask_tiny("--question", questions[0], "--question", questions[1], *CHAT)
    outcome = command(
        *("generate", "--model", tiny_folder, "--prompt-file", document, "--interactive"),
        *("--cold-dir", cold_dir, "--max-new-tokens", 12),
        stdin="\n".join(questions) + "\n",
    )
    assert outcome.code == 0, outcome.err
    assert outcome.out == expected.out


def test_interactive_goes_on_after_a_question_that_is_too_long(
    command, tiny_folder, cold_dir, document
):
    outcome = command(
        *("generate", "--model", tiny_folder, "--prompt-file", document, "--interactive"),
        *("--cold-dir", cold_dir, "--max-new-tokens", 4, *PLAIN),
        stdin="why " * 200 + "\nwhich cat?\n",
    )
    assert outcome.code == 0
    assert "there is room for 512" in outcome.err
    assert "1024 prompt" not in outcome.err


def test_prompt_sources_are_equal(command, tiny_folder, cold_dir, document, ask_tiny):
    expected, _ = ask_tiny()
    text = document.read_text()
    sources = ((("--prompt", text), ""), ((), text), (("--prompt-file", "-"), text))
    for arguments, stdin in sources:
        outcome = command(
            *("generate", "--model", tiny_folder, "--cold-dir", cold_dir, "--max-new-tokens", 12),
            *(*PLAIN, *arguments),
            stdin=stdin,
        )
        assert outcome.code == 0, outcome.err
        assert outcome.out == expected.out, arguments


def test_sparse_question_selects_for_every_question_token(ask_tiny):
    _, dense = ask_tiny("--question", "which cat?")
    _, sparse = ask_tiny("--question", "which cat?", "--sparse-question")
    scored_before_decode = sparse["scored_tokens"] - sparse["decode"]["scored_tokens"]
    assert dense["scored_tokens"] == dense["decode"]["scored_tokens"]
    layers, document = 2, sparse["document_tokens"]
    question = sparse["answers"][0]["question_tokens"]
    assert scored_before_decode == layers * sum(
        document + number for number in range(1, question + 1)
    )


def test_seed_decides_what_is_drawn(ask_tiny):
    drawn = ("--temperature", "1.5", "--top-k", "40", "--top-p", "0.95")
    texts = [ask_tiny(*drawn, "--seed", seed)[0].out for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_budget_and_device_do_not_change_the_answer(ask_tiny):
    # What `auto` takes depends on the budget, so the format is named.
    expected, _ = ask_tiny("--shadow", "int4")
    for device, budget in (("nvme", "64MiB"), ("golden", "auto")):
        outcome, report = ask_tiny("--device", device, "--dram-budget", budget, "--shadow", "int4")
        assert outcome.out == expected.out, (device, budget)
        assert report["settings"]["device"] == device
        assert (report["dram_budget_bytes"] == 64 * 2**20) == (budget == "64MiB")


def test_settings_reach_the_cache(ask_tiny):
    _, report = ask_tiny(
        *("--alpha", "0.5", "--rule", "raw_sum", "--scope", "kv_head", "--shadow", "int8"),
        *("--max-selected", "40", "--kept-sinks", "2", "--kept-recent", "8"),
    )
    chosen = report["settings"]
    assert (chosen["alpha"], chosen["rule"], chosen["scope"]) == (0.5, "raw_sum", "kv_head")
    assert (chosen["shadow"], chosen["max_selected"]) == ("int8", 40)
    # Every step selects exactly 40 of each KV head's tokens.
    steps = report["answers"][0]["token_ids"][1:]
    assert report["selected_tokens"] == 40 * 2 * 2 * len(steps)


def test_coded_tokens_are_asked_for_and_reported(ask_tiny):
    outcome, report = ask_tiny(
        *("--alpha", "0.5", "--exact", "0.1", "--exact-floor", "4", "--shadow", "int4"),
        *("--kept-sinks", "2", "--kept-recent", "2"),
    )
    assert (report["settings"]["exact"], report["settings"]["exact_floor"]) == (0.1, 4)
    assert 0 < report["coded_tokens"] < report["selected_tokens"]
    assert "of selected tokens; codes of" in outcome.err
    outcome, report = ask_tiny("--alpha", "0.5", "--shadow", "int4")
    assert report["settings"]["exact"] == 1
    assert report["coded_tokens"] == 0
    assert "of selected tokens; codes of" not in outcome.err


def test_a_budget_without_room_for_codes_has_all_exact_and_says_so(ask_tiny):
    said = "all selected tokens come as 16-bit rows: this budget has no room"
    outcome, report = ask_tiny("--shadow", "int4", "--dram-budget", "0.01%")
    assert (report["settings"]["alpha"], report["settings"]["exact"]) == (0.2, 0.02)
    assert said not in outcome.err
    least = report["settings"]["dram_budget_bytes"]
    outcome, report = ask_tiny("--shadow", "int4", "--dram-budget", least - 1)
    assert (report["settings"]["alpha"], report["settings"]["exact"]) == (0.1, 1)
    assert said in outcome.err


def test_plain_style_leaves_the_chat_template_out(ask_tiny):
    _, chat = ask_tiny(*CHAT)
    _, plain = ask_tiny("--prompt-style", "plain")
    assert chat["prompt_tokens"] == plain["prompt_tokens"] + 3


def test_a_question_read_by_one_set_scores_once_for_each_of_its_tokens(ask_tiny, command):
    _, dense = ask_tiny("--question", "which cat?")
    _, one = ask_tiny("--question", "which cat?", "--question-reading", "one-set")
    assert dense["settings"]["question_reading"] == "chunks"
    assert one["settings"]["question_reading"] == "one-set"
    assert one["answers"][0]["question_tokens"] == dense["answers"][0]["question_tokens"]
    _, singly = ask_tiny("--question", "which cat?", "--question-reading", "singly")
    _, sparse = ask_tiny("--question", "which cat?", "--sparse-question")
    assert singly["answers"][0]["token_ids"] == sparse["answers"][0]["token_ids"]
    asked = ("generate", "--model", "/no/model", "--prompt", "a", "--sparse-question")
    line = command(*asked, "--question-reading", "one-set").error_line()
    assert "--sparse-question means --question-reading singly, and one-set is named" in line
