# SPDX-License-Identifier: Apache-2.0
"""Whatever a user gets wrong ends in one line with the fix and exit code 2."""

import json
import os
import re
import shutil

import pytest

from hillinfer.cli.preflight import Surroundings
from hillinfer.drive.directories import DriveFacts
from hillinfer.drive.files import IOMode
from hillinfer.models.needs import Capacity


@pytest.fixture
def refuse(command, tiny_folder, cold_dir):
    """Generate from a short prompt with something wrong, and return the one line."""

    prompted = ("--prompt", "a cat sat on a mat")

    def run(*arguments, stdin="", model=tiny_folder, prompt=prompted, around=None):
        chosen = ("generate", "--model", model, "--cold-dir", cold_dir, *prompt, *arguments)
        outcome = command(*chosen, stdin=stdin, around=around)
        assert outcome.out == ""
        return outcome.error_line()

    return run


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--alpha", "1.5"), "alpha=1.5 must be above 0 and at most 1"),
        (("--alpha", "0"), "alpha=0.0 must be above 0"),
        (("--alpha", "nan"), "alpha=nan must be above 0"),
        (("--alpha", "much"), "alpha='much' is neither a number nor auto"),
        (("--dram-budget", "lots"), "'lots' is not a size: write it like 64MiB"),
        (("--dram-budget", "12parsecs"), "unknown unit 'parsecs'"),
        (("--dram-budget", "0"), "not a size above zero"),
        (("--dram-budget", "-5MiB"), "'-5MiB'"),
        (("--rule", "best"), "choose one of weight_sum, raw_sum"),
        (("--scope", "all"), "choose one of layer, kv_head"),
        (("--shadow", "int3"), "choose one of"),
        (("--shadow", "fp16"), "choose --device csim or xrt, or with device=nvme --shadow int8"),
        (("--dtype", "int8"), "int8"),
        (("--compare", "half"), "half"),
        (("--device", "floppy"), "device='floppy' is unknown: choose one of nvme, golden"),
        (("--beta", "much"), "beta='much' is neither a number nor auto"),
        (("--beta", "-1"), "beta=-1.0 must be 0 or more, Mc/Ms in whole segments, or auto"),
        (("--beta", "nan"), "beta=nan must be 0 or more"),
        (("--beta-model", "best"), "choose one of scores_then_rows, parallel, two_links"),
        (("--kept-recent", "0"), "kept_recent=0"),
        (("--max-selected", "0"), "max_selected=0 must be at least 1"),
        (("--block-rows", "0"), "block_rows=0 must be at least 1"),
        (("--prefill-chunk", "0"), "prefill_chunk=0 must be at least 1"),
        (("--max-new-tokens", "0"), "max_new_tokens=0 must be at least 1"),
        (("--threads", "0"), "threads=0 must be at least 1"),
        (("--temperature", "-1"), "temperature=-1.0 must be 0 (greedy) or above"),
        (("--temperature", "1", "--top-p", "0"), "top_p=0.0 must be above 0"),
        (("--temperature", "1", "--top-k", "-1"), "top_k=-1 must be 0"),
        (("--temperature", "1", "--seed", "-1"), "seed=-1 must be between 0"),
        (("--top-k", "5"), "set --temperature as well"),
        (("--question", " "), "a question is empty"),
        (("--question", "a", "--interactive"), "exclude each other"),
        (("--no-such-option",), "--no-such-option"),
    ],
    ids=lambda value: "-".join(value).strip("-") if isinstance(value, tuple) else None,
)
def test_bad_options(refuse, arguments, said):
    assert said in refuse(*arguments)


def test_prompt_file_missing(refuse, tmp_path):
    line = refuse(prompt=("--prompt-file", tmp_path / "nothing.txt"))
    assert "cannot read the prompt file" in line
    assert "nothing.txt: No such file or directory" in line


def test_prompt_file_is_a_directory(refuse, tmp_path):
    assert "Is a directory" in refuse(prompt=("--prompt-file", tmp_path))


def test_prompt_file_unreadable(refuse, tmp_path):
    if os.geteuid() == 0:
        # The superuser may read anything but this.
        unreadable = "/proc/self/mem"
    else:
        unreadable = tmp_path / "locked.txt"
        unreadable.write_text("secret")
        unreadable.chmod(0)
    assert "cannot read the prompt file" in refuse(prompt=("--prompt-file", unreadable))


def test_prompt_is_not_text(refuse, tmp_path):
    file = tmp_path / "picture.png"
    file.write_bytes(b"\x89PNG\xff\xfe")
    assert "is not UTF-8 text (byte 0)" in refuse(prompt=("--prompt-file", file))


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_prompt_empty(refuse, tmp_path, text):
    file = tmp_path / "empty.txt"
    file.write_text(text)
    assert "is empty" in refuse(prompt=("--prompt-file", file))
    assert "is empty" in refuse(prompt=(), stdin=text)
    assert "is empty" in refuse(prompt=("--prompt", text))


def test_prompt_given_twice(refuse):
    line = refuse(prompt=("--prompt", "a", "--prompt-file", "b"))
    assert "--prompt or with --prompt-file, not both" in line


