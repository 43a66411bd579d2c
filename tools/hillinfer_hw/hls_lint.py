# SPDX-License-Identifier: Apache-2.0
"""Reads rendered HLS C++ as the synthesis tool's rules see it: streams, loops, indices, pragmas.

It knows the few forms that the kernels are written in, and refuses what it cannot read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from hillinfer_hw.hls_loops import (
    Loop,
    accesses,
    functions_of,
    loop_markdown,
    loops_of,
    plain_headers,
    unlabelled_loops,
)
from hillinfer_hw.hls_recurrence import too_long

_PROCESS = re.compile(r"PROCESS\((\w+)\(([^;]*)\)\);", re.DOTALL)
_STREAM = re.compile(r"hls::stream<([\w<> ]+)> (\w+)\(\"(\w+)\"\);")
_DEPTH = re.compile(r"#pragma HLS STREAM variable=(\w+) depth=(\d+)")
_PLACE = re.compile(r"^[A-Za-z_][\w.]*$|^\d+$")
_WORD_MEMORY = re.compile(r"^ +\w+Word (\w+)\[", re.MULTILINE)
_WORD_REGISTER = re.compile(r"^ +(?:const )?\w+Word (\w+)(?:;| =)", re.MULTILINE)
_AGGREGATE = re.compile(r"#pragma HLS AGGREGATE variable=(\w+)\n")
_UNROLLED = re.compile(r"for \(\w+ (\w+) = ")
_HALF = re.compile(r"\b(\w+)\[1 - slot\]")
# Styles of pipelines that the tool grants only where nothing is read without waiting, and says so:
# HLS 200-1964 of AMD's UG1448 for frp; flp is for whole functions (the same guide's table).
_GRANTED_STYLES = ("frp", "flp")
_FLOATS = re.compile(r"\b(?:float|double|half|volatile|malloc|new|std::vector)\b")


def lint(top: str, headers: Mapping[str, str]) -> list[str]:
    """Return what is wrong with a rendered kernel, as one line per finding.

    Parameters
    ----------
    top
        The rendered top, with `#pragma HLS DATAFLOW`.
    headers
        The plain headers' text by name.
    """
    functions: dict[str, tuple[list[str], str]] = {}
    for text in headers.values():
        functions |= functions_of(text)
    findings = [*_streams(top, functions), *_dataflow(top, headers), *_pointers(top, functions)]
    for name in _called(top):
        findings += _process(name, *functions[name])
    for file, text in {"top": top, **headers}.items():
        for word in _FLOATS.findall(_without_comments(text)):
            findings.append(f"{file}: {word} has no place in a kernel of integers and streams")
    return findings


def _called(top: str) -> list[str]:
    return [name for name, _ in _PROCESS.findall(top)]


def _streams(top: str, functions: Mapping[str, tuple[list[str], str]]) -> Iterator[str]:
    """Every stream has a depth, one producer and one consumer, in that order."""
    depths = dict(_DEPTH.findall(top))
    declared = {}
    for _, name, text in _STREAM.findall(top):
        declared[name] = text
        if name != text:
            yield f"stream {name} is called {text!r} in messages"
        if name not in depths:
            yield f"stream {name} has no STREAM pragma with a depth"
    producers: dict[str, list[tuple[int, str]]] = defaultdict(list)
    consumers: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for order, (process, arguments) in enumerate(_PROCESS.findall(top)):
        parameters, body = functions[process]
        given = [" ".join(part.split()) for part in arguments.split(",")]
        if len(given) != len(parameters):
            yield f"{process} takes {len(parameters)} arguments, not {len(given)}"
            continue
        for argument, parameter in zip(given, parameters, strict=True):
            if not parameter.startswith("hls::stream<"):
                continue
            own = parameter.split("&")[1]
            reads = re.search(rf"\b{own}\.(?:read|read_nb)\(", body)
            writes = re.search(rf"\b{own}\.write\(", body)
            if bool(reads) == bool(writes):
                yield f"{process} must either read or write {own}"
            (consumers if reads else producers)[argument].append((order, process))
    for name in declared:
        if len(producers[name]) != 1 or len(consumers[name]) != 1:
            yield (
                f"stream {name} has the producers {[p for _, p in producers[name]]} and the "
                f"consumers {[c for _, c in consumers[name]]}, not one of each"
            )
        elif producers[name][0][0] >= consumers[name][0][0]:
            yield f"stream {name} flows backwards"
    for name in {*producers, *consumers} - {*declared}:
        yield f"stream {name} is not declared in the region"


def _dataflow(top: str, headers: Mapping[str, str]) -> Iterator[str]:
    """DATAFLOW stands once, in the top's body, which holds streams and processes only."""
    if top.count("#pragma HLS DATAFLOW") != 1:
        yield "the top has not one DATAFLOW pragma"
    for name, text in headers.items():
        if "HLS DATAFLOW" in text:
            yield f"{name}: DATAFLOW below the top can only lie in a loop or a process"
    _, body = next(iter(functions_of(top).values()))
    lines = [line.strip() for line in _without_comments(body[1:]).splitlines()]
    rest = "\n".join(line for line in lines if line and not line.startswith("#"))
    rest = _STREAM.sub("", _PROCESS.sub("", rest)).strip()
    if rest:
        yield f"the top's body holds more than streams and processes: {rest.splitlines()[0]}"


