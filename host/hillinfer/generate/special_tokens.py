# SPDX-License-Identifier: Apache-2.0
"""Special tokens in documents and questions, read as the characters they are written with."""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from hillinfer.errors import PromptError, one_line

_PLACEHOLDER_BYTES = 16
# Each round masks every match at once; only what masking itself brings together needs another.
_MOST_ROUNDS = 8
_MARK = re.compile(r"<.*>|\[.*\]|\{.*\}|\|.*\|", re.DOTALL)
_MAKE_TOKENS = "make tokens of the prompt"


class SpecialTokens(StrEnum):
    """How special tokens in documents and questions are read."""

    TEXT = "text"
    CONTROL = "control"


@dataclass(frozen=True)
class MaskedText:
    """A text in which every special token is replaced by a word that nobody can guess.

    `spans` is what each of the words in `text` stands for.
    """

    text: str
    spans: Mapping[str, str] = field(default_factory=dict)

    def __add__(self, plain: str) -> MaskedText:
        """Append a text that is not masked."""
        return MaskedText(self.text + plain, self.spans)

    def with_text(self, text: str) -> MaskedText:
        """Return what a template made of it; PromptError where a masked token is not there once."""
        if self._words_of(text) != self._words_of(self.text):
            raise PromptError(
                "the chat template of this model changes special tokens in the user's text: use "
                "--prompt-style plain, or --special-tokens control"
            )
        return MaskedText(text, self.spans)

    def cut(self, at: str) -> list[MaskedText]:
        """Split it at a text."""
        return [MaskedText(part, self.spans) for part in self.text.split(at)]

    def unmasked(self, text: str) -> str:
        """Return a part of it with its special tokens."""
        if not self.spans:
            return text
        return self._pattern().sub(lambda found: self.spans[found.group()], text)

    def _words_of(self, text: str) -> Counter[str]:
        return Counter(self._pattern().findall(text)) if self.spans else Counter()

    def _pattern(self) -> re.Pattern[str]:
        # All words begin alike, so that one pass finds them, however many there are.
        start = next(iter(self.spans))[: 2 * _PLACEHOLDER_BYTES]
        return re.compile(re.escape(start) + r"[0-9a-f]{8}")