def test_interactive_needs_standard_input_for_questions(refuse):
    assert "give the text with --prompt-file" in refuse("--interactive", prompt=(), stdin="text")


def test_prompt_longer_than_the_positions(refuse):
    # 2 template tokens around 4,090 characters, the model has 4,096 positions.
    line = refuse("--max-new-tokens", 4, prompt=("--prompt", "a" * 4090))
    assert "4093 prompt tokens and 4 new tokens are more than the model's 4096 positions" in line
    assert "shorten the prompt to 4092 tokens" in line


def test_prompt_and_answer_may_fill_the_positions(command, tiny_folder, cold_dir):
    # The twin of the test above, one token shorter.
    outcome = command(
        *("generate", "--model", tiny_folder, "--cold-dir", cold_dir, "--dram-budget", "64MiB"),
        *("--prompt", "a" * 4090, "--max-new-tokens", 3),
    )
    assert outcome.code == 0, outcome.err


def test_budget_smaller_than_kept_rows_and_buffers(refuse):
    line = refuse("--dram-budget", "64KiB")
    assert "the DRAM budget of 64.0 KiB is too small" in line
    assert "kept rows" in line
    assert "raise --dram-budget" in line


def test_cold_dir_missing(refuse, tmp_path):
    line = refuse("--cold-dir", tmp_path / "gone")
    assert "gone does not exist" in line
    assert "--cold-dir" in line


def test_cold_dir_is_a_file(refuse, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert "is no directory" in refuse("--cold-dir", file)


def test_cold_dir_cannot_be_written(refuse, tmp_path):
    if os.geteuid() == 0:
        # Modes do not stop the superuser, but nobody writes files here.
        closed = "/proc"
    else:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
    line = refuse("--cold-dir", closed)
    assert f"cannot keep the cold pool in {closed}" in line
    assert "choose a writable directory" in line


def test_cold_dir_full(refuse):
    def nearly_full(directory, calls):
        return DriveFacts(directory, "ext4", 100, IOMode.DIRECT)

    line = refuse(around=Surroundings(probe=nearly_full))
    assert "on the drive of the cold directory but 100 B is free" in line
    assert "--cold-dir" in line


def test_memory_too_small_names_the_largest_context(refuse):
    def measured(memory_bytes):
        small = Surroundings(measure=lambda drive, device: Capacity(memory_bytes, 1 << 40))
        return refuse("--prefill-chunk", 16, prompt=("--prompt", "a" * 3000), around=small)

    line = measured(1 << 20)
    assert "of memory (weights" in line
    assert "but 1.0 MiB is free" in line
    assert "none fits" in line
    # The budget is most of it, and grows with the context.
    needed = float(re.search(r"needs ([0-9.]+) MiB of memory", line).group(1))
    line = measured(int((needed - 0.2) * 2**20))
    largest = int(re.search(r"largest context that fits is (\d+) tokens", line).group(1))
    assert 0 < largest < 3128


def test_model_path_missing(refuse, tmp_path):
    assert "there is no model at" in refuse(model=tmp_path / "gone")


def test_model_is_no_model(refuse, tmp_path):
    assert "has no config.json" in refuse(model=tmp_path)
    file = tmp_path / "notes.txt"
    file.write_text("x")
    assert "give a folder or a .gguf file" in refuse(model=file)


def test_model_name_unknown(refuse):
    line = refuse(model="smollm9")
    assert "nor a registry model (smollm2-135m)" in line


def test_model_type_unknown(refuse, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    assert "the model type 'abacus', which transformers does not know" in refuse(model=tmp_path)


def test_model_config_broken(refuse, tmp_path):
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON in UTF-8" in refuse(model=tmp_path)


def test_model_without_weights(refuse, tmp_path, tiny_folder):
    for file in tiny_folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert "has no weights" in refuse("--dram-budget", "64MiB", model=tmp_path)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ('"num_hidden_layers": 2', "lack 9 tensors of its config"),
        ('"num_hidden_layers": 10000000', "it is 1 to 1024"),
    ],
)
def test_model_of_other_weights(setting, said, refuse, tmp_path, tiny_folder):
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    config = (model / "config.json").read_text()
    more = setting.replace(": 2", ": 3")
    (model / "config.json").write_text(config.replace('"num_hidden_layers": 2', more))
    assert said in refuse("--dram-budget", "64MiB", model=model)


def test_model_with_a_sliding_window(refuse, tmp_path, tiny_folder):
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 64}))
    assert "sliding" in refuse(model=tmp_path)


def test_fetching_an_unknown_name(command):
    line = command("fetch", "smollm9").error_line()
    assert "there is no registry model 'smollm9': the names are smollm2-135m" in line


def test_cache_home_cannot_be_made(command, monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert "set XDG_CACHE_HOME" in command("fetch").error_line()


def test_tokens_that_the_model_does_not_have(refuse, tmp_path, tiny_folder):
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["c"] = 4000
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = refuse("--dram-budget", "64MiB", "--prompt-style", "plain", model=model)
    assert "makes token 4000 of the prompt and the model has 61 tokens" in said
