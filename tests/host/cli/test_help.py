# SPDX-License-Identifier: Apache-2.0
"""Help shows what people need, and all of it where they ask."""

import inspect
import re

import pytest

from hillinfer.cli import parsing
from hillinfer.cli.forms import documents, measuring
from hillinfer.cli.generate import SHOWN, generate
from hillinfer.cli.serving.chat import chat
from hillinfer.cli.serving.serve import SHOWN as SHOWN_OF_SERVE
from hillinfer.cli.serving.serve import serve

HELPS = {"--help", "--help-all"}
VERSION = re.compile(r"hillinfer(?: \d+\.\d+\.\d+|, of a checkout .*)\n")
COMMANDS = {"generate": (generate, SHOWN), "serve": (serve, SHOWN_OF_SERVE)}


def options(outcome):
    assert outcome.code == 0
    return set(re.findall(r"^  (--[a-z-]+)", outcome.out, re.MULTILINE)) - HELPS


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_twelve_options_and_all_where_asked_for(command, name):
    function, shown = COMMANDS[name]
    few, every = options(command(name, "--help")), options(command(name, "--help-all"))
    assert len(few) == 12 == len(shown - {"help_all"})
    assert few < every
    assert len(every) == len(inspect.signature(function).parameters.keys() - {"context"}) - 1
    # What was shown once stays as it is.
    assert options(command(name, "--help")) == few


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_shown_are_options_of_the_command(name):
    function, shown = COMMANDS[name]
    assert shown <= inspect.signature(function).parameters.keys()


def test_an_option_that_help_leaves_out_is_taken(command):
    line = command("generate", "--prompt", "a", "--beta-model", "nope").error_line()
    assert "beta_model" in line


def test_an_option_that_several_commands_have_is_defined_once():
    defined = {name: one for name, one in vars(parsing).items() if name.endswith("Option")}
    # What is named first is what typer would take for a default elsewhere.
    names = {one.__metadata__[0].default: one for one in defined.values()}
    assert len(names) == len(defined)
    users = dict.fromkeys(names, 0)
    others = {(generate, "--dram-budget"), (measuring.measure, "--model")}
    # A text that is stored has a budget of its own, commands of a store must have one, and their
    # seed is of places in a text.
    for function in (documents.put, measuring.put, measuring.measure):
        others |= {(function, "--dram-budget"), (function, "--store"), (function, "--seed")}
    for function in (generate, serve, chat, documents.put, measuring.put, measuring.measure):
        for one in inspect.signature(function, eval_str=True).parameters.values():
            option = f"--{one.name.replace('_', '-')}"
            # `generate` chooses a budget by itself where none is named.
            if option in names and (function, option) not in others:
                assert one.annotation == names[option], (function, option)
                users[option] += 1
    assert min(users.values()) >= 2


def test_the_version_and_short_help(command):
    told = command("--version")
    assert told.code == 0
    assert VERSION.fullmatch(told.out)
    assert command("-h").out == command("--help").out
    assert command("serve", "-h").out == command("serve", "--help").out
