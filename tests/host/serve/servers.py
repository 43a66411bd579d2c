# SPDX-License-Identifier: Apache-2.0
"""Real servers with tiny models, each in threads of this process."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import httpx2
import openai
import torch
from generation_runs import SETTINGS
from tiny_folder import byte_tokenizer, save_tiny
from tiny_models import TinyModel
from transformers import AutoModelForCausalLM

from hillinfer.models.loader import load_model
from hillinfer.projections.attachment import ProjectionAttachment
from hillinfer.projections.ways import make_projections
from hillinfer.serve.http.running import Server, in_background
from hillinfer.serve.http.telemetry import Log
from hillinfer.serve.rules import ServerRules
from hillinfer.serve.served_model import StoreOfServer, served_model
from hillinfer.settings import Settings
from hillinfer.store.store import Store

CHAT = [{"role": "user", "content": "the cat sat on the mat"}]
CHUNK = 64
# Reading certificates that nobody needs would take longer than most requests.
HTTP = httpx2.Client(verify=False, timeout=60)


ROLES_AND_TEXTS = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
)


def save_bytes(folder, template=ROLES_AND_TEXTS):
    """Save a tiny random model of bytes, which says anything at all, and return its folder."""
    config = replace(TinyModel(), head_dim=16).config()
    config.vocab_size = 272
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<e>"})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


class Passes:
    """Counts forward passes of a model, and can hold them up or make them fail."""

    def __init__(self):
        self.count = 0
        self.columns = []
        self.before = lambda columns: None

    def put_on(self, model):
        forward = model.forward

        def counted(*args, **kwargs):
            ids = kwargs.get("input_ids", args[0] if args else None)
            self.count += 1
            self.columns.append(tuple(ids.shape))
            self.before(tuple(ids.shape))
            return forward(*args, **kwargs)

        model.forward = counted


@dataclass
class Running:
    """A server under way: its address, its log, its passes."""

    server: Server
    url: str
    lines: list = field(default_factory=list)
    passes: Passes = field(default_factory=Passes)

    def client(self, key="none", **options):
        own = openai.DefaultHttpxClient(verify=False)
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=key,
            max_retries=0,
            timeout=60,
            http_client=own,
            **options,
        )

    def ask(self, content, client=None, **options):
        """Return a chat's answer, greedily where nothing else is said."""
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        chosen = {"temperature": 0, "max_tokens": 12} | options
        return (client or self.client()).chat.completions.create(
            model="tiny", messages=messages, **chosen
        )

    @property
    def inference(self):
        return self.server.inference

    def logged(self, event):
        told = [json.loads(line) for line in self.lines]
        return [one for one in told if one["event"] == event]


@contextmanager
def running(
    folder,
    cold_dir,
    store=None,
    projections="stock",
    made=None,
    spans=None,
    counts=Passes.put_on,
    calls=None,
    tokenizer=lambda own: own,
    say=lambda line: None,
    **rules,
):
    """Run a server of a tiny model.

    A model whose passes are counted stores rows of its own: whoever wants those of a command has
    `counts` do nothing. `calls` are how it reaches the drive, `tokenizer` returns what the
    server has in the place of the model's own, and `say` is told lines for who started it.
    """
    lines, passes = [], Passes()
    allowed = ServerRules(**({"port": 0, "alias": "tiny", "chunk_tokens": CHUNK} | rules))
    settings = Settings().changed(cold_dir=cold_dir, **(SETTINGS | (made or {})))

    @contextmanager
    def opening():
        loaded = load_model(str(folder), say=lines.append)
        loaded = replace(loaded, tokenizer=tokenizer(loaded.tokenizer))
        steps = ProjectionAttachment(loaded.model, make_projections(projections)).steps
        counts(passes, loaded.model)
        stored = StoreOfServer(store) if isinstance(store, Store) else store
        with served_model(loaded, settings, allowed, stored, steps, calls) as served:
            yield served

    server = Server(allowed, opening, Log(lines.append), say, spans, calls)
    with in_background(server) as url:
        yield Running(server, url, lines, passes)


__all__ = ["CHAT", "CHUNK", "HTTP", "Passes", "Running", "running", "save_bytes", "save_tiny"]
