# SPDX-License-Identifier: Apache-2.0
"""`hillinfer doctor` and the small commands."""

import gc
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from device_cases import plant
from made_xclbin import make
from transformers import LlamaConfig, LlamaForCausalLM

import hillinfer
from hillinfer.doctor.cards import find_xrt_library
from hillinfer.doctor.profile import SHAPES
from hillinfer.rates.kept_rates import KeptRates, Rates, RatesKey
from hillinfer.schedule.kept_windows import (
    DENSE_PASSES,
    PASSES_IN_MEMORY,
    KeptWindows,
    WindowKey,
    single_passes,
)
from hillinfer.schedule.windows import SlackTable
from hillinfer.settings import Settings

WITHOUT_TORCH = """
import importlib.metadata, importlib.util, sys
HIDDEN = ("torch", "transformers", "safetensors")
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hide())
real_spec, real_version = importlib.util.find_spec, importlib.metadata.version
importlib.util.find_spec = lambda name: None if name in HIDDEN else real_spec(name)
def version(name):
    if name in HIDDEN:
        raise importlib.metadata.PackageNotFoundError(name)
    return real_version(name)
importlib.metadata.version = version
from hillinfer.cli.main import main
main(sys.argv[1:])
"""


def findings_of(text):
    return {finding["name"]: finding for finding in json.loads(text)["findings"]}


def test_doctor_says_this_machine_is_ready(command, cold_dir):
    outcome = command("doctor", "--cold-dir", cold_dir)
    assert outcome.code == 0
    assert outcome.out.splitlines()[-1].startswith("ready")
    findings = findings_of(command("doctor", "--cold-dir", cold_dir, "--json").out)
    assert findings["python"]["found"] == ".".join(map(str, sys.version_info[:3]))
    assert findings["torch"]["verdict"] == findings["transformers"]["verdict"] == "ok"
    assert findings["native library"]["verdict"] == "ok"
    assert str(cold_dir) in findings["cold directory"]["found"]
    assert findings.keys() >= {"processor", "memory", "GPU", "model smollm2-135m", "g++"}
    # Without --xclbin nothing is loaded on a card.
    assert not {"xclbin", "xclbin on its card", "P2P read curve"} & findings.keys()


def test_doctor_names_the_fix_of_what_is_missing(command, tmp_path):
    outcome = command("doctor", "--cold-dir", tmp_path / "gone", "--json")
    assert outcome.code == 0
    assert json.loads(outcome.out)["ready"] is False
    finding = findings_of(outcome.out)["cold directory"]
    assert finding["verdict"] == "missing"
    assert "create it" in finding["fix"]
    outcome = command("doctor", "--cold-dir", tmp_path / "gone")
    assert outcome.out.splitlines()[-1].startswith("not ready")


