# SPDX-License-Identifier: Apache-2.0
"""The measurement of decode on a GPU says so where there is none."""

import sys

import pytest
import torch

import gpu_bench


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run tools/gpu_bench.py")
def test_no_gpu_is_told_before_anything_is_built(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["gpu_bench.py", "--out", str(tmp_path / "gpu.json")])
    with pytest.raises(SystemExit) as ended:
        gpu_bench.main()
    assert ended.value.code == 2
    assert "no CUDA GPU" in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()
