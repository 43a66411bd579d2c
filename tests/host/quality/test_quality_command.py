# SPDX-License-Identifier: Apache-2.0
"""`hillinfer-bench quality`, through its own entry point."""

import json

import pytest

from hillinfer_bench.cli.main import main

BITS = ("INT8", "INT4", "INT2")


@pytest.fixture
def quality(capfd, tiny_folder, tmp_path):
    """Run the command on the tiny model and return exit code, standard output and error."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"cat {i} sat on mat {i * 7 % 61}. " for i in range(40)))

    def run(*arguments):
        given = ["quality", "--model", tiny_folder, "--texts", text, "--context", 300]
        with pytest.raises(SystemExit) as ended:
            main([str(one) for one in [*given, "--last", 8, *arguments]])
        out, err = capfd.readouterr()
        return ended.value.code or 0, out, err

    return run


def test_a_table_and_a_report(quality, tmp_path):
    file = tmp_path / "new" / "quality.json"
    code, out, err = quality("--alpha", 0.3, "--alpha", 0.5, "--out", file, "--threads", 2)
    assert code == 0, err
    assert "text.txt: 152/152 tokens" in err
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines()]
    assert rows[2][:2] == ["1", "full cache"]
    names = [
        "float weights (ideal)",
        *(f"{rule} {bits}" for rule in ("weight_sum", "raw_sum") for bits in BITS),
        "pages of 16",
        "recent only",
    ]
    expected = [[alpha, name] for alpha in ("0.3", "0.5") for name in names]
    assert [row[:2] for row in rows[3:]] == expected
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["texts"] == ["text.txt"]
    assert (report["context"], report["last"], report["threads"]) == (300, 8, 2)
    assert [row["configuration"] for row in report["rows"][1:]] == names * 2


def test_threads_mix_nothing_up(quality, tmp_path):
    files = [tmp_path / f"{threads}.json" for threads in (1, 2)]
    for threads, file in enumerate(files, start=1):
        assert quality("--alpha", 0.3, "--threads", threads, "--out", file)[0] == 0
    one, two = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    assert one["threads"] != two["threads"]
    for mine, other in zip(one["rows"], two["rows"], strict=True):
        assert mine["configuration"] == other["configuration"]
        assert mine["perplexity"] == pytest.approx(other["perplexity"], rel=1e-4)
    # Rows differ by more than that, so that one in another's place would show.
    figures = [row["perplexity"] for row in one["rows"]]
    assert len({f"{figure:.4g}" for figure in figures}) >= 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--alpha", 0), "alpha=0.0 must be above 0"),
        (("--last", 300), "last=300 must be at least 1 and below context=300"),
        (("--last", 0), "last=0 must be at least 1"),
        (("--threads", 0), "threads=0 must be at least 1"),
        (("--context", 9000), "context=9000 is longer than the 4096 positions"),
        (("--context", 2000), "tokens but --context 2000 needs 2001"),
        (("--texts", "none.txt"), "cannot read the text none.txt"),
        (("--out", "/dev/null/quality.json"), "choose another --out"),
    ],
    ids=lambda value: value[0][2:] if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(arguments, message, quality):
    code, out, err = quality(*arguments)
    assert code == 2
    assert out == ""
    assert message in err
    lines = err.splitlines()
    assert sum("error" in line for line in lines) == 1
    assert lines[-1].startswith("hillinfer: error: ")
    assert "Traceback" not in err
