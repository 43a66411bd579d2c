# SPDX-License-Identifier: Apache-2.0
"""Every setting and argument is taken as what it means, or refused in one line that names it."""

import dataclasses
import math

import numpy as np
import pytest
from generation_runs import attached
from tiny_models import TinyModel, prompts

import hillinfer
from hillinfer.errors import HillInferError, SettingsError, SetupWarning, UnsupportedFeatureError
from hillinfer.settings import Settings

NUMBERS = ("alpha", "beta", "exact")
COUNTS = (
    "kept_sinks",
    "kept_recent",
    "max_selected",
    "exact_floor",
    "block_rows",
    "prefetch_blocks",
    "block_tokens",
    "io_threads",
)
CHOICES = (
    *("rule", "scope", "query", "shadow", "pool_sizes", "beta_model", "io", "encrypt_cold_pool"),
)
NAMES = ("pool_policy", "device")
PATHS = ("pool_timeline", "trace", "cold_dir", "xclbin", "pynq_python")
SIZES = ("dram_budget",)
WRONG = {
    NUMBERS: (True, "a tenth", math.nan, -1, [0.1], 1j, 10**400, -(10**5000)),
    COUNTS: (True, 4.0, np.float32(4), "four", "4.0", -1, math.nan, [4], 10**19, 10**5000),
    CHOICES: (True, 1, 0.5, "anything", ["int4"]),
    NAMES: (True, None, 1, ["nvme"]),
    PATHS: (True, 1, "", ["a"]),
    SIZES: (
        True,
        None,
        0,
        -1,
        0.5,
        "much",
        "0",
        math.nan,
        [1],
        10**5000,
        "9" * 400,
        "9" * 400 + "%",
    ),
}
OPTIONAL = ("alpha", "beta", "exact", "max_selected", "shadow", *PATHS)


def test_every_setting_has_a_line_here():
    named = [name for names in WRONG for name in names]
    assert sorted(named) == sorted(one.name for one in dataclasses.fields(Settings))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for names, values in WRONG.items() for name in names for value in values),
        *((name, None) for names in (NUMBERS, COUNTS, CHOICES) for name in names
          if name not in OPTIONAL),
    ],
    # Python does not write out the longest of them.
    ids=lambda value: f"{value:.9}" if isinstance(value, str) else type(value).__name__,
)  # fmt: skip
def test_wrong_values_are_refused(name, value):
    for make in (lambda: Settings(**{name: value}), lambda: Settings().changed(**{name: value})):
        with pytest.raises(SettingsError) as refused:
            make()
        assert "\n" not in str(refused.value)
        assert name in str(refused.value) or str(value) in str(refused.value)
        assert len(str(refused.value)) < 700


@pytest.mark.parametrize(
    ("name", "value", "means"),
    [
        ("alpha", 1, 1.0),
        ("alpha", "0.25", 0.25),
        ("alpha", np.float32(0.5), 0.5),
        ("beta", "auto", None),
        ("beta", np.int64(2), 2.0),
        ("max_selected", None, None),
        ("max_selected", np.int32(7), 7),
        ("io_threads", "3", 3),
        ("dram_budget", np.int64(4096), hillinfer.ByteSize(4096)),
        ("dram_budget", "25%", hillinfer.ByteSize(share=0.25)),
        ("shadow", "auto", None),
        ("shadow", "int8", Settings(shadow="int8").shadow),
    ],
)
def test_values_of_other_types_mean_what_they_say(name, value, means):
    found = getattr(Settings().changed(**{name: value}), name)
    assert found == means
    assert type(found) is type(means)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"expected_tokens": 0}, r"expected_tokens=0 must be at least 1"),
        ({"expected_tokens": -5}, r"expected_tokens=-5 must be at least 1"),
        ({"expected_tokens": True}, r"expected_tokens=True must be a whole number"),
        ({"expected_tokens": "100"}, r"expected_tokens='100' must be a whole number"),
        ({"expected_tokens": 100.0}, r"expected_tokens=100\.0 must be a whole number"),
        ({"sequences": 0}, r"sequences=0 must be at least 1"),
        ({"sequences": None}, r"sequences=None must be a whole number"),
    ],
)
def test_arguments_of_new_cache(given, message, cold_dir):
    with attached(TinyModel().build(), cold_dir) as hill:
        with pytest.raises(SettingsError, match=message):
            hill.new_cache(**given)
        hill.new_cache(expected_tokens=np.int64(100)).close()


