# SPDX-License-Identifier: Apache-2.0
"""Who is let in, how much is taken, and how every error is told."""

import contextlib
import importlib
import json
import pkgutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import openai
import pytest
from servers import CHAT, HTTP, running
from test_rooms import imported
from waiting import until

import hillinfer
from hillinfer.cli.serving import serve as serve_command
from hillinfer.errors import BudgetError, ColdPoolError, HillInferError, SettingsError
from hillinfer.serve.http.running import Server
from hillinfer.serve.refusals import INVALID, ROWS, api_error, row_of
from hillinfer.serve.rules import ApiKeys, ServerRules

KEY, OTHER = "sk-of-anna-0001", "sk-of-bert-0002"

# --- errors ---


def every_error():
    """Return every error class of the package."""
    for module in pkgutil.walk_packages(hillinfer.__path__, "hillinfer."):
        if not module.name.endswith("chat_template_child"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    found, open_ones = set(), [HillInferError]
    while open_ones:
        for one in open_ones.pop().__subclasses__():
            if one.__module__.split(".")[0] in ("hillinfer", "hillinfer_pynq"):
                found.add(one)
            open_ones.append(one)
    return found


def test_every_error_has_a_row():
    names = {one.__name__ for one in every_error()}
    assert len(names) > 20
    assert names - {*ROWS} == set()
    # A row of no class is one that was renamed.
    assert {*ROWS} - names <= {"PynqError"}


def test_an_error_without_a_row_is_a_defect():
    class NewError(HillInferError):
        pass

    class NewBudgetError(BudgetError):
        pass

    assert (row_of(NewError).status, row_of(NewError).code) == (500, "internal_error")
    assert row_of(NewBudgetError) is ROWS["BudgetError"]


def test_what_names_places_of_the_machine_is_not_told():
    place = "/nowhere/a-users-own"
    told = api_error(ColdPoolError(f"{place}/cold is gone"))
    assert (told.status, told.code, told.kind) == (503, "drive_failed", "server_error")
    assert place not in told.message
    assert place not in api_error(ValueError(place)).message
    full = ColdPoolError("full")
    full.__cause__ = OSError(28, "No space left")
    assert api_error(full).code == "drive_full"
    assert api_error(SettingsError("x=1 is odd")).message == "x=1 is odd"
    assert api_error(SettingsError("x")).kind == INVALID


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"model": "tiny", "messages": [' + b"1" * 5000 + b"]}", None),
        (b'{"model": "tiny", "messages": [1]}', "invalid_value"),
        (b"{}", "missing_field"),
        (b"\xff", "invalid_json"),
    ],
)
def test_bodies_that_are_none(tiny_server, body, code):
    answer = HTTP.post(f"{tiny_server.url}/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert code in (None, answer.json()["error"]["code"])


def test_the_client_s_own_exceptions(tiny_server, client):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=CHAT)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        tiny_server.ask("a cat " * 1000, client)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as longer:
        tiny_server.ask(CHAT, client, max_tokens=4090)
    assert longer.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError) as letters:
        tiny_server.ask("a" * 600_000, client)
    assert letters.value.code == "context_length_exceeded"


def test_a_failure_in_the_middle_costs_its_own_request_alone(tiny_server, client):
    class StruckError(RuntimeError):
        pass

    def strike(columns):
        if columns[1] > 1:
            raise StruckError("secret words of the prompt")

    tiny_server.passes.before = strike
    try:
        with pytest.raises(openai.InternalServerError) as failed:
            tiny_server.ask(CHAT, client)
        with pytest.raises(openai.APIError):
            list(tiny_server.ask(CHAT, client, stream=True))
    finally:
        tiny_server.passes.before = lambda columns: None
    assert failed.value.code == "internal_error"
    assert "secret" not in str(failed.value)
    assert len(tiny_server.logged("answer_failed")) >= 2
    assert tiny_server.ask(CHAT, client).usage.completion_tokens == 12


# --- keys ---


@pytest.fixture(scope="module")
def locked_server(tiny_folder, cold_dir):
    keys = ApiKeys([KEY, OTHER])
    with running(tiny_folder, cold_dir, keys=keys, queue=0, parallel=1, body_bytes=4096) as server:
        yield server


