# SPDX-License-Identifier: Apache-2.0
"""What clients ask for: bodies of OpenAI's requests, checked field by field."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hillinfer.generate.tokens import Sampling
from hillinfer.serve.fields import Fields, checked_text
from hillinfer.serve.formats import (
    AskedFormat,
    asked_format,
    asked_tools,
    calls_as_text,
    with_tools,
)
from hillinfer.serve.refusals import ApiError, invalid

_MOST_CHOICES = 128
_MOST_STOPS, _MOST_STOP_LETTERS = 4, 1024
_MOST_BIASED = 1024
_MOST_TOP, _MOST_TOP_OF_TEXT = 20, 5
_MOST_TOKENS = 1 << 30
_MOST_TOP_K = 1 << 30
_SEEDS = 1 << 63
_COLDEST = 1e-5
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TOOL = "tool"

# Fields that OpenAI's clients send and this server does nothing for, with the values that ask for
# nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "best_of": (1,),
    "suffix": ("",),
    "reasoning_effort": (),
    "verbosity": (),
}
# Said by clients, and nothing that changes an answer.
_HARMLESS = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
)


@dataclass(frozen=True)
class AnswerWishes:
    """How answers are to be made.

    Parameters
    ----------
    sampling
        Of the first choice; the others have the seeds after it.
    most_tokens
        Of an answer; None for the server's own bound.
    stops
        Texts that end an answer and are no part of it.
    choices
        How many answers.
    top
        Most likely tokens that are told beside each one, with log-probabilities; None for none.
    bias
        What is added to logits, by token.
    presence, frequency
        What is taken from logits of tokens that the answer has, once and for each time.
    ends
        Whether the model's own end of an answer ends it.
    format
        Which texts answers may be; None for any.
    """

    sampling: Sampling
    most_tokens: int | None
    stops: tuple[str, ...]
    choices: int
    top: int | None
    bias: tuple[tuple[int, float], ...]
    presence: float
    frequency: float
    ends: bool
    format: AskedFormat | None = None


@dataclass(frozen=True)
class Delivery:
    """How answers are sent.

    Parameters
    ----------
    streamed
        As they come, or whole.
    told_usage
        Whether a stream ends with a chunk of usage.
    unknown
        Fields of the request that nobody knows.
    """

    streamed: bool
    told_usage: bool
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatRequest:
    """`POST /v1/chat/completions`; `messages` have `role`, `content` and `files` that they name."""

    model: str
    messages: tuple[Mapping[str, Any], ...]
    wishes: AnswerWishes
    delivery: Delivery


@dataclass(frozen=True)
class TextRequest:
    """`POST /v1/completions`; the prompt is a text or tokens, and `echo` repeats it."""

    model: str
    prompt: str | tuple[int, ...]
    echo: bool
    wishes: AnswerWishes
    delivery: Delivery

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of the prompt's own tokens are asked for."""
        return self.echo and self.wishes.top is not None


def chat_request(given: Mapping[str, Any]) -> ChatRequest:
    """Return what a body of a chat asks for.

    Raises
    ------
    ApiError
        Where a field is wrong or asks for what there is not.
    """
    fields = Fields(given)
    model = _model(fields)
    tools = asked_tools(fields)
    messages = tuple(with_tools(read_messages(fields), tools))
    wants_logprobs = fields.flag("logprobs")
    top = fields.whole("top_logprobs", None, 0, _MOST_TOP)
    if top is not None and not wants_logprobs:
        raise invalid("top_logprobs needs logprobs: set it to true", "top_logprobs")
    older = fields.whole("max_tokens", None, 1, _MOST_TOKENS)
    most = fields.whole("max_completion_tokens", older, 1, _MOST_TOKENS)
    wishes = _wishes(
        fields, (top or 0) if wants_logprobs else None, most, asked_format(fields, tools)
    )
    return ChatRequest(model, messages, wishes, _delivery(fields))


def text_request(given: Mapping[str, Any]) -> TextRequest:
    """Return what a body of a text completion asks for; errors as of `chat_request`."""
    fields = Fields(given)
    model = _model(fields)
    prompt = _prompt(fields)
    top = fields.whole("logprobs", None, 0, _MOST_TOP_OF_TEXT)
    echo = fields.flag("echo")
    # OpenAI's own bound for this route is 16.
    # Whoever asks for what a prompt's tokens are worth may want nothing behind it.
    least = 0 if echo and top is not None else 1
    most = fields.whole("max_tokens", 16, least, _MOST_TOKENS)
    wishes = _wishes(fields, top, most)
    return TextRequest(model, prompt, echo, wishes, _delivery(fields))