def test_what_is_attached(cold_dir):
    model = TinyModel().build()
    with pytest.raises(UnsupportedFeatureError, match=r"NoneType is no transformers model"):
        hillinfer.attach(None)
    with pytest.raises(UnsupportedFeatureError, match=r"LlamaModel|Linear is no transformers"):
        hillinfer.attach(model.lm_head)
    with pytest.raises(SettingsError, match=r"must be hillinfer.Settings, not dict.*alpha=0.1"):
        hillinfer.attach(model, {"alpha": 0.5})
    with attached(model, cold_dir) as hill, pytest.raises(SettingsError, match="directory=None"):
        hill.load_session(None)


# --- what messages call a setting ----------------------------------------------------------


def test_errors_say_what_an_option_is_called_in_python(cold_dir, least_budget):
    tiny = TinyModel()
    model, (ids, _) = tiny.build(), prompts([150])
    with attached(model, cold_dir, dram_budget=least_budget(tiny, 20)) as hill:
        with pytest.raises(HillInferError, match=r"--dram-budget.*in Python: dram_budget"):
            hill.new_cache(expected_tokens=4000)
        cache = hill.new_cache()
        rows = ids.repeat(40, 1)
        rows[:, 0] = rows.new_tensor(range(1, 41))
        named = r"--dram-budget, or .* sequences share it \(in Python: dram_budget\)$"
        with pytest.raises(HillInferError, match=named):
            model.generate(rows, past_key_values=cache, max_new_tokens=1)
        cache.close()


@pytest.mark.parametrize(
    ("shadow", "advice"),
    [("int8", "--shadow int4 or int2,"), ("int4", "--shadow int2,"), ("int2", None)],
)
def test_only_a_smaller_shadow_is_advised(shadow, advice, cold_dir):
    with attached(TinyModel().build(), cold_dir, shadow=shadow, dram_budget=100_000) as hill:
        with pytest.raises(HillInferError, match="raise --dram-budget") as refused:
            hill.new_cache(expected_tokens=4000)
        assert advice in str(refused.value) if advice else "--shadow" not in str(refused.value)


@pytest.mark.parametrize("name", [one.name for one in dataclasses.fields(Settings)])
def test_every_settings_option_has_its_python_name(name):
    option = "--" + name.replace("_", "-")
    assert str(HillInferError(f"change {option}")) == f"change {option} (in Python: {name})"


@pytest.mark.parametrize("kind", [HillInferError, SettingsError, SetupWarning])
@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("nothing is named", "nothing is named"),
        ("raise --alpha", "raise --alpha (in Python: alpha)"),
        (
            "lower --block-rows, or --shadow int4; --block-rows is best",
            "lower --block-rows, or --shadow int4; --block-rows is best"
            " (in Python: block_rows, shadow)",
        ),
        ("choose --io threads (io in Python)", "choose --io threads (io in Python)"),
        ("check --texts", "check --texts"),
        ("read it with --save-session", "read it with --save-session"
         " (in Python: cache.save_session)"),
    ],
)  # fmt: skip
def test_a_message_names_both(kind, message, shown):
    if "io in Python" in message:
        shown += " (in Python: io)"
    assert str(kind(message)) == shown
    # One message inside another has them once.
    assert str(kind(f"{kind(message)}")) == shown
