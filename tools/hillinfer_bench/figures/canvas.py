# SPDX-License-Identifier: Apache-2.0
"""Figures without a display, and text that is safe in them."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hillinfer.errors import HillInferError
from hillinfer.system.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DOTS_PER_INCH = 120


class FigureError(HillInferError):
    """A picture cannot be drawn or written."""


def require_matplotlib() -> None:
    """Raise FigureError where matplotlib is missing, before anything is measured."""
    if find_spec("matplotlib") is None:
        raise FigureError("matplotlib is not installed: pip install 'hillinfer[figures]'")


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, in inches.

    Raises
    ------
    FigureError
        Where matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DOTS_PER_INCH, layout="constrained")


def plain_text(text: str) -> str:
    """Return text as a figure shows it letter by letter, a `$` begins no formula."""
    return text.replace("$", r"\$")


def save_figure(figure: Figure, file: Path) -> None:
    """Write a figure, as SVG where the name ends so, else as PNG, readable by its owner only.

    Raises
    ------
    FigureError
        Where the file cannot be written.
    """
    try:
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg" if file.suffix.lower() == ".svg" else "png")
        write_whole(file, drawn.getvalue())
    except OSError as error:
        raise FigureError(
            f"cannot write the picture to {file}: {error.strerror}; choose another --out"
        ) from error
