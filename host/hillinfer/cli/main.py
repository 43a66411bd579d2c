# SPDX-License-Identifier: Apache-2.0
"""The `hillinfer` command: its subcommands."""

from __future__ import annotations

from hillinfer.cli.doctor import doctor
from hillinfer.cli.fetch import fetch
from hillinfer.cli.generate import generate
from hillinfer.cli.models import models
from hillinfer.cli.program import Program
from hillinfer.cli.specs import specs

main = Program(
    "hillinfer",
    "Long-context LLM inference with the KV cache on a drive.",
    (generate, doctor, fetch, models, specs),
)