class TextEncoder:
    """Encodes prompts, whose template has control tokens and whose user's text has none.

    A text without special tokens is encoded by the tokenizer as it is. For others there is a twin
    of the tokenizer, the same but for the names of its control tokens, which are unguessable: the
    template's own tokens are given those names, and in the user's text they mean nothing. With
    CONTROL everything is left to the tokenizer, which is one of transformers.
    """

    def __init__(self, tokenizer: Any, reading: SpecialTokens) -> None:
        self._tokenizer = tokenizer
        self._reading = reading

    @one_line(_MAKE_TOKENS)
    def mask(self, text: str) -> MaskedText:
        """Mask every special token of a user's text.

        Raises PromptError where the tokenizer cannot read them as characters.
        """
        if self._reading is SpecialTokens.CONTROL or not self._may_hold_control(text):
            return MaskedText(text)
        if self._backend is None:
            raise PromptError(
                "the text has special tokens of this model, and its tokenizer, which is not a "
                "fast one, cannot read them as characters: take them out, or use "
                "--special-tokens control"
            )
        spans: dict[str, str] = {}
        for _ in range(_MOST_ROUNDS):
            found = self._control_spans(text)
            if not found:
                return MaskedText(text, spans)
            pieces, done = [], 0
            words = {original: word for word, original in spans.items()}
            for start, end, _ in found:
                original = text[start:end]
                word = words.setdefault(original, f"{self._secret}{len(words):08x}")
                spans[word] = original
                pieces += [text[done:start], word]
                done = end
            text = "".join([*pieces, text[done:]])
        raise _cannot_tell()

    def check_same_control(self, text: str, harmless: str) -> None:
        """Refuse a chat that has other control tokens than that of another, harmless text.

        A template that changes the user's text, by leaving something out, can make one of it.

        Raises PromptError then.
        """
        if self._reading is SpecialTokens.CONTROL or self._backend is None:
            return
        with one_line(_MAKE_TOKENS):
            own, others = (
                [token_id for _, _, token_id in self._control_spans(one)]
                for one in (text, harmless)
            )
        if own != others:
            raise PromptError(
                "the chat template of this model makes special tokens of the user's text: use "
                "--prompt-style plain, or --special-tokens control"
            )

    @one_line(_MAKE_TOKENS)
    def ids(self, masked: MaskedText, add_special_tokens: bool) -> list[int]:  # noqa: FBT001
        """Return the ids of a prompt.

        `masked` is the user's text within its template; `add_special_tokens` is as a tokenizer
        takes it. Raises PromptError where the user's text would become control tokens nevertheless.
        """
        if not masked.spans:
            given = self._tokenizer(masked.text, add_special_tokens=add_special_tokens)
            return list(given.input_ids)
        pieces, done = [], 0
        template = self._control_spans(masked.text)
        for start, end, token_id in template:
            pieces += [masked.unmasked(masked.text[done:start]), self._names[token_id]]
            done = end
        text = "".join([*pieces, masked.unmasked(masked.text[done:])])
        given = self._twin.encode(text, add_special_tokens=False).ids
        unknown = self._tokenizer.unk_token_id
        controls = [one for one in given if one in self._control and one != unknown]
        if controls != [one for _, _, one in template if one != unknown]:
            raise _cannot_tell()
        if not add_special_tokens:
            return list(given)
        return list(self._twin.encode(text, add_special_tokens=True).ids)

    @cached_property
    def _backend(self) -> Any:
        return getattr(self._tokenizer, "backend_tokenizer", None)

    @cached_property
    def _control(self) -> dict[int, Any]:
        """The tokens that text must not become, by id.

        Added tokens that are not marked special are control tokens where they look like marks, as
        `<think>` and `[INST]` do, or mark something in the chat template. Others are text: words of
        a trade, runs of spaces in models of code.
        """
        template = str(getattr(self._tokenizer, "chat_template", None) or "")

        def is_control(token: Any) -> bool:
            content = token.content.strip("\u2581 \t\r\n")
            if token.special or _MARK.fullmatch(content):
                return True
            return bool(content) and not content.isalnum() and content in template

        return {
            token_id: token
            for token_id, token in self._tokenizer.added_tokens_decoder.items()
            if is_control(token)
        }

    @cached_property
    def _secret(self) -> str:
        """What every word begins with that stands for a token: no text holds it by chance."""
        return secrets.token_hex(_PLACEHOLDER_BYTES)

    @cached_property
    def _names(self) -> dict[int, str]:
        return {token_id: secrets.token_hex(_PLACEHOLDER_BYTES) for token_id in self._control}

    def _may_hold_control(self, text: str) -> bool:
        if any(token.content in text for token in self._control.values()):
            return True
        # These are also found in other spellings, which the tokenizer alone knows.
        normalized = any(token.normalized for token in self._control.values())
        if self._backend is None or self._backend.normalizer is None or not normalized:
            return False
        return bool(self._control_spans(text))

    def _control_spans(self, text: str) -> list[tuple[int, int, int]]:
        """Return where the tokenizer finds control tokens: first and last place, and id."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        unknown = self._tokenizer.unk_token_id
        spans = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            token = self._control.get(token_id)
            if token is None:
                continue
            # What no token is known for becomes this one, too, and is text.
            if token_id == unknown and text[start:end].strip() != token.content:
                continue
            spans.append((start, end, token_id))
        return spans

    @cached_property
    def _twin(self) -> Any:
        from tokenizers import Tokenizer

        content = json.loads(self._backend.to_str())
        content["truncation"] = content["padding"] = None
        names = {token.content: self._names[i] for i, token in self._control.items()}
        for token in content["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = content["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(text, text): i for text, i in vocabulary.items()}
        else:
            model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
        if model.get("unk_token"):
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        if "merges" in model:
            model["merges"] = [one for one in model["merges"] if not _makes(one, names)]
        twin = Tokenizer.from_str(json.dumps(content))
        if any(twin.token_to_id(name) != token_id for token_id, name in self._names.items()):
            raise _cannot_tell()
        return twin


def _cannot_tell() -> PromptError:
    return PromptError(
        "the special tokens in the text cannot be told from text by this model's tokenizer: take "
        "them out, or use --special-tokens control"
    )


def _makes(merge: str | list[str], names: Mapping[str, str]) -> bool:
    """Say whether a merge takes or gives one of the renamed tokens."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    return any(part in names for part in (*parts, "".join(parts)))