def _pointers(top: str, functions: Mapping[str, tuple[list[str], str]]) -> Iterator[str]:
    """Every pointer has an m_axi and an s_axilite pragma and belongs to one process.

    The pointers of one bundle belong to one process as well, so that no process waits for
    another one's bursts and status follows scores.
    """
    ((_, (parameters, _)),) = functions_of(top).items()
    owners = defaultdict(set)
    for parameter in parameters:
        name = _name(parameter)
        if f"#pragma HLS INTERFACE s_axilite port={name}\n" not in top:
            yield f"{name} has no s_axilite pragma"
        if not _is_memory(parameter):
            continue
        bundle = re.search(rf"#pragma HLS INTERFACE m_axi port={name} bundle=(\w+) ", top)
        if bundle is None:
            yield f"{name} has no m_axi pragma"
            continue
        users = []
        for process, arguments in _PROCESS.findall(top):
            given = [part.strip() for part in arguments.split(",")]
            if name in given:
                users.append(process)
                own = functions[process][0][given.index(name)]
                if own.startswith("const") != parameter.startswith("const"):
                    yield f"{name} is const in one of the top and {process} only"
        if len(users) != 1:
            yield f"{name} is used by {users}, not by one process"
        owners[bundle.group(1)].update(users)
        if "*" not in parameter and top.count(f" bundle={bundle.group(1)} ") != 1:
            yield f"{name} uses manual bursts, so no other port may share {bundle.group(1)}"
    for shared, processes in owners.items():
        if len(processes) != 1:
            yield f"bundle {shared} is shared by {sorted(processes)}"
    for pragma in ("s_axilite port=return", "ap_ctrl_chain port=return"):
        if f"#pragma HLS INTERFACE {pragma}\n" not in top:
            yield f"the top lacks INTERFACE {pragma}"


def _process(name: str, parameters: list[str], body: str) -> Iterator[str]:
    """Loops say recurrence, memory and interval, and keep what they say."""
    if unlabelled_loops(body):
        yield f"{name}: a loop has neither a label nor UNROLL"
    loops = loops_of(body)
    memories = [_name(parameter) for parameter in parameters if _is_memory(parameter)]
    plain = [name for name, text in zip(memories, _memory_types(parameters), strict=True) if text]
    for loop in loops:
        if not loop.recurrence:
            yield f"{name}: loop {loop.label} does not state its recurrence and distance"
        if not loop.holds_loops and loop.interval is None:
            yield f"{name}: innermost loop {loop.label} has no PIPELINE with an II"
        if loop.interval is not None and not loop.holds_loops:
            for value in too_long(loop.body):
                yield f"{name}: more than one addition a round in the recurrence of {value}"
            yield from _accesses(name, loop, plain)
            if loop.style in _GRANTED_STYLES and ".read_nb(" in loop.body:
                yield f"{name}: style={loop.style} and read_nb do not go together (HLS 200-1964)"
    if not plain:
        yield from _flat(name, parameters, body, memories)
    for memory in _WORD_MEMORY.findall(body):
        if f"#pragma HLS AGGREGATE variable={memory}\n" not in body:
            yield f"{name}: memory {memory} is not AGGREGATEd, so its fields are memories apart"
    yield from _registers(name, body)
    yield from _halves(name, body)
    for pointer in plain:
        for index in re.findall(rf"\b{pointer}\[([^\]]*)\]", body):
            if not all(_PLACE.match(term.strip()) for term in index.split("+")):
                yield f"{name}: {pointer}[{index}] is not a sum of counters"


