# SPDX-License-Identifier: Apache-2.0
"""The measurement of decode on a GPU says so where there is none."""

import pytest
import torch

import gpu_bench


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run tools/gpu_bench.py")
def test_no_gpu_is_told_before_anything_is_built(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        gpu_bench.main(["--out", str(tmp_path / "gpu.json")])
    assert ended.value.code == 2
    assert "no CUDA GPU" in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()


def test_a_contender_s_line_has_its_median_and_how_far_rounds_lie_apart(capsys):
    row = {"step_seconds": [0.1, 0.4, 0.2], "prefill_seconds": 3.0, "to_gpu_bytes": 3 << 20}
    gpu_bench.told("some rows", row)
    assert (row["median_seconds"], row["spread"]) == (0.2, 4)
    said = capsys.readouterr().out
    for text in ("some rows", "200.00 ms a token", "spread 4.00", "to the GPU 3.0 MiB"):
        assert text in said
