# SPDX-License-Identifier: Apache-2.0
"""What `make vllm-store` works out beside vLLM: shorter traces, hidden shares, why engines fail."""

import json

import pytest

from hillinfer_bench.traces.request_trace import Request
from vllm_store import __main__ as command
from vllm_store.engines import EngineError, Installed, Runs
from vllm_store.hiding import Hiding
from vllm_store.others import without_places
from vllm_store.trace import Shrunk

ROUND = {
    "stored": 0.30,
    "compute": 0.20,
    "read": 0.12,
    "first_layer": 0.02,
    "busy_compute": 0.30,
    "busy_read": 0.10,
    "busy_first_layer": 0.02,
}


def test_a_shrunk_trace_keeps_what_its_prompts_have_in_common():
    requests = [
        Request(0.0, 16 * 512, tuple(range(16))),
        Request(1.0, 16 * 512 + 256, (*range(12), *range(20, 25))),
        Request(2.0, 16 * 512 + 128, (*range(12), *range(20, 25))),
    ]
    shrunk = Shrunk.of(requests, 32)
    told = [json.loads(line) for line in shrunk.lines]
    assert [one["input_length"] for one in told] == [512, 512 + 16, 512 + 8]
    assert told[1]["hash_ids"] == [*range(12), *range(20, 25)]
    assert shrunk.prompt_tokens == 3 * 512 + 24
    # 12 blocks are six groups; of the third request all groups are known.
    assert shrunk.groups == 8 + 2
    assert shrunk.found == 384 + 512
    # The twin: requests that have nothing in common find nothing.
    other = [requests[0], Request(1.0, 8192, tuple(range(50, 66)))]
    assert Shrunk.of(other, 32).found == 0


def test_a_prompt_all_of_which_is_known_leaves_a_token_to_compute():
    requests = [Request(float(at), 512 * 8, tuple(range(8))) for at in range(2)]
    assert Shrunk.of(requests, 32).found == 128


def test_what_can_be_hidden_stands_beside_what_is():
    told = Hiding.of([dict.fromkeys(ROUND, 9.0), ROUND, ROUND], 2).told()
    assert told["rounds"] == 2
    # 0.02 of the first layer, then 0.38 of two cores' time behind it, computing's 0.2 at least.
    assert told["possible"] == pytest.approx(0.02 + 0.2)
    assert told["hidden_share"] == pytest.approx((0.2 + 0.12 - 0.3) / 0.12)
    assert told["hidden_possible"] == pytest.approx((0.2 + 0.12 - 0.22) / 0.12)
    # With one core both take their time one after the other.
    alone = Hiding.of([ROUND, ROUND], 1).told()
    assert alone["possible"] == pytest.approx(0.02 + 0.38)


def test_an_engine_that_fails_tells_its_last_error(tmp_path):
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        "echo 'ValueError: the first' >&2\n"
        "echo '(EngineCore pid=7) RuntimeError: no such block' >&2\n"
        "echo 'it ends' >&2\nexit 3\n"
    )
    python.chmod(0o755)
    installed = Installed(python, (), tmp_path)
    runs = Runs(installed, tmp_path / "ids", 1, 1, 30.0, tmp_path / "log")
    with pytest.raises(EngineError, match="RuntimeError: no such block"):
        runs.ask(None)
    python.write_text(
        "#!/bin/sh\necho 'RuntimeError: no connector' >&2\necho 'it goes on' >&2\n"
        'echo \'RESULT {"answers": [1], "rounds": []}\'\n'
    )
    assert runs.ask(None)["answers"] == [1]
    assert runs.said() == "RuntimeError: no connector"


@pytest.mark.parametrize("count", ["0", "1", "-3", "two"])
def test_rounds_without_a_median_are_refused(count, capsys):
    with pytest.raises(SystemExit):
        command.main(["--rounds", count])
    assert f"{count} rounds have no median: ask for 2 or more" in capsys.readouterr().err


def test_a_report_names_no_place_that_packages_come_from():
    line = "ERROR: no match for lmcache==1 (from https://user:word@index.example/simple/lmcache/)"
    assert without_places(line) == "ERROR: no match for lmcache==1 (from …"
    line = "ERROR: HTTPSConnectionPool(host='index.example', port=443): Max retries exceeded"
    assert "index.example" not in without_places(line)
    assert without_places("ERROR: no space left") == "ERROR: no space left"
