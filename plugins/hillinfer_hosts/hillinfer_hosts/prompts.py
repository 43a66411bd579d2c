# SPDX-License-Identifier: Apache-2.0
"""The prompt of a request as stores know it: its tokens, and the keys of its prefixes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hillinfer.serve.rules import ApiKeys
from hillinfer.store.keys import group_keys, root_key
from hillinfer_model.kernel_spec import GROUP_TOKENS

CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
# What a replica needs to make the tokens of a request that it would answer.
_TOKENIZED = (
    "model",
    "messages",
    "prompt",
    "tools",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
)
# Chains of a prompt that nobody has announced: no namespace has this digest.
_NOBODY = bytes(32)


class SaltRule(StrEnum):
    """What keeps tenants apart at the replicas, so that the router makes the same keys."""

    BODY = "body"
    """`cache_salt` of the request, as vLLM takes it; none where it has none."""
    KEY = "key"
    """The API key, as `hillinfer serve` with keys takes it."""


@dataclass(frozen=True)
class Asked:
    """A request for an answer.

    Parameters
    ----------
    told
        Its body.
    salt
        Of its tenant.
    """

    told: Mapping[str, Any]
    salt: bytes

    @classmethod
    def read(cls, body: bytes, authorization: str, rule: SaltRule, base: bytes) -> Asked | None:
        """Return what a body asks; None where it is nothing that a router understands.

        Parameters
        ----------
        body, authorization
            Of the request; the latter is its header.
        rule
            Of the replicas.
        base
            Salt that replicas put before their tenants'.
        """
        try:
            told = json.loads(body)
        except (ValueError, RecursionError):
            return None
        if not isinstance(told, dict):
            return None
        own = told.get("cache_salt")
        if rule is SaltRule.BODY:
            # Half of a character, which JSON can say: no replica stores anything under it.
            salt = own.encode("utf-8", "surrogatepass") if isinstance(own, str) else b""
            return cls(told, base + salt)
        scheme, _, key = authorization.partition(" ")
        try:
            tenant = ApiKeys((key.strip(),)).tenant(key.strip()) if scheme else b""
        except Exception:
            # No key that a replica would let in.
            return None
        return cls(told, base + (tenant or b""))

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes in pieces."""
        return self.told.get("stream") is True

    @property
    def ids(self) -> tuple[int, ...] | None:
        """Token numbers where the prompt is given so; None where it has to be tokenized."""
        prompt = self.told.get("prompt")
        if isinstance(prompt, list) and prompt and all(type(one) is int for one in prompt):
            return tuple(prompt)
        return None

    def to_tokenize(self) -> dict[str, Any] | None:
        """Return what a replica's `/tokenize` is asked; None where there is no single prompt."""
        has_text = isinstance(self.told.get("prompt"), str)
        if not has_text and not isinstance(self.told.get("messages"), list):
            return None
        return {name: self.told[name] for name in _TOKENIZED if name in self.told}


@dataclass(frozen=True)
class Chains:
    """Keys of the prefixes of a prompt, as stores of each namespace have them.

    Parameters
    ----------
    ids, salt
        Of the prompt.
    keys
        By digest of the namespace.
    own
        Those that this router alone uses, of what it has sent where.
    """

    ids: tuple[int, ...]
    salt: bytes
    keys: Mapping[bytes, Sequence[bytes]]
    own: Sequence[bytes]

    @classmethod
    def of(cls, ids: Sequence[int], salt: bytes, namespaces: Sequence[bytes]) -> Chains | None:
        """Return the chains of a prompt; None where it has no full group, or a wrong number."""
        if len(ids) < GROUP_TOKENS:
            return None
        try:
            keys = {digest: group_keys(root_key(digest, salt), ids) for digest in namespaces}
            return cls(tuple(ids), salt, keys, group_keys(root_key(_NOBODY, salt), ids))
        except OverflowError:
            return None