def _registers(name: str, body: str) -> Iterator[str]:
    """Places choose among partitioned arrays, never within a word that is no memory."""
    memories = set(_WORD_MEMORY.findall(body))
    for variable in set(_AGGREGATE.findall(body)) - memories:
        yield f"{name}: {variable} is AGGREGATEd and no memory; ARRAY_PARTITION makes registers"
    counters = set(_UNROLLED.findall(body))
    for word in set(_WORD_REGISTER.findall(body)) - memories:
        for index in re.findall(rf"\b{word}\.\w+\[([^\]]*)\]", body):
            names = set(re.findall(r"[A-Za-z_]\w*", index))
            if any(not one.isupper() for one in names - counters):
                yield f"{name}: the place {index} chooses in the word {word}, which is no memory"


def _halves(name: str, body: str) -> Iterator[str]:
    """Memories of two halves say that a round never meets what it or the last one wrote."""
    for memory in sorted(set(_HALF.findall(body))):
        for promise in (
            "type=intra dependent=false",
            "type=inter direction=RAW distance=2 dependent=true",
        ):
            if f"#pragma HLS DEPENDENCE variable={memory} {promise}\n" not in body:
                yield f"{name}: memory {memory} of two halves lacks DEPENDENCE {promise}"


def _accesses(name: str, loop: Loop, pointers: list[str]) -> Iterator[str]:
    """Pipelined loops say whether a burst can be inferred for what they read or write."""
    found = set().union(*(accesses(pointer, loop) for pointer in pointers))
    said = loop.access.split(",")[0]
    if found and not said:
        yield f"{name}: loop {loop.label} does not say how it uses memory ({sorted(found)})"
    for kind in sorted(found - {said}):
        if said:
            yield f"{name}: loop {loop.label} says {said} and uses memory {kind}"


def _flat(name: str, parameters: list[str], body: str, bursts: list[str]) -> Iterator[str]:
    """Without a plain pointer a process is one flat loop that never waits for a stream."""
    loops = loops_of(body)
    if len(loops) != 1 or loops[0].interval is None:
        yield f"{name}: {len(loops)} loops; without a pointer a process is one pipelined loop"
        return
    if loops[0].style != "stp":
        yield f"{name}: the pipeline does not say that it stalls for room only (style=stp)"
    for parameter in parameters:
        if "hls::stream<" in parameter and f"{_name(parameter)}.read()" in body:
            yield f"{name}: the pipeline stalls for its next input in {_name(parameter)}"
    for burst in bursts:
        if loops[0].access != "manual bursts":
            yield f"{name}: loop {loops[0].label} does not say that it uses manual bursts"
        taken, requested = (body.find(f"{burst}.{call}(") for call in ("read", "read_request"))
        if not 0 < taken < requested:
            yield f"{name}: {burst} must be read before it is requested in a round"


def _is_memory(parameter: str) -> bool:
    return "*" in parameter or parameter.startswith("hls::burst_maxi<")


def _memory_types(parameters: list[str]) -> list[bool]:
    """Return, for each memory, whether it is a plain pointer."""
    return ["*" in parameter for parameter in parameters if _is_memory(parameter)]


def _name(parameter: str) -> str:
    return re.split(r"[ *&]", parameter)[-1]


def _without_comments(text: str) -> str:
    return re.sub(r"//.*", "", text)


if __name__ == "__main__":
    print(loop_markdown(plain_headers(Path(__file__).resolve().parents[2] / "hw" / "hls")), end="")