def test_a_key_is_asked_for(locked_server):
    for key in ("wrong-key-1", KEY[:-1], KEY + "0", "x"):
        with pytest.raises(openai.AuthenticationError) as refused:
            locked_server.ask(CHAT, locked_server.client(key))
        assert refused.value.code == "invalid_api_key"
    for key in (KEY, OTHER):
        assert locked_server.ask(CHAT, locked_server.client(key)).choices
    for path in ("/v1/models", "/metrics", "/version", "/nothing", "/openapi.json"):
        answer = HTTP.get(f"{locked_server.url}{path}")
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert HTTP.get(f"{locked_server.url}/health").status_code == 200
    assert not any(KEY in line for line in locked_server.lines)


def test_keys_have_tenants_of_their_own():
    keys = ApiKeys([KEY, OTHER])
    assert keys.tenant("wrong") is keys.tenant(None) is None
    assert len({keys.tenant(KEY), keys.tenant(OTHER)}) == 2
    assert keys.tenant(KEY) == ApiKeys([KEY]).tenant(KEY)
    assert KEY.encode() not in keys.tenant(KEY)
    assert ApiKeys().tenant("whatever") == b""


def test_keys_are_read(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{KEY}\n\n  {OTHER} \n")
    keys = ApiKeys.read(file, {"HILLINFER_API_KEY": "sk-of-carl-0003"})
    assert all(keys.tenant(one) for one in (KEY, OTHER, "sk-of-carl-0003"))
    for content in ("", "short\n", "with blanks in it\n"):
        file.write_text(content)
        with pytest.raises(SettingsError):
            ApiKeys.read(file, {})
    with pytest.raises(SettingsError, match="cannot read"):
        ApiKeys.read(tmp_path / "none", {})


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("most_files", one) for one in (0, (1 << 20) + 1)),
        *((one, wrong) for one in ("pause_seconds", "rest_seconds") for wrong in (0.0, -1.0)),
        *((one, float("inf")) for one in ("pause_seconds", "rest_seconds")),
    ],
)
def test_rules_that_mean_nothing_are_refused(name, wrong):
    with pytest.raises(SettingsError, match=f"{name}={wrong}"):
        ServerRules(**{name: wrong})


def test_no_door_stands_open():
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"):
        with pytest.raises(SettingsError, match="API key"):
            ServerRules(host=host)
        assert ServerRules(host=host, keys=ApiKeys([KEY])).host == host
    for host in ("127.0.0.1", "::1", "localhost"):
        assert ServerRules(host=host).is_local


