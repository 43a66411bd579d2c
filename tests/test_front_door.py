# SPDX-License-Identifier: Apache-2.0
"""Tests look through the front door: how often they look at private parts of something."""

import ast
import gc
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(Path(__file__).parent.rglob("*.py"))
FOLDERS = {file.parent for file in FILES if file.name == "conftest.py"}
PRODUCT = ("host/hillinfer", "sw_model", "plugins", "tools")
# A test that has no other way may look inside; each that does holds the code as it is.
MOST_LOOKS = 81
# Of the product or of what it calls: each swap holds the code as it is, too.
MOST_SWAPS = 85
OWN = ("self", "cls")


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name != "_"


def is_own(value):
    """Say whether an attribute is of the object that a method belongs to."""
    if isinstance(value, ast.Call):
        return getattr(value.func, "id", None) == "super"
    return getattr(value, "id", None) in OWN


SAYING = (ast.Attribute, ast.Call, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Subscript)


def nodes(tree):
    """Return the parts of a module that say something here; they are looked for once."""
    if not hasattr(tree, "saying"):
        tree.saying = [one for one in ast.walk(tree) if isinstance(one, SAYING)]
    return tree.saying


@pytest.fixture(scope="module", autouse=True)
def _no_collections():
    """Parse without garbage collections, which would take three quarters of the time.

    Trees are large and stay: each collection would look through all that were made before.
    """
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def trees(_no_collections):
    """Return all modules of tests, parsed."""
    return {file: ast.parse(file.read_text()) for file in FILES}


def looks(tree):
    """Return the private names of other objects that a module reads, sets, imports or replaces.

    `tree` is the module, or its text.
    """
    found = []
    for node in nodes(ast.parse(tree) if isinstance(tree, str) else tree):
        if isinstance(node, ast.Attribute) and not is_own(node.value):
            found.append(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found += [one.name for one in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "setattr":
            names = [one.value for one in node.args[:2] if isinstance(one, ast.Constant)]
            found += [str(one).rpartition(".")[2] for one in names]
    return [name for name in found if is_private(name)]


def test_tests_seldom_look_at_private_parts(trees):
    counts = {str(file): len(looks(tree)) for file, tree in trees.items()}
    print(sum(counts.values()), "looks in", sum(map(bool, counts.values())), "files")
    assert sum(counts.values()) <= MOST_LOOKS, counts


def members(tree):
    """Return the names that classes of a module, and its simple namespaces, give their objects."""
    found = set()
    for node in nodes(tree):
        if isinstance(node, ast.ClassDef):
            found |= at_the_top(node)
        elif is_written(node) and is_own(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and called(node) == "SimpleNamespace":
            found |= {one.arg for one in node.keywords}
    return found


def at_the_top(tree):
    """Return the names that a module or a class defines."""
    found = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = (one for target in targets for one in ast.walk(target))
            found |= {one.id for one in parts if isinstance(one, ast.Name)}
    return found


def is_written(node):
    """Say whether an attribute is set or deleted, by whatever statement."""
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del))


def called(call):
    """Return the last name of what is called."""
    return getattr(call.func, "attr", None) or getattr(call.func, "id", None)


def is_of_modules(node):
    """Say whether an entry of `sys.modules` is set or deleted."""
    is_set = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
    return is_set and getattr(node.value, "attr", None) == "modules"


# Of monkeypatch, of Python, of an object, and of mock.
SWAPPING = {"setattr", "delattr", "setitem", "delitem", "__setattr__", "__delattr__", "patch"}


def swaps(tree, product=frozenset(), imported=frozenset()):
    """Return what a module of tests puts in the place of something that is not its own.

    That is each call that sets an attribute, or an entry of a dictionary, of something else; each
    entry of `sys.modules` that is set; and each attribute that is set or deleted whose name the
    product gives to something, and no class of the tests that the module has or imports.

    Parameters
    ----------
    tree
        The module, or its text.
    product, imported
        Names that the product defines, and those of classes of the modules of tests it imports.
    """
    tree = ast.parse(tree) if isinstance(tree, str) else tree
    classes = {node.name for node in nodes(tree) if isinstance(node, ast.ClassDef)}
    own = members(tree) | imported
    others = (product - own) | {"__class__", "__dict__"}

    def is_ours(value):
        return is_own(value) or getattr(value, "id", None) in classes

    found = []
    for node in nodes(tree):
        if isinstance(node, ast.Call) and called(node) in SWAPPING:
            # Of `mock.patch` and `mock.patch.object` the inner and the outer name.
            found += [] if node.args and is_ours(node.args[0]) else [node]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) in ("object", "dict"):
            found += [node] if getattr(node.func.value, "attr", None) == "patch" else []
            found += [node] if getattr(node.func.value, "id", None) == "patch" else []
        elif is_written(node) and node.attr in others and not is_ours(node.value):
            found.append(node)
        elif isinstance(node, ast.Call) and called(node) == "update":
            of = getattr(node.func, "value", None)
            found += [node] if isinstance(of, ast.Call) and called(of) == "vars" else []
        found += [node] if is_of_modules(node) else []
    return [f"{node.lineno}: {ast.unparse(node).splitlines()[0]}" for node in found]


