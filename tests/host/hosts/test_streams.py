# SPDX-License-Identifier: Apache-2.0
"""Streams that outlive a host: thoughts beside text, and ends of lines that come in two."""

import json

import pytest

from hillinfer_hosts.streams import OtherAnswerError, StreamedAnswer


def events(*deltas, end=b"\n\n"):
    told = []
    for at, delta in enumerate(deltas):
        ended = "stop" if at == len(deltas) - 1 and not delta else None
        told.append({"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": ended}]})
    return b"".join(b"data: " + json.dumps(one).encode() + end for one in told)


def texts(told, name):
    choices = [json.loads(one[6:])["choices"][0]["delta"] for one in told]
    return "".join(one.get(name) or "" for one in choices)


BEGUN = {"role": "assistant", "content": ""}


@pytest.mark.parametrize("thought", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("seen", [1, 2, 3, 4])
def test_thoughts_are_told_once(thought, seen):
    pieces = [BEGUN, {thought: "let me"}, {thought: " see"}, {"content": "yes"}]
    own = StreamedAnswer()
    told = list(own.taken(events(*pieces[:seen])))
    own.begin_again()
    told += own.taken(events(BEGUN, {thought: "let m"}, {thought: "e see"}, {"content": "yes"}, {}))
    assert (texts(told, thought), texts(told, "content")) == ("let me see", "yes")
    assert sum(b'"role"' in one for one in told) == 1 + (seen == 1)


@pytest.mark.parametrize(
    "other",
    [
        [BEGUN, {"reasoning": "no"}],
        [BEGUN, {"reasoning": "let"}, {"content": "yes"}],
        [BEGUN, {"reasoning": "let"}, {}],
        [BEGUN, {"reasoning": "let"}, {"tool_calls": [{"index": 0}]}],
        [BEGUN, {"content": "let me"}],
    ],
)
def test_other_thoughts_end_a_stream(other):
    own = StreamedAnswer()
    list(own.taken(events(BEGUN, {"reasoning": "let me"})))
    own.begin_again()
    with pytest.raises(OtherAnswerError):
        list(own.taken(events(*other)))


def test_an_end_of_line_that_comes_in_two_is_one():
    pieces = [BEGUN, {"content": "one"}, {"content": " two"}, {}]
    data = events(*pieces, end=b"\r\n\r\n") + b"data: [DONE]\r\n\r\n"
    whole = list(StreamedAnswer().taken(data))
    assert len(whole) == 5
    for size in (1, 2, 3, 7):
        own = StreamedAnswer()
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        assert [one for part in parts for one in own.taken(part)] == whole
        assert own.is_done
