# SPDX-License-Identifier: Apache-2.0
"""The tool behind `make peers`, with the peers that need no environment of their own."""

import importlib
import json
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[3] / "tools"
HERE = ("hillinfer", "transformers dynamic", "transformers static")
CONTEXTS = (48, 80)


@pytest.fixture(scope="module")
def tools():
    """Return a function that imports a module of tools/."""
    sys.path.insert(0, str(TOOLS))
    yield importlib.import_module
    sys.path.remove(str(TOOLS))


@pytest.fixture(scope="module")
def report(tools, tiny_folder, tmp_path_factory):
    made = tmp_path_factory.mktemp("peers")
    tools("peers_bench").main(
        [
            *("--model", str(tiny_folder), "--out", str(made / "peers.json"), "--rounds", "1"),
            *("--build", str(made), "--dtype", "float32", "--new-tokens", "4", "--threads", "1"),
            *("--contexts", *map(str, CONTEXTS), "--seconds", "900", "--peers", *HERE),
        ]
    )
    return json.loads((made / "peers.json").read_text())


def test_every_peer_has_a_row_per_context(report):
    assert report["skipped"] == {}
    assert [(row["peer"], row["context"]) for row in report["rows"]] == [
        (name, context) for name in HERE for context in CONTEXTS
    ]
    for row in report["rows"]:
        assert row["new_tokens"] == 4
        assert row["weights"] == "float32"
        assert row["kv"] == ("float16" if row["peer"] == "hillinfer" else "float32")
        assert 0 < row["step_ms"]["fastest"] <= row["step_ms"]["median"]
        assert row["ttft_seconds"]["fastest"] > 0
        assert row["decode_tokens_per_second"] == pytest.approx(1e3 / row["step_ms"]["median"])
    assert report["versions"].keys() == set(HERE)


def test_transformers_caches_agree(report):
    rows = [row for row in report["rows"] if row["peer"] != "hillinfer"]
    assert [row["equal_tokens"] for row in rows] == [4] * len(rows)


def test_crossovers_are_ours_beside_each_rival(report):
    assert report["crossovers_of_hillinfer"].keys() == set(HERE) - {"hillinfer"}


@pytest.mark.parametrize(
    ("ours", "theirs", "kind", "context"),
    [
        ((5, 5, 5), (6, 7, 8), "BELOW", 100),
        ((5, 5, 5), (4, 6, 8), "MEASURED", 150),
        ((5, 5, 5), (6, 4, 6), "MEASURED", 300),
        ((5, 5, 5), (1, 2, 3), "EXTRAPOLATED", 800),
        ((5, 6, 7), (1, 2, 3), "NONE", None),
    ],
)
def test_crossover(tools, ours, theirs, kind, context):
    module = tools("peers.crossover")
    found = module.Crossover.of((100, 200, 400), ours, theirs)
    assert found == module.Crossover(module.CrossoverKind[kind], context)


def process(tools, tmp_path, script, seconds=60):
    command = [sys.executable, str(script)]
    return tools("peers.peer_process").PeerProcess(command, 1, seconds, tmp_path / "log")


def skipped_error(tools):
    return tools("peers.peer_environment").PeerSkippedError


def test_a_worker_answers_an_error_and_goes_on(tools, tmp_path, tiny_folder):
    opening = {"op": "open", "model": str(tiny_folder), "threads": 1, "cache": "dynamic"}
    with process(tools, tmp_path, TOOLS / "peers/transformers_worker.py") as worker:
        with pytest.raises(skipped_error(tools), match="no_such_type"):
            worker.ask(opening | {"dtype": "no_such_type"})
        assert worker.ask(opening | {"dtype": "float32"})["kv"] == "float32"
        answer = worker.ask({"op": "run", "prompt": [1, 2, 3], "new_tokens": 3})
    assert len(answer["tokens"]) == 3
    assert len(answer["step_seconds"]) == 2


def test_a_worker_that_ends_or_hangs_is_told(tools, tmp_path):
    ends, hangs = tmp_path / "ends.py", tmp_path / "hangs.py"
    ends.write_text("raise SystemExit(3)")
    hangs.write_text("import sys\nfor line in sys.stdin: pass")
    with (
        process(tools, tmp_path, ends) as worker,
        pytest.raises(skipped_error(tools), match="ended without an answer"),
    ):
        worker.ask({"op": "open"})
    with (
        process(tools, tmp_path, hangs, seconds=0.5) as worker,
        pytest.raises(skipped_error(tools), match="no answer within 0 s"),
    ):
        worker.ask({"op": "open"})


def test_a_peer_that_cannot_be_installed_is_in_the_report(
    tools, tiny_folder, tmp_path, monkeypatch
):
    bench, peer = tools("peers_bench"), tools("peers.peer")
    monkeypatch.setattr(peer, "ROOT", tmp_path)
    requirements = tmp_path / "requirements"
    requirements.mkdir()
    (requirements / "vllm.txt").write_text(f"{tmp_path}/no_such_package\n")
    out = tmp_path / "peers.json"
    bench.main(
        [
            *("--model", str(tiny_folder), "--out", str(out), "--build", str(tmp_path / "build")),
            *("--dtype", "float32", "--contexts", "48", "--peers", "vllm", "--rounds", "1"),
        ]
    )
    report = json.loads(out.read_text())
    assert report["rows"] == []
    assert "vllm.txt cannot be installed" in report["skipped"]["vllm"]


def test_gguf_holds_the_models_weights(tools, tiny_folder, tmp_path):
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    file = tmp_path / "tiny.gguf"
    assert tools("peers.gguf_weights").write_gguf(model, "float32", file) == "float32"
    tensors = {one.name: one.data for one in gguf.GGUFReader(file).tensors}
    mlp = model.model.layers[1].mlp.up_proj.weight.detach().numpy()
    assert (tensors["blk.1.ffn_up.weight"] == mlp).all()
    query = model.model.layers[0].self_attn.q_proj.weight.detach()
    head_dim = model.config.head_dim
    # Rows i and i + head_dim/2 of a head are rotated together and lie side by side in GGUF.
    stored = tensors["blk.0.attn_q.weight"]
    assert (stored[1] == query[head_dim // 2].numpy()).all()
    assert not (stored[1] == query[1].numpy()).all()
