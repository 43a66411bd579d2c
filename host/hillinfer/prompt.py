# SPDX-License-Identifier: Apache-2.0
"""Token ids of a document and of questions about it, so that the document's come first."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from hillinfer.chat_template import rendered_chats
from hillinfer.errors import HillInferError

_SEPARATOR = "\n\n"
# Any text that no template and no document holds; it only marks where the question goes.
_QUESTION_PLACE = "\u2402hillinfer-question\u2403"


class PromptError(HillInferError):
    """A prompt is missing, unreadable, empty, or too long for the model."""


class PromptStyle(StrEnum):
    """Whether the prompt goes through the tokenizer's chat template."""

    AUTO = "auto"
    PLAIN = "plain"


class PromptForm(StrEnum):
    """What a prompt was made as: a style, once it is known whether there is a chat template."""

    CHAT = "chat"
    PLAIN = "plain"

    @classmethod
    def of(cls, tokenizer: Any, style: PromptStyle) -> PromptForm:
        """Return the form that a style takes with a tokenizer."""
        chat = style is PromptStyle.AUTO and bool(getattr(tokenizer, "chat_template", None))
        return cls.CHAT if chat else cls.PLAIN


class QuestionPrompt:
    """Questions about a document that was read before, which itself is not needed.

    Parameters
    ----------
    tokenizer
        A transformers tokenizer.
    form
        How the document became a prompt.

    Raises
    ------
    PromptError
        Where the chat template does not keep the user's text.
    """

    def __init__(self, tokenizer: Any, form: PromptForm) -> None:
        self._tokenizer = tokenizer
        self.form = form
        # What follows a question depends on no document, so any will do.
        self._after = self._around_question("text")[1]

    def question_ids(self, question: str) -> list[int]:
        """Return the ids that follow the document's.

        Raises
        ------
        PromptError
            Where the question is empty.
        """
        if not question.strip():
            raise PromptError("a question is empty: write it after --question")
        text = question.strip() + self._after
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _around_question(self, document: str) -> tuple[str, str]:
        if self.form is PromptForm.PLAIN:
            return f"{document}{_SEPARATOR}Question: ", "\nAnswer:"
        text = self._rendered(f"{document}{_SEPARATOR}{_QUESTION_PLACE}")
        parts = text.split(_QUESTION_PLACE)
        if len(parts) != 2:
            raise PromptError(
                "the chat template of this model does not keep the user's text: use "
                "--prompt-style plain"
            )
        return parts[0], parts[1]

    def _rendered(self, content: str) -> str:
        return rendered_chats(self._tokenizer, (content,))[0]


class DocumentPrompt(QuestionPrompt):
    """One document, and any number of questions about it.

    With a chat template document and question share one user turn. The text is cut where the
    question begins and both parts are tokenised by themselves, so the document's ids are a prefix
    of every question's prompt and its cache can be forked.

    Parameters
    ----------
    tokenizer
        A transformers tokenizer.
    document
        The text, not empty.
    style
        AUTO uses the chat template where the tokenizer has one.

    Raises
    ------
    PromptError
        Where the document is empty or the chat template does not keep it as it is.
    """

    def __init__(
        self,
        tokenizer: Any,
        document: str,
        style: PromptStyle = PromptStyle.AUTO,
    ) -> None:
        if not document.strip():
            raise PromptError("the prompt is empty: give a text with --prompt-file or --prompt")
        super().__init__(tokenizer, PromptForm.of(tokenizer, style))
        self._document = document
        self._before, self._after = self._around_question(document)

    def alone(self) -> list[int]:
        """Return the ids of the document as the whole prompt."""
        chat = self.form is PromptForm.CHAT
        return self._start_ids(self._rendered(self._document) if chat else self._document)

    def document_ids(self) -> list[int]:
        """Return the ids that every question's prompt starts with."""
        return self._start_ids(self._before)

    def _start_ids(self, text: str) -> list[int]:
        # A chat template writes its special tokens itself; plain text needs the tokenizer's own.
        special = self.form is PromptForm.PLAIN
        return list(self._tokenizer(text, add_special_tokens=special).input_ids)