def imports(tree):
    """Return the last names of what a module imports from."""
    names = set()
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom):
            names.add(str(node.module).rpartition(".")[2])
        elif isinstance(node, ast.Import):
            names |= {one.name.rpartition(".")[2] for one in node.names}
    return names


def read_with(file, others):
    """Return a module of tests and those that it imports, and the fixtures' beside and above it.

    `others` has the modules that each module of tests imports.
    """
    found, left = set(), [file]
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += others[one]
            left += [folder / "conftest.py" for folder in one.parents if folder in FOLDERS]
    return found


def product_names():
    """Return what the product's modules and classes define."""
    files = [one for place in PRODUCT for one in sorted((ROOT / place).rglob("*.py"))]
    trees = [ast.parse(one.read_text()) for one in files]
    return set().union(*(members(one) | at_the_top(one) for one in trees))


def test_tests_seldom_put_something_in_the_place_of_what_is_not_theirs(trees):
    own = {file: members(tree) for file, tree in trees.items()}
    named, product, found = {}, product_names(), {}
    for file in FILES:
        named.setdefault(file.stem, []).append(file)
    others = {
        file: [one for name in imports(tree) for one in named.get(name, [])]
        for file, tree in trees.items()
    }
    for file in FILES:
        imported = set().union(*(own[one] for one in read_with(file, others)))
        found[str(file)] = swaps(trees[file], product, imported)
    count = sum(map(len, found.values()))
    print(count, "swaps in", sum(map(bool, found.values())), "files")
    assert count <= MOST_SWAPS, {file: own for file, own in found.items() if own}


SWAPS = {
    "by monkeypatch": "monkeypatch.setattr(a, 'b', 1)",
    "in its context": "with monkeypatch.context() as broken:\n    broken.setattr('a.b', 1)",
    "without its attribute": "monkeypatch.delattr(a, 'b')",
    "a module that is none": "monkeypatch.setitem(sys.modules, 'a', None)",
    "by mock": "with mock.patch('a.b'):\n    pass",
    "an object's by mock": "with mock.patch.object(a, 'b'):\n    pass",
    "a dictionary's by mock": "@patch.dict('a.b')\ndef test(): pass",
    "by its name": "setattr(a, name, 1)",
    "of what is frozen": "object.__setattr__(a, '_b', 1)",
    "an attribute": "a.budget = 1",
    "of a part": "self.runtime.budget = 1",
    "one of several": "b, (a.budget, *c) = 1, 2, 3",
    "what is added": "a.budget += 1",
    "with its type": "a.budget: int = 1",
    "in a loop": "for a.budget in (1, 2):\n    pass",
    "by a context": "with b as a.budget:\n    pass",
    "that is deleted": "del a.budget",
    "its class": "a.__class__ = B",
    "all that it has": "vars(a).update(b)",
    "a module": "sys.modules['a'] = b",
}


@pytest.mark.parametrize("kind", SWAPS)
def test_each_kind_of_swap_is_seen(kind):
    assert len(swaps(SWAPS[kind], {"budget"})) == 1


def test_what_tests_set_of_their_own_is_no_swap():
    own = "class A:\n    def __init__(self):\n        self.budget = 1\n"
    assert swaps(own + "a.budget = 2", {"budget"}) == []
    assert swaps("class A:\n    pass\nA.budget = 2", {"budget"}) == []
    assert swaps("class A:\n    budget = 1\na.budget = 2", {"budget"}) == []
    assert swaps("a = SimpleNamespace(budget=1)\na.budget = 2", {"budget"}) == []
    assert swaps("a.budget = 2", {"budget"}, {"budget"}) == []
    assert swaps("a.mark = 2\nbudget = 3\nb = a.budget", {"budget"}) == []
    assert swaps("monkeypatch.setenv('b', '1')") == []
    tree = ast.parse("class A:\n    b: int = 1\n    def c(self):\n        self.d, e = 1, 2\n")
    assert members(tree) == {"b", "c", "d"}
    assert at_the_top(ast.parse("a, b = 1, 2\nc: int = 3\ndef d(): pass")) == set("abcd")


def test_each_kind_of_look_is_seen():
    assert looks("from a.b import c, _d\n") == ["_d"]
    assert sorted(looks("a.b._c.d = e._f\n")) == ["_c", "_f"]
    assert looks("monkeypatch.setattr(a, '_b', 1)\n") == ["_b"]
    assert looks("monkeypatch.setattr('a.b._c', d)\n") == ["_c"]
    own = "self._a = cls._b\nsuper()._c()\nd.__dict__\n_e = _f(_)\n"
    assert looks(own) == []
