# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share: each is named and explained once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hillinfer.generate.prompt import PromptStyle
from hillinfer.generate.special_tokens import SpecialTokens
from hillinfer.settings import Encryption
from hillinfer.system.machine import NumberType

# --- The model ---

ModelOption = Annotated[
    str,
    typer.Option(
        "--model", help="Registry name, folder, GGUF file, or organisation/name on the hub."
    ),
]
DtypeOption = Annotated[
    NumberType,
    typer.Option("--dtype", help="auto: the model's own, float32 where a CPU is slow at it."),
]
ThreadsOption = Annotated[int | None, typer.Option("--threads", help="Compute threads.")]
ProjectionsOption = Annotated[
    str,
    typer.Option(
        "--projections",
        help="How linear layers are computed: steps, stock, fused, rows, prepacked, fp16 or int8.",
    ),
]
PrefillChunkOption = Annotated[
    int, typer.Option("--prefill-chunk", help="Prompt tokens of one forward pass.")
]

# --- Texts ---

PromptStyleOption = Annotated[
    PromptStyle,
    typer.Option("--prompt-style", help="auto uses the model's chat template, plain does not."),
]
SpecialTokensOption = Annotated[
    SpecialTokens,
    typer.Option(
        "--special-tokens",
        help="Special tokens in texts and questions, like <|im_end|>: text reads them as "
        "characters, control obeys them.",
    ),
]

# --- Answers ---

MaxNewTokensOption = Annotated[
    int, typer.Option("--max-new-tokens", help="Most tokens of an answer.")
]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Of the random numbers.")]

# --- The cache ---

AlphaOption = Annotated[
    str,
    typer.Option(
        "--alpha",
        help="Share of the context that each step selects; auto: 0.2 where tokens come as codes, "
        "else 0.1.",
    ),
]
ExactOption = Annotated[
    str,
    typer.Option(
        "--exact",
        help="Share of the context that comes as 16-bit rows; what is selected beside it comes "
        "as 4-bit codes. 1 codes nothing; auto: 0.02 where codes gain something.",
    ),
]
ExactFloorOption = Annotated[
    int, typer.Option("--exact-floor", help="Tokens that come as rows at least.")
]
QueryOption = Annotated[
    str,
    typer.Option(
        "--query",
        help="Tokens are scored with the true query, or a predicted one so that reading "
        "overlaps with computing; auto: what suits the model's family.",
    ),
]
# Of one cache, or of all that a server has open at once.
BudgetOption = Annotated[
    str,
    typer.Option(
        "--dram-budget", help="Memory for the KV cache: 64MiB, 2GiB, or a share of it like 25%."
    ),
]
ColdDirOption = Annotated[
    Path | None,
    typer.Option("--cold-dir", help="Directory on the drive; by default in the user's cache."),
]
EncryptOption = Annotated[
    str,
    typer.Option(
        "--encrypt-cold-pool",
        help=f"{', '.join(Encryption)}; auto: yes beside an encrypted store.",
    ),
]

# --- The store ---

StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store",
        envvar="HILLINFER_STORE",
        help="Directory of a store: what it holds of a text is not read again, and what is read "
        "is stored; see hillinfer store.",
    ),
]
ReuseOption = Annotated[
    str,
    typer.Option(
        "--reuse",
        help="longest: all stored tokens, by groups of 64; exact: what gives the bits of a run "
        "that reads everything.",
    ),
]
