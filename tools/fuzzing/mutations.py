# SPDX-License-Identifier: Apache-2.0
"""Changes to JSON, bytes and text that programs tend to stumble over."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

# Stand for what json.dumps cannot write, and are replaced in its text.
_DEEP_LIST, _DEEP_OBJECT, _LONG_NUMBER = "@deep-list@", "@deep-object@", "@long-number@"

NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, 255, 256, 4097, 65_536, 10**6, 10**7, 10**9, 2**31, 2**32, 2**63, 2**64),
    *(-(2**31), -(2**63), 10**30, 0.5, -0.0, 1e-300, 1e300, 1e-7),
    *(float("nan"), float("inf"), float("-inf"), _LONG_NUMBER),
)
STRINGS: tuple[str, ...] = (
    *("", " ", "\0", "a", "A" * 5_000, "\ud800", "\u202e", "\x1b[31mred", "é", "💥", "\n", "null"),
    *("..", "../../../../etc/passwd", "/dev/zero", "/dev/stdin", "/proc/self/mem", "~", "$HOME"),
    *("{{ 7 * 7 }}", "%s%n", "__class__", "float64", "float16", "int8", "bfloat16", "auto"),
    *("torch.float32", "float8_e4m3fn", "llama", "gpt2", "llama4", "mamba", "t5", "qwen3", "opt"),
    *("LlamaForCausalLM", "sdpa", "eager", "flash_attention_2", "<e>", "<u>"),
)


def odd_value(rng: random.Random) -> Any:
    """Return a value of JSON that a reader may not expect."""
    kind = rng.randrange(7)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(STRINGS)
    if kind == 2:
        return rng.choice((None, True, False))
    if kind == 3:
        return [odd_value(rng) for _ in range(rng.randrange(4))]
    if kind == 4:
        return {rng.choice(STRINGS): odd_value(rng) for _ in range(rng.randrange(4))}
    if kind == 5:
        return rng.choice((_DEEP_LIST, _DEEP_OBJECT))
    return rng.randrange(-(2 ** rng.randrange(1, 70)), 2 ** rng.randrange(1, 70))


def near_value(rng: random.Random, value: Any) -> Any:
    """Return a value like one that is there, but not the same."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, value * 2, value // 2, -value, float(value)))
    if isinstance(value, float):
        return rng.choice((value * 2, -value, round(value) if abs(value) < 1e9 else 0, str(value)))
    if isinstance(value, str):
        place = rng.randrange(len(value) + 1)
        inserted = rng.choice(STRINGS)[:20]
        return rng.choice((value[:place], value[place:], value[:place] + inserted + value[place:]))
    if isinstance(value, list):
        return rng.choice((value[:-1], value * 2, value[::-1], [value]))
    if isinstance(value, dict):
        return list(value.items())
    return odd_value(rng)


def places_of(content: Any) -> list[tuple[Any, Any]]:
    """Return every place in JSON as its container and the key in it."""
    found: list[tuple[Any, Any]] = []
    waiting = [content]
    while waiting:
        own = waiting.pop()
        keys: Any = own.keys() if isinstance(own, dict) else range(len(own))
        for key in keys:
            found.append((own, key))
            if isinstance(own[key], dict | list):
                waiting.append(own[key])
    return found


def mutate_object(rng: random.Random, content: Any) -> Any:
    """Change a place or a few of a JSON object or list."""
    changed = copy.deepcopy(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = places_of(changed)
        if not places:
            return odd_value(rng)
        own, key = rng.choice(places)
        kind = rng.randrange(8)
        if kind < 3:
            own[key] = odd_value(rng)
        elif kind < 6:
            own[key] = near_value(rng, own[key])
        elif kind == 6:
            del own[key]
        elif isinstance(own, dict):
            own[rng.choice((*STRINGS, *own))] = rng.choice((odd_value(rng), own[key]))
        else:
            own.insert(key, odd_value(rng))
    return changed


def dump(rng: random.Random, content: Any) -> bytes:
    """Return JSON text, sometimes with a key twice, and with what json.dumps would not write."""
    text = json.dumps(content, ensure_ascii=rng.random() < 0.5)
    if isinstance(content, dict) and content and rng.random() < 0.08:
        key = rng.choice(list(content))
        text = "{" + f"{json.dumps(key)}: {json.dumps(odd_value(rng))}, " + text[1:]
    depth = rng.choice((100, 1_000, 100_000))
    text = text.replace(f'"{_DEEP_LIST}"', "[" * depth + "]" * depth)
    text = text.replace(f'"{_DEEP_OBJECT}"', '{"a":' * depth + "1" + "}" * depth)
    text = text.replace(f'"{_LONG_NUMBER}"', "9" * rng.choice((400, 5_000)))
    return text.encode("utf-8", "surrogatepass")


def mutate_json(rng: random.Random, data: bytes) -> bytes:
    """Change the content of a JSON file, or now and then its bytes."""
    if rng.random() < 0.1:
        return mutate_bytes(rng, data)
    return dump(rng, mutate_object(rng, json.loads(data)))


def mutate_bytes(rng: random.Random, data: bytes, within: int | None = None) -> bytes:
    """Flip bits, cut, splice lengths, or put in random blocks.

    Parameters
    ----------
    rng
        Of the choice.
    data
        What to change.
    within
        Changes begin before this place; anywhere where None.
    """
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        most = max(1, min(len(changed), within or len(changed)))
        place = rng.randrange(most)
        kind = rng.randrange(7)
        if not changed or kind == 0:
            changed[place:place] = rng.randbytes(rng.randrange(1, 40))
        elif kind in (1, 2):
            changed[place] ^= 1 << rng.randrange(8)
        elif kind == 3:
            del changed[place:]
        elif kind == 4:
            length = rng.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, len(data) * 2))
            form = rng.choice(("<I", "<Q"))
            packed = struct.pack(form, length % 2 ** (8 * struct.calcsize(form)))
            changed[place : place + len(packed)] = packed
        elif kind == 5:
            del changed[place : place + rng.randrange(1, 40)]
        else:
            block = rng.randbytes(rng.randrange(1, 40))
            changed[place : place + len(block)] = block
    return bytes(changed)


def mutate_text(rng: random.Random, text: str, pieces: tuple[str, ...]) -> str:
    """Put pieces into a text, or cut it."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.randrange(len(text) + 1)
        kind = rng.randrange(5)
        if kind < 3:
            text = text[:place] + rng.choice(pieces) + text[place:]
        elif kind == 3:
            text = text[:place] + text[place + rng.randrange(1, 12) :]
        else:
            text = rng.choice(pieces) + rng.choice(pieces)
    return text
