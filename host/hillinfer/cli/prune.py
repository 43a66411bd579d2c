# SPDX-License-Identifier: Apache-2.0
"""`--prune` of `hillinfer generate`, and `hillinfer prune-profile`, which finds a schedule."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hillinfer.cli.console import error_console, quiet_transformers
from hillinfer.errors import HillInferError, SettingsError, without_python_names
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.pruning.schedule import RANKER_NAMES, Schedule
from hillinfer.system.files import prepare_report, write_whole
from hillinfer.system.machine import NumberType
from hillinfer.values import check_threads

if TYPE_CHECKING:
    from hillinfer.generate.answering import Answering
    from hillinfer.pruning.reading import Pruning

# --- `--prune` ---

AUTO = "auto"
PruneOption = Annotated[
    str | None,
    typer.Option(
        help="Deeper layers see fewer tokens of the prompt: a schedule such as 15:50% or "
        "15:mass=97%, auto for what hillinfer prune-profile found of this model; see "
        "docs/pruning.md."
    ),
]
RankerOption = Annotated[
    str, typer.Option(help=f"By which --prune chooses blocks: {', '.join(RANKER_NAMES)}.")
]


@dataclass(frozen=True)
class PruneUse:
    """How a run reads its prompts in stages.

    `schedule` is as `Schedule.parse` takes it, or `auto`; `ranker` names the rule that chooses
    blocks. Raises SettingsError where either is unknown, or the schedule keeps by weights and the
    rule has none.
    """

    schedule: str
    ranker: str

    def __post_init__(self) -> None:
        if self.ranker not in RANKER_NAMES:
            raise SettingsError(
                f"--prune-ranker {self.ranker}: choose one of {', '.join(RANKER_NAMES)}"
            )
        if self.schedule == AUTO:
            return
        schedule = Schedule.parse(self.schedule)
        if any(cut.weighs for cut in schedule.cuts):
            # Before a model is loaded; torch loads for these alone.
            from hillinfer.pruning.rankers import check_weights, make_ranker

            check_weights(schedule, make_ranker(self.ranker))

    @property
    def is_found(self) -> bool:
        """Whether schedule and rule are those that a profile found."""
        return self.schedule == AUTO

    @property
    def bands(self) -> int:
        """How many bands of layers have fewer tokens; `auto` takes one cut, or none."""
        return 1 if self.schedule == AUTO else len(Schedule.parse(self.schedule).cuts)

    def begin(self, model: Any, chunk_tokens: int, say: Callable[[str], None]) -> Pruning | None:
        """Let a model read in stages; None where `auto` finds no evidence, which is said.

        The model is attached, and its caches then have bands; `chunk_tokens` go through its deeper
        layers at once; `say` takes a line for people.
        """
        from hillinfer.pruning.passes import LaterTurns
        from hillinfer.pruning.profile import found_schedule
        from hillinfer.pruning.rankers import make_ranker
        from hillinfer.pruning.reading import Pruning

        schedule, ranker = self.schedule, self.ranker
        if schedule == AUTO:
            found = found_schedule(model)
            if found is None:
                say(
                    "prune: nothing is known of these weights that would keep their answers, so "
                    "nothing is pruned: run hillinfer prune-profile with the model once, and give "
                    "--prune its schedule where --projections changes weights"
                )
                return None
            schedule, ranker = found
            say(f"prune: {schedule}, as prune-profile found ({ranker})")
        parsed = Schedule.parse(schedule)
        return Pruning(model, parsed, make_ranker(ranker), LaterTurns.KEEP, chunk_tokens)


# --- reading the rest of it ---


def complete_document(
    answering: Answering, console: Console, is_over: Callable[[], bool] = lambda: False
) -> bool:
    """Read a document whole that was read in stages, until it is over; what fails is said.

    Returns whether nothing failed.
    """
    before = answering.completed
    try:
        completed = answering.complete(is_over)
    except HillInferError as error:
        console.print(f"hillinfer: warning: not read whole: {without_python_names(str(error))}")
        return False
    if completed.is_whole and completed.seconds and completed != before:
        console.print(f"the document is read whole now, which took {completed.seconds:.1f} s")
    return True


class Completing:
    """Reads the document whole between questions, as far as that goes; a failure is said once."""

    def __init__(self, answering: Answering, console: Console) -> None:
        import torch

        self._answering, self._console = answering, console
        self._threads, self._is_broken = torch.get_num_threads(), False

    def __call__(self, is_over: Callable[[], bool]) -> None:
        """Go on with it, in a thread of its own, until it is over."""
        import torch

        # A new thread computes with as many as the machine has, and not with what was chosen.
        torch.set_num_threads(self._threads)
        if not self._is_broken:
            self._is_broken = not complete_document(self._answering, self._console, is_over)


# --- `hillinfer prune-profile` ---

_LEAST_TOKENS = 600


def prune_profile(
    model: Annotated[str, typer.Argument(help="Folder or name of a model.")] = DEFAULT_MODEL,
    *,
    documents: Annotated[int, typer.Option(help="Documents, with two numbers in each.")] = 10,
    tokens: Annotated[int, typer.Option(help="Of each document.")] = 2000,
    ranker: Annotated[str, typer.Option(help="Rule by which blocks are chosen.")] = "weights",
    dtype: Annotated[NumberType, typer.Option(help="Type to compute in.")] = NumberType.AUTO,
    threads: Annotated[int | None, typer.Option(help="Compute threads.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the evidence goes as JSON.")] = None,
) -> None:
    """Measure by which layer a model tells a prompt's blocks apart, and name a schedule."""
    if documents < 1:
        raise SettingsError(f"--documents {documents} must be at least 1")
    if tokens < _LEAST_TOKENS:
        raise SettingsError(
            f"--tokens {tokens} makes too few blocks to choose among: give {_LEAST_TOKENS} at least"
        )
    check_threads(threads)
    if out is not None:
        prepare_report(out, "--out")
    quiet_transformers()
    import torch

    from hillinfer.models.loader import load_model
    from hillinfer.pruning.profile import keep_evidence, make_profile, needle_document
    from hillinfer.pruning.rankers import make_ranker

    chosen = make_ranker(ranker)
    if threads is not None:
        torch.set_num_threads(threads)
    loaded = load_model(model, dtype)
    made = [needle_document(loaded.tokenizer, tokens, seed) for seed in range(documents)]
    found = make_profile(loaded.model, made, chosen, error_console().print)
    console = Console(markup=False, highlight=False, emoji=False)
    curve = Table("layer that decides", "least share of blocks, in nine of ten questions")
    for layer, share in enumerate(found.least_shares):
        curve.add_row(str(layer), f"{share:.0%}")
    console.print(curve)
    tried = Table("schedule", "right", "NLL", "FLOPs allow")
    for one in found.tried:
        right = f"{one.right} of {one.questions}"
        tried.add_row(one.schedule or "none", right, f"{one.nll:.2f}", f"x{one.flop_limit:.2f}")
    console.print(tried)
    print(f"schedule: {found.schedule or 'none: no schedule kept the answers of a whole read'}")
    told = {
        "label": "measured",
        "model": loaded.name,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "ranker": ranker,
        "documents": documents,
        "tokens": tokens,
        **asdict(found),
    }
    if out is not None:
        write_whole(out, json.dumps(told, indent=1).encode())
    try:
        keep_evidence(loaded.model, told)
    except (OSError, HillInferError) as error:
        error_console().print(f"hillinfer: warning: not kept for --prune auto: {error}")