def test_pages_of_other_places_are_kept_out(tiny_server):
    url = f"{tiny_server.url}/v1/models"
    own = tiny_server.url.removeprefix("http://")
    for headers, status in (
        ({"host": "evil.example"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": tiny_server.url}, 200),
        ({"host": own}, 200),
        ({"host": "localhost:1"}, 200),
    ):
        assert HTTP.get(url, headers=headers).status_code == status, headers


# --- limits ---


def test_a_body_that_is_too_large(locked_server):
    with pytest.raises(openai.APIStatusError) as refused:
        locked_server.ask("a" * 5000, locked_server.client(KEY))
    assert (refused.value.status_code, refused.value.code) == (413, "request_too_large")
    # Without a length the bytes are counted.
    answer = HTTP.post(
        f"{locked_server.url}/v1/chat/completions",
        content=(b"a" * 1000 for _ in range(6)),
        headers={"authorization": f"Bearer {KEY}"},
    )
    assert answer.status_code == 413
    assert HTTP.get(f"{locked_server.url}/health").status_code == 200


def test_a_full_queue(locked_server):
    held, client = threading.Event(), locked_server.client(KEY)
    locked_server.passes.before = lambda columns: held.wait(30)
    asked = threading.Thread(target=lambda: locked_server.ask(CHAT, client))
    asked.start()
    try:
        until(lambda: locked_server.inference.running)
        with pytest.raises(openai.RateLimitError) as refused:
            locked_server.ask(CHAT, locked_server.client(OTHER))
        assert refused.value.code == "queue_full"
        assert int(refused.value.response.headers["retry-after"]) > 0
    finally:
        held.set()
        asked.join()
        locked_server.passes.before = lambda columns: None
    assert locked_server.ask(CHAT, client).choices


def test_a_request_that_takes_too_long(endless_folder, cold_dir):
    with running(endless_folder, cold_dir, seconds=0.5) as server, server.client() as client:
        with pytest.raises(openai.APIStatusError) as late:
            server.ask(CHAT, client, max_tokens=4000)
        assert (late.value.status_code, late.value.code) == (504, "time_limit")
        # As the client was told, and no defect.
        (failed,) = server.logged("answer_failed")
        assert (failed["status"], failed["error"]) == (504, "time_limit")
        assert "detail" not in failed
        assert server.inference.is_idle


def test_an_answer_that_no_budget_holds(endless_folder, cold_dir):
    made = {"dram_budget": "1100KiB", "block_rows": 16}
    with running(endless_folder, cold_dir, made=made) as server, server.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            server.ask(CHAT, client, max_tokens=4000)
        assert refused.value.code == "context_length_exceeded"
        assert server.ask(CHAT, client).choices


def test_a_model_that_cannot_be_opened(tmp_path, cold_dir):
    with pytest.raises(HillInferError), running(tmp_path / "none", cold_dir):
        pass


def test_a_port_that_is_taken(tiny_server):
    port = int(tiny_server.url.rpartition(":")[2])
    with pytest.raises(SettingsError, match=r"cannot listen.*--port"):
        Server(ServerRules(port=port), lambda: None)


def test_a_port_that_is_taken_is_said_before_a_model_is_fetched(
    tiny_server, command, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    outcome = command("serve", "--port", tiny_server.url.rpartition(":")[2])
    assert "cannot listen" in outcome.error_line()
    assert "fetching" not in outcome.err
    # The twin: where the port is free, it is the model that is not there.
    outcome = command("serve", "--port", 0)
    assert "fetching" in outcome.err
    assert "cannot listen" not in outcome.err


def test_bytes_that_are_no_request(tiny_server):
    host, port = tiny_server.url.removeprefix("http://").split(":")
    for data in (
        b"\x00" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\n",
    ):
        with socket.create_connection((host, int(port))) as made:
            made.sendall(data)
    assert HTTP.get(f"{tiny_server.url}/health").status_code == 200


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=x"])
def test_a_client_that_leaves_within_its_body_is_no_failure(tiny_server, kind):
    host, port = tiny_server.url.removeprefix("http://").split(":")
    path = "/v1/files" if "form" in kind else "/v1/chat/completions"
    ended, failed = len(tiny_server.logged("request")), len(tiny_server.logged("failed"))
    with socket.create_connection((host, int(port))) as made:
        head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: {kind}\r\n"
        made.sendall(f"{head}content-length: 1000\r\n\r\n--x".encode())
    # Others that left before may be told of meanwhile.
    until(lambda: any(one["path"] == path for one in tiny_server.logged("request")[ended:]))
    assert len(tiny_server.logged("failed")) == failed


# --- the extra ---


def test_the_rest_of_the_package_imports_no_server():
    package = Path(hillinfer.__file__).parent
    theirs = ("fastapi", "starlette", "uvicorn", "prometheus_client")
    texts = {file: file.read_text() for file in package.rglob("*.py")}
    users = {
        str(file.relative_to(package).parent)
        for file, text in texts.items()
        # What does not name one imports none, and most files name none.
        if any(one in text for one in theirs)
        for name in imported(text)
        if name.split(".")[0] in theirs
    }
    assert users == {"serve/http"}
    # What is always imported does not import that in turn.
    program = "import sys, hillinfer.cli.main; print('hillinfer.serve.http' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_a_missing_extra_is_named(monkeypatch):
    # Python finds no module whose name stands for none.
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SettingsError, match=r"pip install 'hillinfer\[serve\]'"):
        serve_command.check_extra()


def test_log_lines_are_json(tiny_server):
    assert tiny_server.lines
    for line in tiny_server.lines:
        assert {"time", "level", "event"} <= set(json.loads(line))
