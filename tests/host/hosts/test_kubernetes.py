# SPDX-License-Identifier: Apache-2.0
"""The manifest for Kubernetes: as its schemas say, and with options that the commands have."""

import copy
import inspect
import json
import re
from pathlib import Path

import pytest
import yaml

from hillinfer_hosts import cli

FILE = Path(__file__).parents[3] / "docs/kubernetes/hosts.yaml"
PARTS = list(yaml.safe_load_all(FILE.read_text()))
SCHEMA = json.loads((Path(__file__).parent / "kubernetes_schema.json").read_text())
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def is_a(value, name):
    if name in ("integer", "number"):
        return isinstance(value, int if name == "integer" else int | float) and value is not True
    return isinstance(value, TYPES[name])


def faults(value, schema, at=""):
    """What of a value a schema does not allow; the words of JSON schema that Kubernetes uses."""
    while "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    for words in ("anyOf", "oneOf"):
        if words in schema and all(list(faults(value, one, at)) for one in schema[words]):
            yield f"{at}: none of {words}"
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(is_a(value, one) for one in kinds):
        yield f"{at}: {value!r} is no {' or '.join(kinds)}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r}"
    if isinstance(value, dict):
        known = schema.get("properties", {})
        yield from (
            f"{at}: {name} is missing" for name in schema.get("required", []) if name not in value
        )
        for name, own in value.items():
            rest = schema.get("additionalProperties", True)
            if name in known:
                yield from faults(own, known[name], f"{at}.{name}")
            elif rest is False:
                yield f"{at}.{name} is unknown"
            elif isinstance(rest, dict):
                yield from faults(own, rest, f"{at}.{name}")
    if isinstance(value, list):
        for number, own in enumerate(value):
            yield from faults(own, schema.get("items", {}), f"{at}[{number}]")


def faults_of(part):
    return list(faults(part, SCHEMA["kinds"][part["kind"]], part["kind"]))


def part(kind, name):
    return next(one for one in PARTS if (one["kind"], one["metadata"]["name"]) == (kind, name))


@pytest.mark.parametrize("number", range(len(PARTS)))
def test_each_part_is_as_its_schema_says(number):
    assert faults_of(PARTS[number]) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spec: spec.pop("selector"), "selector is missing"),
        (lambda spec: spec.update(replica=2), ".replica is unknown"),
        (lambda spec: spec.update(replicas="2"), "'2' is no integer"),
        (lambda spec: spec["template"]["spec"]["containers"][0].pop("name"), "name is missing"),
        (
            lambda spec: spec["template"]["spec"]["containers"][0]["ports"][0].update(
                containerPort="8000"
            ),
            "is no integer",
        ),
        (
            lambda spec: spec["template"]["spec"]["volumes"].append({"nam": "x"}),
            "nam is unknown",
        ),
    ],
)
def test_a_part_that_is_wrong_is_found(change, said):
    wrong = copy.deepcopy(part("StatefulSet", "replica"))
    change(wrong["spec"])
    assert any(said in one for one in faults_of(wrong)), faults_of(wrong)


def containers():
    for one in PARTS:
        if one["kind"] in ("StatefulSet", "Deployment"):
            yield from one["spec"]["template"]["spec"]["containers"]


@pytest.mark.parametrize("name", ["agent", "router"])
def test_the_commands_have_the_options(name):
    (own,) = [one for one in containers() if one["name"] == name]
    assert own["args"][:2] == ["hillinfer-hosts", name]
    options = {one.removeprefix("--").partition("=")[0] for one in own["args"][2:]}
    known = {one.replace("_", "-") for one in inspect.signature(getattr(cli, name)).parameters}
    assert options <= known
    # Reached from other machines, they ask for the key.
    assert {"host", "key-file"} <= options


def test_parts_fit_each_other():
    for kind, name in (("StatefulSet", "replica"), ("Deployment", "router")):
        spec = part(kind, name)["spec"]
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"] == labels
        service = part("Service", "replicas" if name == "replica" else name)
        assert service["spec"]["selector"] == labels
        named = {one["name"] for one in spec["template"]["spec"]["volumes"]}
        named |= {one["metadata"]["name"] for one in spec.get("volumeClaimTemplates", [])}
        for one in spec["template"]["spec"]["containers"]:
            assert {mount["name"] for mount in one["volumeMounts"]} <= named
            (port,) = (own["containerPort"] for own in one["ports"])
            assert port in {own["port"] for own in service["spec"]["ports"]}
    assert part("StatefulSet", "replica")["spec"]["serviceName"] == "replicas"


def test_vllm_is_told_what_its_connector_takes():
    (own,) = [one for one in containers() if one["name"] == "vllm"]
    told = json.loads(own["args"][own["args"].index("--kv-transfer-config") + 1])
    page = (FILE.parents[1] / "vllm.md").read_text()
    shown = json.loads(re.search(r"--kv-transfer-config '(\{.*?\})'", page, re.DOTALL)[1])
    extra = shown.pop("kv_connector_extra_config")
    assert set(told.pop("kv_connector_extra_config")) <= set(extra)
    assert told == shown