def read_messages(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """Return the messages of a chat: contents joined to one text, and files that come before it."""
    given = fields.take("messages")
    if not isinstance(given, list) or not given:
        raise fields.wrong("messages", given, "a list of one message at least")
    return tuple(_message(one, f"messages[{place}].") for place, one in enumerate(given))


def _model(fields: Fields) -> str:
    model = fields.text("model")
    if not model:
        raise invalid("model is missing: GET /v1/models lists them", "model", "missing_field")
    return model


# --- Prompts ---


def _message(given: object, place: str) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise invalid(f"{place[:-1]} must be an object", place[:-1])
    fields = Fields(given, place)
    role = fields.text("role")
    if role == _TOOL:
        return _result(fields)
    if role not in _ROLES:
        raise fields.wrong("role", role, f"one of {', '.join(_ROLES)}, {_TOOL}")
    content = fields.take("content")
    for field in ("function_call", "audio", "refusal"):
        fields.only(field, ([], ""))
    calls, said = fields.take("tool_calls"), ""
    if calls:
        if role != "assistant":
            raise fields.wrong("tool_calls", calls, "in messages of the assistant")
        said = calls_as_text(calls, f"{place}tool_calls.")
        content = "" if content is None else content
    files: list[str] = []
    if isinstance(content, list):
        parts = [
            _part(one, f"{place}content[{number}].", files) for number, one in enumerate(content)
        ]
        content = "\n".join(part for part in parts if part is not None)
    if not isinstance(content, str):
        raise fields.wrong("content", content, "a string or a list of parts")
    content = "\n".join(one for one in (content, said) if one) if said else content
    text = checked_text(content, fields.name("content"))
    return {"role": _ROLES[role], "content": text, "files": files}


def _result(fields: Fields) -> Mapping[str, Any]:
    """Return what a function gave back, as a turn of the user's, which every template knows."""
    fields.take("tool_call_id")
    content = fields.take("content")
    if isinstance(content, list):
        files: list[str] = []
        parts = [
            _part(one, f"{fields.name('content')}[{number}].", files)
            for number, one in enumerate(content)
        ]
        if files:
            raise fields.wrong("content", content, "texts: files come in messages of the user")
        content = "\n".join(part for part in parts if part is not None)
    if not isinstance(content, str):
        raise fields.wrong("content", content, "a string or a list of parts")
    text = checked_text(content, fields.name("content"))
    return {"role": "user", "content": f"The function returned: {text}", "files": []}


def _part(given: object, place: str, files: list[str]) -> str | None:
    """Return the text of a part; of a file its name is put with the others, and there is none."""
    if not isinstance(given, dict):
        raise invalid(f"{place[:-1]} must be an object", place[:-1])
    fields = Fields(given, place)
    if fields.take("type") == "file":
        file = fields.inner("file")
        name = file.text("file_id")
        file.only("file_data", ())
        if name is None:
            raise file.wrong("file_id", None, "the id of a file from POST /v1/files")
        files.append(name)
        return None
    fields.only("type", ("text",))
    text = fields.text("text")
    if text is None:
        raise fields.wrong("text", None, "a string")
    return text


def _prompt(fields: Fields) -> str | tuple[int, ...]:
    given = fields.take("prompt")
    # Some clients send a list of prompts with one in it.
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str):
        return checked_text(given, "prompt")
    if isinstance(given, list) and given and all(type(one) is int for one in given):
        if not all(0 <= one < _MOST_TOKENS for one in given):
            raise invalid("prompt has a number that is no token", "prompt")
        return tuple(given)
    if isinstance(given, list) and len(given) > 1 and isinstance(given[0], str | list):
        raise ApiError(
            400,
            "several prompts in one request are not supported: send one request for each",
            "unsupported_value",
            param="prompt",
        )
    raise fields.wrong("prompt", given, "a string or a list of tokens")


# --- Wishes ---


def _wishes(
    fields: Fields, top: int | None, most: int | None, form: AskedFormat | None = None
) -> AnswerWishes:
    temperature = fields.number("temperature", 1.0, 0.0, 2.0)
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    if top_p == 0 or temperature < _COLDEST:
        # The smallest set of tokens is the likeliest one, and logits over less are no numbers.
        temperature = 0.0
    top_k = fields.whole("top_k", 0, -1, _MOST_TOP_K) or 0
    seed = fields.whole("seed", None, -_SEEDS, _SEEDS - 1)
    given_seed = secrets.randbelow(_SEEDS) if seed is None else seed % _SEEDS
    sampling = (
        Sampling(seed=given_seed)
        if temperature == 0
        else Sampling(temperature, max(0, top_k), top_p, given_seed)
    )
    return AnswerWishes(
        sampling=sampling,
        most_tokens=most,
        stops=_stops(fields),
        choices=fields.whole("n", 1, 1, _MOST_CHOICES) or 1,
        top=top,
        bias=_bias(fields),
        presence=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        # What follows a form that is complete would be no part of it.
        ends=not fields.flag("ignore_eos") or form is not None,
        format=form,
    )


def _stops(fields: Fields) -> tuple[str, ...]:
    given = fields.take("stop")
    if given is None:
        return ()
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise fields.wrong("stop", given, f"a string or a list of at most {_MOST_STOPS}")
    if len(stops) > _MOST_STOPS:
        raise fields.wrong("stop", given, f"at most {_MOST_STOPS} strings")
    if any(not 0 < len(one) <= _MOST_STOP_LETTERS for one in stops):
        raise fields.wrong("stop", given, f"strings of 1 to {_MOST_STOP_LETTERS} characters")
    return tuple(checked_text(one, "stop") for one in stops)


def _bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    given = fields.take("logit_bias")
    if given is None:
        return ()
    if not isinstance(given, dict) or len(given) > _MOST_BIASED:
        raise fields.wrong("logit_bias", given, f"an object of at most {_MOST_BIASED} tokens")
    bias = []
    each = Fields(given, "logit_bias.")
    for name in given:
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise invalid("logit_bias has a name that is no token", "logit_bias")
        bias.append((int(name), each.number(name, 0.0, -100.0, 100.0)))
    return tuple(bias)


def _delivery(fields: Fields) -> Delivery:
    streamed = fields.flag("stream")
    options = fields.inner("stream_options")
    told_usage = options.flag("include_usage")
    options.only("include_obfuscation", (False, True))
    if fields.take("stream_options") is not None and not streamed:
        raise invalid("stream_options needs stream: set it to true", "stream_options")
    for field, allowed in _UNSUPPORTED.items():
        # A chat has read some of them.
        if field in fields.unknown:
            fields.only(field, allowed)
    for field in _HARMLESS:
        fields.take(field)
    return Delivery(streamed, told_usage, tuple(fields.unknown))
