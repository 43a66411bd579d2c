# SPDX-License-Identifier: Apache-2.0
"""Tests look through the front door: how often they look at private parts of something."""

import ast
from pathlib import Path

FILES = sorted(Path(__file__).parent.rglob("*.py"))
# A test that has no other way may look inside; each that does holds the code as it is.
MOST_LOOKS = 91
# Of the product or of what it calls: each swap holds the code as it is, too.
MOST_SWAPS = 26
OWN = ("self", "cls")


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name != "_"


def is_own(value):
    """Say whether an attribute is of the object that a method belongs to."""
    if isinstance(value, ast.Call):
        return getattr(value.func, "id", None) == "super"
    return getattr(value, "id", None) in OWN


def looks(source):
    """Return the private names of other objects that a module reads, sets, imports or replaces."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and not is_own(node.value):
            found.append(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found += [one.name for one in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "setattr":
            names = [one.value for one in node.args[:2] if isinstance(one, ast.Constant)]
            found += [str(one).rpartition(".")[2] for one in names]
    return [name for name in found if is_private(name)]


def test_tests_seldom_look_at_private_parts():
    counts = {str(file): len(looks(file.read_text())) for file in FILES}
    print(sum(counts.values()), "looks in", sum(map(bool, counts.values())), "files")
    assert sum(counts.values()) <= MOST_LOOKS, counts


def swaps(source):
    """Return how often a module's tests put something else in the place of an attribute."""
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    # In a context it is called by another name than monkeypatch.
    return sum(getattr(of, "attr", None) == "setattr" for of in calls)


def test_tests_seldom_swap_an_attribute():
    counts = {str(file): swaps(file.read_text()) for file in FILES}
    print(sum(counts.values()), "swaps in", sum(map(bool, counts.values())), "files")
    assert sum(counts.values()) <= MOST_SWAPS, counts
    assert swaps("monkeypatch.setattr(a, 'b', 1)\nmonkeypatch.setenv('b', '1')\n") == 1
    assert swaps("with monkeypatch.context() as broken:\n    broken.setattr(a, 'b', 1)\n") == 1


def test_each_kind_of_look_is_seen():
    assert looks("from a.b import c, _d\n") == ["_d"]
    assert sorted(looks("a.b._c.d = e._f\n")) == ["_c", "_f"]
    assert looks("monkeypatch.setattr(a, '_b', 1)\n") == ["_b"]
    assert looks("monkeypatch.setattr('a.b._c', d)\n") == ["_c"]
    own = "self._a = cls._b\nsuper()._c()\nd.__dict__\n_e = _f(_)\n"
    assert looks(own) == []
