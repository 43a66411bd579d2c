# SPDX-License-Identifier: Apache-2.0
"""What is told to Prometheus, what a board asks of it, and traces of requests."""

import json
import re
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from servers import CHAT, HTTP, running

from hillinfer.errors import SettingsError
from hillinfer.serve.http.telemetry import ENDPOINTS, Spans
from hillinfer.store.store import Store

BOARD = Path(__file__).parents[3] / "docs" / "grafana" / "hillinfer.json"
# Of PromQL, beside names of metrics and labels.
WORDS = {"histogram_quantile", "sum", "by", "le", "rate", "increase", "__rate_interval"}


# A few exact tokens, so that short prompts have coded ones as well.
CODED = {"alpha": 0.5, "exact": 0.1, "exact_floor": 4, "kept_sinks": 1, "kept_recent": 2}


@pytest.fixture(scope="module")
def spans():
    """What spans are sent to, and what was sent."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Spans(provider), exporter


@pytest.fixture(scope="module")
def server(endless_folder, cold_dir, tmp_path_factory, spans):
    directory = tmp_path_factory.mktemp("figures") / "store"
    Store.create(directory, 64 << 20)
    with (
        Store(directory) as store,
        running(endless_folder, cold_dir, store=store, spans=spans[0], made=CODED) as server,
    ):
        server.ask("the cat sat on the mat", max_tokens=8)
        with server.client() as client:
            client.completions.create(model="tiny", prompt="the cat", max_tokens=2)
        yield server


@pytest.fixture
def told(server):
    """Samples by name: the sets of labels that each has."""
    text = HTTP.get(f"{server.url}/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def test_requests_are_counted_by_route_and_end(told):
    counted = {
        (one.labels["endpoint"], one.labels["finish_reason"]): one.value
        for one in told["hillinfer_requests_total"]
    }
    assert counted == {("chat", "length"): 1, ("completions", "length"): 1}


def test_selected_tokens_are_counted_by_what_they_came_as(told):
    selected = {one.labels["form"]: one.value for one in told["hillinfer_selected_tokens_total"]}
    assert selected.keys() == {"rows", "codes"}
    assert min(selected.values()) > 0
    coded = {one.labels["brought_by"]: one.value for one in told["hillinfer_coded_tokens_total"]}
    assert coded.keys() == {"memory", "drive_codes", "rows"}
    assert sum(coded.values()) == selected["codes"]
    # Here all codes fit in memory.
    assert coded["memory"] > 0


def test_log_lines_name_the_route(server):
    assert [one["endpoint"] for one in server.logged("answered")][:2] == ["chat", "completions"]


# --- the board ---


def queries():
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    return [(one["title"], target) for one in board["panels"] for target in one["targets"]]


def faults(query, told):
    """Return what a query asks for that the server does not tell."""
    bare = re.sub(r'"[^"]*"', "", query)
    names = set(re.findall(r"[a-z_]{3,}", bare))
    asked = {name for name in names if name.startswith("hillinfer_")}
    missing = sorted(asked - told.keys())
    labels = {label for name in asked & told.keys() for one in told[name] for label in one.labels}
    return missing + sorted(names - asked - WORDS - labels)


def test_every_query_of_the_board_is_answered(told):
    for title, target in queries():
        assert faults(target["expr"], told) == [], title
        wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert faults(" ".join(["rate", *re.findall(r"hillinfer_\w+", target["expr"])]), told) == []
        names = re.findall(r"hillinfer_\w+", target["expr"])
        labels = {label for name in names for one in told[name] for label in one.labels}
        assert wanted <= labels, title


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("rate(hillinfer_request_total[1m])", "hillinfer_request_total"),
        ("sum by (route) (hillinfer_requests_total)", "route"),
    ],
)
def test_a_query_of_what_is_not_there_is_seen(told, query, fault):
    assert faults(query, told) == [fault]


def test_the_board_shows_every_metric_of_the_server(told):
    asked = set(re.findall(r"hillinfer_\w+", BOARD.read_text(encoding="utf-8")))
    own = {name for name in told if not name.startswith("hillinfer_store_")}
    parts = ("_sum", "_count", "_created")
    assert {name for name in own if not name.endswith(parts)} <= asked


# --- traces ---


def test_a_request_is_a_trace_of_its_parts(server, spans):
    _, exporter = spans
    exporter.clear()
    parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    answer = HTTP.post(
        f"{server.url}/v1/chat/completions",
        json={"model": "tiny", "messages": CHAT, "max_tokens": 4},
        headers={"traceparent": parent},
    ).json()
    made = {one.name: one for one in exporter.get_finished_spans()}
    assert made.keys() >= {"chat", "read", "answer"}
    whole = made["chat"]
    assert f"{whole.context.trace_id:032x}" == "ab" * 16
    assert f"{whole.parent.span_id:016x}" == "cd" * 8
    assert whole.attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert whole.attributes["gen_ai.usage.output_tokens"] == 4
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("length",)
    parts = [made[name] for name in ("queue", "read", "answer") if name in made]
    for one in parts:
        assert one.parent.span_id == whole.context.span_id
        assert whole.start_time <= one.start_time < one.end_time <= whole.end_time
    assert sum(one.end_time - one.start_time for one in parts) == pytest.approx(
        whole.end_time - whole.start_time, rel=0.01
    )
    shown = "".join(one.to_json() for one in exporter.get_finished_spans())
    assert CHAT[0]["content"] not in shown


def test_a_request_without_a_trace_has_one_of_its_own(server, spans):
    _, exporter = spans
    exporter.clear()
    server.ask("the cat", max_tokens=2)
    server.ask("the cat", max_tokens=2)
    whole = [one for one in exporter.get_finished_spans() if one.name == "chat"]
    assert [one.parent for one in whole] == [None, None]
    assert len({one.context.trace_id for one in whole}) == 2


def test_traces_that_are_asked_for_and_cannot_be_sent_are_refused(monkeypatch):
    Spans.of_variables({}).close()
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter", None)
    with pytest.raises(SettingsError, match=r"pip install 'hillinfer\[otel\]'"):
        Spans.of_variables({ENDPOINTS[0]: "http://127.0.0.1:4318"})
