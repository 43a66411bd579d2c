# SPDX-License-Identifier: Apache-2.0
"""Rendering a model's chat template in bounded time and memory.

A template is a program that comes with the model. Loops in loops, a repeated text or a power of
numbers run for ever or take all memory, some of them in one step that nothing inside the
interpreter ends. So it is rendered in a process of its own with limits.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from hillinfer import chat_template_child
from hillinfer.errors import HillInferError

_SECONDS = 60
_SPARE_LETTERS, _TIMES = 1 << 20, 4


class TemplateError(HillInferError):
    """A model's chat template cannot be used."""


def rendered_chats(tokenizer: Any, contents: Sequence[str]) -> list[str]:
    """Return the chat of one user turn for each content, up to where the answer begins.

    The same as `apply_chat_template(..., tokenize=False, add_generation_prompt=True)` for each.

    Parameters
    ----------
    tokenizer
        A transformers tokenizer with a chat template.
    contents
        What the user says.

    Raises
    ------
    TemplateError
        Where the template fails, takes more than 3 seconds of computing or too much memory, or
        makes far more text than it is given.
    """
    special: dict[str, Any] = dict(tokenizer.special_tokens_map)
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise _unusable(" ".join(str(error).split())[:300]) from error
    if not isinstance(template, str):
        raise _unusable(f"it is {type(template).__name__} and no text")
    variables = {"tools": None, "documents": None, "add_generation_prompt": True, **special}
    most = [_TIMES * len(content) + _SPARE_LETTERS for content in contents]
    asked = {
        "template": template,
        "contents": list(contents),
        "variables": variables,
        "most": most,
    }
    answer = _answer(json.dumps(asked, default=str).encode())
    if "error" in answer:
        raise _unusable(" ".join(answer["error"].split()))
    texts: list[str] = answer["texts"]
    return texts


def _answer(asked: bytes) -> dict[str, Any]:
    try:
        done = subprocess.run(
            # Not isolated: jinja2 may lie where a variable says. But not where a user stands, nor
            # in the program's own folder, whose modules are no modules of Python.
            [sys.executable, "-P", chat_template_child.__file__], input=asked, cwd="/",
            capture_output=True, timeout=_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise _unusable(f"it takes more than {_SECONDS} seconds") from error
    except OSError as error:
        raise TemplateError(f"cannot start {sys.executable}: {error.strerror}") from error
    if done.returncode < 0:
        raise _unusable("it takes too long or too much memory")
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["it says nothing"]
        raise _unusable(said[-1][:300]) from error
    return answer


def _unusable(reason: str) -> TemplateError:
    return TemplateError(
        f"the chat template of this model cannot be used ({reason}): use --prompt-style plain"
    )
