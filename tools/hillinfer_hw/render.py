# SPDX-License-Identifier: Apache-2.0
"""Renders the hardware's templates from a kernel spec."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from hillinfer_model.hardware_spec import check_hardware_spec
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.status_beat import HASH_BYTES

HARDWARE = Path(__file__).resolve().parents[2] / "hw"
# How a language says that the next line is line {line} of {file}; others have no such mark.
_LINE_MARKS = {
    ".cpp": '#line {line} "{file}"',
    ".h": '#line {line} "{file}"',
    ".sv": '`line {line} "{file}" 0',
}
_STATEMENT_END = re.compile(r"%\}\s*$")


def render(template: Path, spec: KernelSpec, **values: Any) -> str:
    """Render one template, with marks that make a compiler's messages name the template's lines.

    Parameters
    ----------
    template
        A file `NAME.SUFFIX.j2` below `hw/`.
    spec
        Checked before anything is rendered; the template sees it as `spec`, and the number in its
        hash's first 8 bytes, little-endian, as `spec_hash`.
    values
        More names for the template.

    Raises
    ------
    HardwareSpecError
        Where no kernel is built for the spec.
    jinja2.UndefinedError
        Where the template uses a name that nobody defined.
    jinja2.TemplateSyntaxError
        Where it is not a template; file name and line are the template's.
    """
    check_hardware_spec(spec)
    spec_hash = int.from_bytes(spec.digest()[:HASH_BYTES], "little")
    compiled = _environment(template.parent).get_template(template.name)
    return compiled.render(spec=spec, spec_hash=spec_hash, **values)


def display_name(template: Path) -> str:
    """Return how messages name a template: from the repository's root where it lies in it."""
    root = HARDWARE.parent
    return template.relative_to(root).as_posix() if template.is_relative_to(root) else str(template)


@cache
def _environment(folder: Path) -> jinja2.Environment:
    """Return what compiles a folder's templates, each once until its text changes."""
    return jinja2.Environment(
        loader=_MarkedLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


class _MarkedLoader(jinja2.BaseLoader):
    """Loads templates of one folder and marks the lines that rendering moves."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str, Any]:
        path = self._folder / template
        if not path.is_file():
            raise jinja2.TemplateNotFound(template)
        text = path.read_text(encoding="utf-8")

        def is_unchanged() -> bool:
            return path.is_file() and path.read_text(encoding="utf-8") == text

        return _mark_lines(text, path), str(path), is_unchanged


def _mark_lines(source: str, template: Path) -> str:
    """Put a line mark at the top and behind every line that ends with a Jinja statement.

    The marks share the line of the statement in the template, so that Jinja's own line numbers
    stay right: trim_blocks would eat a line break, and `{{ }}` puts it back.
    """
    mark = _LINE_MARKS.get(Path(template.stem).suffix)
    if mark is None:
        return source
    file = display_name(template)
    lines = source.split("\n")
    marked = []
    for number, line in enumerate(lines, start=1):
        if _STATEMENT_END.search(line):
            text = mark.format(line=number + 1, file=file)
            marked.append(line + "{{ " + repr(text + "\n") + " }}{% if true %}{% endif %}")
        else:
            marked.append(line)
    first = mark.format(line=1, file=file) + "\n"
    return "{{ " + repr(first) + " }}" + "\n".join(marked)
