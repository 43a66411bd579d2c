# SPDX-License-Identifier: Apache-2.0
"""`hillinfer chat`: questions and answers about documents, in a terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hillinfer.cli.console import error_console, quiet_transformers, reading_view, show_text
from hillinfer.cli.generate import STEPS
from hillinfer.cli.parsing import (
    AlphaOption,
    BudgetOption,
    ColdDirOption,
    DtypeOption,
    KeyFileOption,
    KeyringOption,
    MaxNewTokensOption,
    ModelOption,
    PassphraseOption,
    PrefillChunkOption,
    SaltOption,
    SeedOption,
    SizeOption,
    StoreOption,
    TemperatureOption,
    ThreadsOption,
)
from hillinfer.cli.questions import typed_questions
from hillinfer.cli.serving.serve import ServeRequest
from hillinfer.cli.store import StoreUse, named_by
from hillinfer.errors import BrokenRunError, HillInferError, PromptError, without_python_names
from hillinfer.generate.prompt import read_text
from hillinfer.generate.tokens import Sampling
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.native.library import native_library
from hillinfer.secrecy.key_sources import key_source
from hillinfer.serve.requests import AnswerWishes
from hillinfer.serve.rules import ServerRules
from hillinfer.settings import AUTO, Settings
from hillinfer.system.files import cannot_write, prepare_report, write_whole
from hillinfer.system.machine import NumberType
from hillinfer.values import check_threads, format_bytes

if TYPE_CHECKING:
    from hillinfer.cli.serving.conversation import Conversation

_WORDS = {
    "/open FILE": "read a text; the next question is about it",
    "/save FILE": "write what was said",
    "/stats": "say what memory and drive did",
    "/new": "begin anew",
    "/help": "say this",
    "/exit": "end; so does an empty line",
}


def chat(
    files: Annotated[list[Path] | None, typer.Argument(help="Texts to talk about.")] = None,
    *,
    context: typer.Context,
    model: ModelOption = DEFAULT_MODEL,
    max_new_tokens: MaxNewTokensOption = 512,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    alpha: AlphaOption = AUTO,
    dram_budget: BudgetOption = "25%",
    cold_dir: ColdDirOption = None,
    prefill_chunk: PrefillChunkOption = 1024,
    dtype: DtypeOption = NumberType.AUTO,
    threads: ThreadsOption = None,
    store: StoreOption = None,
    store_size: SizeOption = None,
    salt: SaltOption = "",
    key_file: KeyFileOption = None,
    passphrase_file: PassphraseOption = None,
    keyring: KeyringOption = None,
) -> None:
    """Talk about texts; answers go to standard output, all else to standard error."""
    check_threads(threads)
    texts = [read_text(file, "the text", str(file)) for file in files or ()]
    sampling = Sampling(temperature=temperature, seed=seed)
    request = ServeRequest(
        model=model,
        number_type=dtype,
        settings=Settings().changed(alpha=alpha, dram_budget=dram_budget, cold_dir=cold_dir),
        rules=ServerRules(parallel=1, chunk_tokens=prefill_chunk, answer_tokens=max_new_tokens),
        store=StoreUse.of(
            store,
            store_size,
            "longest",
            salt,
            key_source(key_file, passphrase_file, keyring),
            named_by=named_by(context),
        ),
        threads=threads,
        projections=STEPS,
    )
    wishes = AnswerWishes(sampling, None, (), 1, None, (), 0.0, 0.0, ends=True)
    # Said before anything that takes time.
    native_library()
    quiet_transformers()
    from hillinfer.cli.serving.conversation import Conversation

    console = error_console()
    with request.opened(request.located()) as served:
        conversation = Conversation(served, wishes, max_new_tokens, reading_view(console))
        try:
            for text in texts:
                console.print(conversation.open(text).reading)
            console.print(f"{served.name}, {served.context_tokens} tokens of context; /help")
            Talk(conversation, console).run()
        finally:
            conversation.close()


class Talk:
    """Takes lines, which are questions or begin with a slash; all but answers goes to `console`."""

    def __init__(self, conversation: Conversation, console: Console) -> None:
        self._conversation, self._console = conversation, console
        self._words: dict[str, Callable[[str], None]] = {
            "/open": self._open,
            "/save": self._save,
            "/stats": self._stats,
            "/new": self._new,
            "/help": self._help,
        }

    def run(self) -> None:
        """Answer until standard input ends, an empty line comes, or a word for the end."""
        for line in typed_questions(self._console):
            word, _, rest = line.partition(" ")
            if word in ("/exit", "/quit"):
                return
            try:
                if word.startswith("/"):
                    self._words.get(word, self._unknown)(rest.strip())
                else:
                    self._answer(line)
            except KeyboardInterrupt as interrupt:
                # Other signals end the command.
                if str(interrupt) not in ("", "SIGINT"):
                    raise
                self._console.print(
                    f"{word if word.startswith('/') else 'the answer'} was interrupted; ask again, "
                    "or end with an empty line"
                )
            except BrokenRunError:
                raise
            except HillInferError as error:
                self._console.print(f"hillinfer: {without_python_names(str(error))}")

    def _answer(self, question: str) -> None:
        try:
            turn = self._conversation.ask(question, show_text)
        except KeyboardInterrupt:
            show_text("\n")
            raise
        show_text("\n")
        self._console.print(turn.answering)

    def _open(self, name: str) -> None:
        file = _file(name, "/open", "book.txt")
        turn = self._conversation.open(read_text(file, "the text", "/open"))
        self._console.print(turn.reading)

    def _save(self, name: str) -> None:
        file, what = _file(name, "/save", "talk.md"), "the conversation"
        said = [f"**{one['role']}**\n\n{one['content']}\n" for one in self._conversation.messages]
        try:
            if file.exists():
                raise PromptError(f"{file} is there already: name another file")
            prepare_report(file, "/save", what)
            write_whole(file, "\n".join(said).encode())
        except OSError as error:
            raise cannot_write(file, error, "/save", what) from error
        self._console.print(f"saved: {file}")

    def _stats(self, rest: str) -> None:
        counted = self._conversation.statistics()
        if counted is None:
            self._console.print("nothing was read yet")
            return
        rows = counted.hot_rows_read + counted.cold_rows_read
        self._console.print(
            f"KV cache {format_bytes(counted.kv_bytes)}, memory for it "
            f"{format_bytes(counted.dram_peak_bytes)} of {format_bytes(counted.dram_budget_bytes)};"
            f" {counted.hot_rows_read / rows if rows else 1:.0%} of selected rows were there, "
            f"{format_bytes(counted.cold_read_bytes)} read, {counted.drive_wait_seconds:.1f} s "
            "waited for the drive"
        )

    def _new(self, rest: str) -> None:
        self._conversation.forget()
        self._console.print("all is forgotten")

    def _help(self, rest: str) -> None:
        for word, told in _WORDS.items():
            self._console.print(f"{word}: {told}")

    def _unknown(self, rest: str) -> None:
        raise PromptError(f"there is no such word: {', '.join(_WORDS)}")


def _file(name: str, word: str, example: str) -> Path:
    """Return the file that a line names behind a word; PromptError where it names none."""
    if not name:
        raise PromptError(f"{word} needs a file: {word} {example}")
    if "\0" in name:
        raise PromptError(f"no file has the name {name!r}: name another")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise PromptError(f"{name} is in no home that is known here: name another file") from error
