# SPDX-License-Identifier: Apache-2.0
"""Puts what the threaded simulation knows of pipelines into the text of the HLS C++.

The source stays as the synthesis tool reads it; only the copy that is compiled is changed, by its
pragmas (`hw/testbench/threads/pipelines.h` has what is put in).
"""

from __future__ import annotations

import re

_PIPELINED = re.compile(
    r"^( *)((?:while|for) \(.*\) \{\n)(#pragma HLS PIPELINE II=\d+.*\n)", re.MULTILINE
)
_DISTANCE = re.compile(
    r"#pragma HLS DEPENDENCE variable=(\w+) type=inter direction=RAW distance=(\d+) "
)
# `for`, because nothing else declares a variable that lives as long as the loop below it.
_STAGED = (
    r"\1for (hls_threads::Pipeline pipeline; pipeline.once();) "
    r"\2\3hls_threads::next_round();\n"
)


def with_stages(source: str) -> str:
    """Return C++ whose pipelined loops count their rounds, and whose promises are checked.

    Parameters
    ----------
    source
        A header or a rendered top.

    Raises
    ------
    ValueError
        Where a pragma stands at no loop, or names no array above it, in the form that is known.
    """
    pipelines = source.count("#pragma HLS PIPELINE")
    text, found = _PIPELINED.subn(_STAGED, source)
    if found != pipelines:
        raise ValueError(f"{pipelines - found} PIPELINE pragmas are not below the head of a loop")
    for name, distance in reversed(_DISTANCE.findall(text)):
        text = _watched(text, name, distance)
    return text


def _watched(text: str, name: str, distance: str) -> str:
    """Replace the declaration of the last array of that name above the last pragma on it."""
    pragma = f"#pragma HLS DEPENDENCE variable={name} type=inter"
    place = text.rindex(pragma)
    declaration = re.compile(rf"^( +)(\w+) {name}((?:\[\w+\])+);\n", re.MULTILINE)
    found = [match for match in declaration.finditer(text) if match.end() <= place]
    if not found:
        raise ValueError(f"DEPENDENCE names {name}, and no array of that name is above it")
    last = found[-1]
    indent, element, dimensions = last.groups()
    watched = f"{indent}hls_threads::Watched<{element}{dimensions}, {distance}> {name};\n"
    # The pragma has been read: what is left of it is a comment, so that an earlier one is next.
    rest = text[last.end() :].replace(pragma, f"// checked: {name}", 1)
    return text[: last.start()] + watched + rest
