# SPDX-License-Identifier: Apache-2.0
"""Odd values in every field of every route: no status of 500, nothing that stays under way."""

import json
from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import HTTP
from waiting import until

FIELDS = (
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "top_k", "seed", "stop", "logprobs", "top_logprobs", "n", "logit_bias", "presence_penalty",
    "frequency_penalty", "stream", "stream_options", "ignore_eos", "echo", "tools", "tool_choice",
    "response_format", "user", "tokens", "add_special_tokens", "other",
)  # fmt: skip
PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
SIMPLE = st.sampled_from(
    [
        *(None, True, False, 0, -1, 1, 2, 1.5, 1e308, 1e-308, float("nan"), float("inf"), 10**30),
        *("", "a", "\ud800", "\x00", "<u>", "\u00e9", [], [[]], {}, ["a"], [1], [-1], [61], [None]),
        *({"type": "text"}, {"5": 1}, {"5": float("nan")}, {"include_usage": True}, {"a": {}}),
    ]
)
PARTS = st.lists(
    st.fixed_dictionaries({"type": SIMPLE | st.sampled_from(["text", "file"])}, optional={
        "text": SIMPLE, "file": SIMPLE | st.fixed_dictionaries({"file_id": SIMPLE})
    }), max_size=2)  # fmt: skip
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": SIMPLE | st.sampled_from(["user", "system", "assistant"]),
            "content": SIMPLE | PARTS,
        }
    ),
    min_size=1,
    max_size=3,
)
ODD = st.dictionaries(st.sampled_from(FIELDS), SIMPLE, max_size=3)
USUAL = {"model": "tiny", "max_tokens": 2, "prompt": "hi", "tokens": [5, 6]}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def test_no_request_is_a_defect(tiny_server):
    statuses = Counter()

    @settings(
        max_examples=120, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    @given(st.sampled_from(PATHS), ODD, MESSAGES | st.none())
    def send(path, odd, messages):
        body = USUAL | CHAT | ({"messages": messages} if messages else {}) | odd
        answer = HTTP.post(
            f"{tiny_server.url}{path}",
            content=json.dumps(body),
            headers={"content-type": "application/json"},
        )
        statuses[answer.status_code] += 1
        assert answer.status_code in (200, 400, 404), answer.text
        if answer.status_code == 200:
            assert '"error"' not in answer.text
        else:
            assert answer.json()["error"]["message"]

    send()
    # Both are seen: a test that is refused everything shows nothing.
    assert min(statuses[200], statuses[400]) > 10
    until(lambda: tiny_server.inference.is_idle)
