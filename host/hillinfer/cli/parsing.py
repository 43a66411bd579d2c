# SPDX-License-Identifier: Apache-2.0
"""Commands with subcommands, and the options that several commands share."""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from hillinfer.cli.console import shown_warnings
from hillinfer.cli.ending import carried, run_to_end
from hillinfer.errors import SettingsError
from hillinfer.generate.prompt import PromptStyle, check_text
from hillinfer.generate.special_tokens import SpecialTokens
from hillinfer.secrecy.key_sources import KEY_FILE, KEYRING, PASSPHRASE_FILE
from hillinfer.settings import Encryption
from hillinfer.system.machine import NumberType
from hillinfer.values import ByteSize

# --- All options of a command, where its help shows some ---


def _show_all(context: typer.Context, wanted: bool) -> None:  # noqa: FBT001 - typer calls it
    if wanted:
        # A copy: whoever asks for help later in this process sees what is short.
        shown: Any = copy.copy(context.command)
        shown.params = [copy.copy(one) for one in shown.params]
        for one in shown.params:
            one.hidden = False
        print(shown.get_help(context))
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all",
        is_eager=True,
        callback=_show_all,
        help="Show all options and exit.",
        show_default=False,
    ),
]
"""An option of commands that are given to a `Brief`."""


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it
    if wanted:
        try:
            print(f"hillinfer {version('hillinfer')}")
        except PackageNotFoundError:
            print("hillinfer, of a checkout that is not installed")
        raise typer.Exit


_Version = Annotated[
    bool,
    typer.Option(
        "--version",
        is_eager=True,
        callback=_show_version,
        help="Show the version and exit.",
        show_default=False,
    ),
]


@dataclass(eq=False)
class Program:
    """A command of this project.

    Each function of `commands` is a subcommand by its own name, each group has several behind a
    word, and what passes arguments on looks at none of them. `description` is the first line of its
    help, `beginning` what is said where no argument is given; the help where None.
    """

    name: str
    description: str
    commands: Sequence[Command]
    beginning: str | None = None

    def __call__(self, arguments: Sequence[str] | None = None, surroundings: object = None) -> None:
        """Run the command and end the process.

        What ends a command early becomes one line on standard error and the exit status that
        `ExitStatus` has for it. A defect shows its traceback where HILLINFER_TRACEBACK is set.
        Without arguments, those of the process are taken; `surroundings` are what a subcommand
        reaches outside of itself, this machine's where None.
        """
        # Threads that spin while they wait for each other make a busy machine several times slower,
        # and an idle one hardly faster. OpenMP reads this when torch is loaded, which is later.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        given = None if arguments is None else list(arguments)

        def command() -> object:
            with shown_warnings():
                return self.parser.main(
                    given, prog_name=self.name, standalone_mode=False, obj=surroundings
                )

        sys.exit(run_to_end(command))

    @functools.cached_property
    def parser(self) -> Any:
        """What reads arguments; made once, when first asked for: it looks at every option."""
        parser: Any = typer.main.get_command(_app(self.description, self.commands, self.beginning))
        for command in self.commands:
            if isinstance(command, Brief):
                command.hide(parser.commands[_word(command.command)])
        return parser


@dataclass(frozen=True)
class CommandGroup:
    """Subcommands that have a word before them.

    `name` is the word, `description` the first line of their help; each command has its own name.
    """

    name: str
    description: str
    commands: Sequence[Callable[..., None]]


@dataclass(frozen=True)
class PassingOn:
    """A subcommand whose arguments are another program's, its help too.

    `command` finds them in `args` of its context.
    """

    command: Callable[..., None]


@dataclass(frozen=True)
class Brief:
    """A subcommand whose help shows some of its options, and all where that is asked for.

    `command` has an option of the type `HelpAll`; `shown` names parameters, arguments left out.
    """

    command: Callable[..., None]
    shown: frozenset[str]

    def hide(self, parser: Any) -> None:
        """Leave the others out of the help of what reads the arguments."""
        for one in parser.params:
            one.hidden = one.param_type_name == "option" and one.name not in self.shown


Command = Callable[..., None] | CommandGroup | PassingOn | Brief
_ALL_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


def _app(
    description: str, commands: Sequence[Command], beginning: str | None = None
) -> typer.Typer:
    app = typer.Typer(
        help=description,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for command in commands:
        if isinstance(command, CommandGroup):
            app.add_typer(_app(command.description, command.commands), name=command.name)
        elif isinstance(command, PassingOn):
            app.command(
                _word(command.command), context_settings=_ALL_ARGUMENTS, add_help_option=False
            )(_carrying(command.command))
        elif isinstance(command, Brief):
            app.command(_word(command.command))(_carrying(command.command))
        else:
            app.command(_word(command))(_carrying(command))

    def begin(context: typer.Context, *, told_version: _Version = False) -> None:
        if context.invoked_subcommand is None:
            print(context.get_help() if beginning is None else beginning)

    app.callback(invoke_without_command=True, help=description)(begin)
    return app


def _word(command: Callable[..., None]) -> str:
    # A word that Python keeps for itself has a line behind it.
    return command.__name__.strip("_").replace("_", "-")


def _carrying(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose exceptions reach the end as they are."""

    @functools.wraps(command)
    def carrying(*args: object, **kwargs: object) -> None:
        try:
            command(*args, **kwargs)
        except BaseException as error:
            raise carried(error) from error

    return carrying


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

STORE_VARIABLE = "HILLINFER_STORE"
StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store",
        envvar=STORE_VARIABLE,
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
StoredName = Annotated[str, typer.Argument(help="As hillinfer store ls names it.")]
SizeOption = Annotated[
    str | None,
    typer.Option(
        "--store-size",
        envvar="HILLINFER_STORE_SIZE",
        help="Make the store where there is none yet, of this size, like 200GB.",
    ),
]


def checked_salt(salt: str) -> str:
    """Return a salt as it was given; PromptError where its bytes are not UTF-8."""
    check_text(salt, "--salt")
    return salt


SaltOption = Annotated[
    str,
    typer.Option(
        "--salt",
        envvar="HILLINFER_STORE_SALT",
        callback=checked_salt,
        help="Of a tenant: what is stored with another one is not found.",
    ),
]
AcceptOption = Annotated[
    str | None,
    typer.Option(
        "--store-accept",
        envvar="HILLINFER_STORE_ACCEPT",
        help="Take rows, too, that another engine made of the same model, vllm, and let it find "
        "those that are made here. They are rounded otherwise.",
    ),
]
KeyFileOption = Annotated[
    Path | None,
    typer.Option("--key-file", envvar=KEY_FILE, help="File with the key of an encrypted store."),
]
PassphraseOption = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        envvar=PASSPHRASE_FILE,
        help="File with the passphrase of an encrypted store.",
    ),
]
KeyringOption = Annotated[
    str | None,
    typer.Option(
        "--keyring",
        envvar=KEYRING,
        help="Entry of the system's keyring with the key of an encrypted store.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Directory = Annotated[
    Path, typer.Option("--store", envvar=STORE_VARIABLE, help="Directory of the store.")
]


def tell(told: Mapping[str, object], line: str, *, as_json: bool) -> None:
    """Print what a command did, as JSON or as a line."""
    print(json.dumps(dict(told), indent=2) if as_json else line)


def whole_bytes(given: str, option: str) -> int:
    """Return the bytes that an option names; `option` is it with an example, for the error.

    Raises SettingsError where it is no amount, or a share.
    """
    amount = ByteSize.parse(given).byte_count
    if amount is None:
        raise SettingsError(f"'{given}' is a share of nothing: give {option}")
    return amount