def test_doctor_finds_no_optional_tool_on_an_empty_path(command, cold_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = findings_of(command("doctor", "--cold-dir", cold_dir, "--json").out)
    for name in ("g++", "Icarus Verilog", "protoc", "Vitis v++"):
        assert findings[name]["verdict"] == "not found"
        assert findings[name]["fix"]
    tool = tmp_path / "iverilog"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    findings = findings_of(command("doctor", "--cold-dir", cold_dir, "--json").out)
    assert findings["Icarus Verilog"] == {
        "name": "Icarus Verilog",
        "verdict": "ok",
        "found": str(tool),
        "fix": None,
    }


def test_doctor_says_whether_xrt_is_here(command, cold_dir, monkeypatch, tmp_path):
    """XRT is a library, so an empty path hides it from nobody."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("XILINX_XRT", raising=False)
    library = find_xrt_library()
    findings = findings_of(command("doctor", "--cold-dir", cold_dir, "--json").out)
    if library is None:
        assert findings["XRT"]["verdict"] == "not found"
        assert "setup.sh" in findings["XRT"]["fix"]
    else:
        assert findings["XRT"] == {
            "name": "XRT", "verdict": "ok", "found": library, "fix": None,
        }  # fmt: skip
    folder = tmp_path / "xrt" / "lib"
    folder.mkdir(parents=True)
    (folder / "libxrt_coreutil.so.2").write_bytes(b"")
    (tmp_path / "xrt" / "version.json").write_text('{"BUILD_VERSION": "2.99.1"}')
    monkeypatch.setenv("XILINX_XRT", str(tmp_path / "xrt"))
    findings = findings_of(command("doctor", "--cold-dir", cold_dir, "--json").out)
    assert findings["XRT"]["found"] == f"2.99.1 in {folder}"


def test_doctor_says_what_is_wrong_with_an_xclbin_and_is_ready_still(command, cold_dir, tmp_path):
    """Without the card `generate` runs on the drive alone."""
    path = tmp_path / "kernels.xclbin"
    path.write_bytes(make().pack()[:-1])
    outcome = command("doctor", "--cold-dir", cold_dir, "--xclbin", path, "--json")
    assert json.loads(outcome.out)["ready"] is True
    finding = findings_of(outcome.out)["xclbin"]
    assert (finding["verdict"], finding["found"]) == ("warning", "unusable")
    assert "cut short" in finding["fix"]
    outcome = command("doctor", "--cold-dir", cold_dir, "--xclbin", path)
    assert "warning  xclbin: unusable -> " in outcome.out
    assert outcome.code == 0


def test_doctor_says_which_rates_are_kept_and_measures_none(
    command, cold_dir, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = KeptRates.of_user()
    assert not any(
        name.startswith("rates")
        for name in findings_of(command("doctor", "--cold-dir", cold_dir, "--json").out)
    )
    assert not kept.file.exists()
    measured = ("cpu", 2, 1, "ext4", "1", "uring", "cd" * 32)
    key = RatesKey(*measured, "ab" * 32, "layer", 512, "xrt", "")
    kept.get(key, lambda: Rates(1e6, 2e6, 3e6, 4e6))
    found = findings_of(command("doctor", "--cold-dir", cold_dir, "--json").out)["rates of xrt"]
    assert (found["verdict"], found["fix"]) == ("ok", None)
    assert "fc 1.00 M tokens/s, fs 2.00 M" in found["found"]
    kept.file.write_text("{")
    outcome = command("doctor", "--cold-dir", cold_dir)
    assert "rates of xrt" not in outcome.out
    assert outcome.code == 0


@pytest.fixture
def _made_rates(monkeypatch, tmp_path, cold_dir):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape = SHAPES["llama-3.2-1b"].whole_kv_shape(2 * 8192)
    # Rows of a drive so slow that nothing else decides.
    plant(Rates(1e7, 0, 5e6, 1e3), shape, Settings(), cold_dir, "nvme")
    # Layers of a real model take half a minute to profile.
    for key in window_keys(shape, cold_dir):
        KeptWindows.of_user().keep(key, SlackTable.measured(lambda new, before: 0.02))


def window_keys(shape, cold_dir):
    kinds = (PASSES_IN_MEMORY, DENSE_PASSES, single_passes(cold_dir))
    return [WindowKey.of(torch.get_num_threads(), kind, shape) for kind in kinds]


@pytest.mark.usefixtures("_made_rates")
def test_doctor_profiles_a_plain_drive_when_asked_to(command, cold_dir):
    asked = ("doctor", "--cold-dir", cold_dir, "--profile", "llama-3.2-1b")
    outcome = command(*asked, "--context", 8192, "--dram-budget", "50%", "--json")
    assert outcome.code == 0
    found = findings_of(outcome.out)
    assert "fc 10.00 M tokens/s, fs none, Bc 5.00" in found["rates of nvme"]["found"]
    step = found["decode step of llama-3.2-1b"]["found"]
    assert "at 8192 tokens and 128.0 MiB of DRAM" in step
    # 16 layers' scoring alone; of more DRAM follows less.
    assert float(step.split()[2]) > 16 * 8192 / 1e7 * 1e3
    more = findings_of(command(*asked, "--context", 8192, "--dram-budget", "90%", "--json").out)
    assert float(more["decode step of llama-3.2-1b"]["found"].split()[2]) < float(step.split()[2])
    assert "predicted hides up to" in found["query"]["found"]
    assert "lost where both come at once" in found["drive rates"]["found"]
    windows = found["compute windows"]["found"]
    assert "behind 4096 tokens takes 20.00 ms for 64 new tokens in memory" in windows
    assert "0 points measured now, 0 left" in windows
    # 16 layers of 20 ms, and what the timetable says of the rows of the first.
    prefix = found["stored prefix"]["found"]
    seconds = float(re.search(r"take ([\d.]+) s", prefix)[1])
    waiting, _, read = (float(one) for one in re.findall(r"([\d.]+) ms", prefix))
    assert prefix.startswith("64 tokens behind 4096 stored ones take ")
    assert waiting >= read - 0.01 > 0
    assert 1e3 * seconds == pytest.approx(16 * 20 + waiting, abs=0.6)
    assert re.search(
        r"which leaves (no time to write|room to write [\d.]+ [KMG]iB) in slack", prefix
    )
    lines = command(*asked, "--context", 8192, "--dram-budget", "50%").out.splitlines()
    assert sum("--query predicted or true is yours to choose" in line for line in lines) == 1
    # What was kept stays; without being asked nothing is said of a step.
    plain = findings_of(command("doctor", "--cold-dir", cold_dir, "--json").out)
    assert "rates of nvme" in plain
    assert not {"query", "decode step of llama-3.2-1b"} & plain.keys()


def test_doctor_profiles_how_long_layers_compute_and_passes_correct_it(
    command, cold_dir, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = ("doctor", "--cold-dir", cold_dir, "--profile", "tiny", "--context", 1024)
    options = ("--dram-budget", "16MiB", "--json")
    memory, dense, singly = window_keys(SHAPES["tiny"].whole_kv_shape(2048), cold_dir)
    kept = KeptWindows.of_user()
    assert kept.table(dense) is None
    told = findings_of(command(*asked, *options).out)["compute windows"]["found"]
    measured = int(told.split(" points measured now")[0].split()[-1])
    assert 0 < measured <= 2 * 2 * 5 + 2
    assert "(2 layers, random weights, " in told
    for key, new in ((memory, (1, 16)), (dense, (1, 16)), (singly, (1,))):
        table = kept.table(key)
        assert all(table.window(one, before) > 0 for one in new for before in (0, 1024))
        # What is longer than the context stays unknown.
        assert table.window(16, 4096) is None
    before = kept.table(dense).seconds
    # Nothing that is known is measured again.
    told = findings_of(command(*asked, *options).out)["compute windows"]["found"]
    assert np.array_equal(kept.table(dense).seconds, before, equal_nan=True)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=64, max_position_embeddings=2048,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with hillinfer.attach(model, cold_dir=cold_dir) as hill, torch.no_grad():
        cache = hill.new_cache()
        for _ in range(3):
            model(torch.zeros(1, 64, dtype=torch.int64), past_key_values=cache)
        cache.close()
        del cache
        gc.collect()
    after = kept.table(dense).seconds
    assert not np.array_equal(after, before, equal_nan=True)
    # Only points near those passes moved.
    assert np.array_equal(after[:, 2:], before[:, 2:], equal_nan=True)


@pytest.mark.usefixtures("_made_rates")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--profile", "gpt-9"), "no shape is named 'gpt-9'; there are tiny"),
        (("--profile", "tiny", "--context", 0), "--context 0 is no number of tokens"),
        (("--profile", "tiny", "--dram-budget", "1KiB"), "is too small"),
        (("--profile", "tiny", "--dram-budget", "much"), "'much' is not a size"),
    ],
)
def test_doctor_refuses_what_it_cannot_profile(command, cold_dir, options, told):
    outcome = command("doctor", "--cold-dir", cold_dir, *options)
    assert outcome.code == 2
    assert told in outcome.err


def test_doctor_works_without_torch(cold_dir):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "doctor", "--json", "--cold-dir", str(cold_dir)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    findings = findings_of(done.stdout)
    assert findings["torch"]["verdict"] == "missing"
    assert findings["torch"]["fix"].startswith("pip install 'torch")
    assert findings["GPU"]["found"] == "unknown without torch"
    assert json.loads(done.stdout)["ready"] is False


def test_models_says_what_is_fetched(command, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    outcome = command("models")
    assert outcome.code == 0
    assert "missing: hillinfer fetch smollm2-135m" in outcome.out
    assert "Apache-2.0" in outcome.out


@pytest.mark.parametrize("name", ["generate", "doctor", "fetch", "models"])
def test_help_names_every_command(command, name):
    assert name in command("--help").out
    outcome = command(name, "--help")
    assert outcome.code == 0
    assert "Usage: hillinfer" in outcome.out


def test_no_command_says_the_three_things_to_do(command):
    outcome = command()
    assert outcome.code == 0
    for word in ("chat", "generate", "serve"):
        assert f"\n  hillinfer {word}" in outcome.out
    assert outcome.out.count("\n  hillinfer ") == 3
    assert "hillinfer --help" in outcome.out


def test_unknown_command_is_one_line(command):
    assert "'nope'" in command("nope").error_line()


def test_installed_script_is_this_command():
    script = Path(sys.executable).parent / "hillinfer"
    if not script.exists():
        pytest.skip("the hillinfer script is not installed: pip install -e .")
    done = subprocess.run([script, "models"], capture_output=True, text=True, check=True)
    assert "smollm2-135m" in done.stdout
