# SPDX-License-Identifier: Apache-2.0
"""What the command's options are called in Python."""

from __future__ import annotations

import re

# Options that are settings of the same name, but for the hyphens.
_SETTINGS = (
    "alpha", "rule", "scope", "query", "shadow", "kept-sinks", "kept-recent", "max-selected",
    "dram-budget", "pool-policy", "pool-sizes", "pool-timeline", "trace", "cold-dir", "device",
    "beta", "beta-model", "xclbin", "pynq-python", "block-rows", "prefetch-blocks",
    "block-tokens", "io", "io-threads",
)  # fmt: skip
_OTHERS = {
    "dtype": "dtype of from_pretrained",
    "save-session": "cache.save_session",
    "session": "attachment.load_session",
}
_NAMES = {name: name.replace("-", "_") for name in _SETTINGS} | _OTHERS
_OPTION = re.compile(r"--([a-z]+(?:-[a-z]+)*)(?![\w-])(?! \([\w.]+ in Python\))")
_IN_PYTHON = re.compile(r" \(in Python: [^()]*\)")


def with_python_names(message: str) -> str:
    """Return a message that names options, and at its end what they are called in Python."""
    bare = without_python_names(message)
    options = dict.fromkeys(_OPTION.findall(bare))
    names = [_NAMES[option] for option in options if option in _NAMES]
    return f"{bare} (in Python: {', '.join(names)})" if names else bare


def without_python_names(message: str) -> str:
    """Return a message as the command shows it, whose users have the options."""
    return _IN_PYTHON.sub("", message)
