# SPDX-License-Identifier: Apache-2.0
"""Reads rendered HLS C++ as the synthesis tool's rules see it: streams, loops, indices, pragmas.

It knows the few forms that the kernels are written in, and refuses what it cannot read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_FUNCTION = re.compile(r"^(?:inline|extern \"C\") void (\w+)\(", re.MULTILINE)
_PROCESS = re.compile(r"PROCESS\((\w+)\(([^;]*)\)\);", re.DOTALL)
_STREAM = re.compile(r"hls::stream<([\w<> ]+)> (\w+)\(\"(\w+)\"\);")
_DEPTH = re.compile(r"#pragma HLS STREAM variable=(\w+) depth=(\d+)")
_LOOP = re.compile(r"^( *)(\w+):\n((?: *//.*\n)*) *(?:for|while|do)\b", re.MULTILINE)
_ANY_LOOP = re.compile(r"^ *(?:for|while|do)\b.*\{$", re.MULTILINE)
_RECURRENCE = re.compile(r"// recurrence: (none|.+; distance .+)$", re.MULTILINE)
_INTERVAL = re.compile(r"#pragma HLS PIPELINE II=(\d+)")
_LINEAR_TERM = re.compile(r"^[A-Za-z_][\w.]*$|^\d+$")
_WORD_MEMORY = re.compile(r"^ +\w+Word (\w+)\[", re.MULTILINE)
_FLOATS = re.compile(r"\b(?:float|double|half|volatile|malloc|new|std::vector)\b")


@dataclass(frozen=True)
class LoopRow:
    """One labelled loop.

    Parameters
    ----------
    function, label
        Where it is.
    recurrence
        What a round takes over from an earlier one, and its distance in rounds; `none` otherwise.
    interval
        Intended initiation interval; None where the loop holds pipelined loops itself.
    """

    function: str
    label: str
    recurrence: str
    interval: int | None


def functions_of(source: str) -> dict[str, tuple[list[str], str]]:
    """Return the parameters (whole declarations) and the body of every function of a source."""
    found = {}
    for match in _FUNCTION.finditer(source):
        close = _closing(source, match.end() - 1, "()")
        start = source.index("{", close)
        end = _closing(source, start, "{}")
        parameters = [part.strip() for part in source[match.end() : close].split(",")]
        found[match.group(1)] = ([" ".join(part.split()) for part in parameters], source[start:end])
    return found


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


def loop_table(headers: Mapping[str, str], processes: list[str] | None = None) -> list[LoopRow]:
    """Return every labelled loop of the processes, in order of the headers."""
    rows = []
    for text in headers.values():
        for name, (_, body) in functions_of(text).items():
            if processes is not None and name not in processes:
                continue
            for match, inner in _loops(body):
                recurrence = _RECURRENCE.search(match.group(3))
                interval = _INTERVAL.search(_own_lines(inner))
                rows.append(
                    LoopRow(
                        name,
                        match.group(2),
                        recurrence.group(1) if recurrence else "not stated",
                        int(interval.group(1)) if interval else None,
                    )
                )
    return rows


def plain_headers(folder: Path) -> dict[str, str]:
    """Return the text of the kernels' plain headers by name."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.h"))}


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
        name = re.split(r"[ *]", parameter)[-1]
        if f"#pragma HLS INTERFACE s_axilite port={name}\n" not in top:
            yield f"{name} has no s_axilite pragma"
        if "*" not in parameter:
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
    for shared, processes in owners.items():
        if len(processes) != 1:
            yield f"bundle {shared} is shared by {sorted(processes)}"
    for pragma in ("s_axilite port=return", "ap_ctrl_chain port=return"):
        if f"#pragma HLS INTERFACE {pragma}\n" not in top:
            yield f"the top lacks INTERFACE {pragma}"


def _process(name: str, parameters: list[str], body: str) -> Iterator[str]:
    """Loops are labelled and say recurrence and interval; memory is indexed linearly."""
    loops = list(_loops(body))
    unrolled = body.count("#pragma HLS UNROLL")
    if len(_ANY_LOOP.findall(body)) != len(loops) + unrolled:
        yield f"{name}: a loop has neither a label nor UNROLL"
    for loop, inner in loops:
        if not _RECURRENCE.search(loop.group(3)):
            yield f"{name}: loop {loop.group(2)} does not state its recurrence and distance"
        holds_loops = _LOOP.search(inner) is not None
        interval = _INTERVAL.search(_own_lines(inner))
        if not holds_loops and interval is None:
            yield f"{name}: innermost loop {loop.group(2)} has no PIPELINE with an II"
    for memory in _WORD_MEMORY.findall(body):
        if f"#pragma HLS AGGREGATE variable={memory}\n" not in body:
            yield f"{name}: memory {memory} is not AGGREGATEd, so its fields are memories apart"
    for parameter in parameters:
        if "*" not in parameter:
            continue
        pointer = parameter.split("*")[1]
        for index in re.findall(rf"\b{pointer}\[([^\]]*)\]", body):
            terms = [term.strip() for term in index.split("+")]
            if not all(_LINEAR_TERM.match(term) for term in terms):
                yield f"{name}: {pointer}[{index}] is not a sum of counters"


def _loops(body: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yield every labelled loop's match and body."""
    for match in _LOOP.finditer(body):
        start = body.index("{\n", match.end())
        yield match, body[start : _closing(body, start, "{}")]


def _own_lines(inner: str) -> str:
    """Return a loop's lines up to the first labelled loop in it."""
    nested = _LOOP.search(inner)
    return inner[: nested.start()] if nested else inner


def _closing(text: str, start: int, pair: str) -> int:
    """Return the index of the bracket that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == pair[0]) - (text[index] == pair[1])
        if depth == 0:
            return index
    raise ValueError(f"a {pair[0]} is never closed")


def _without_comments(text: str) -> str:
    return re.sub(r"//.*", "", text)


def loop_markdown(headers: Mapping[str, str]) -> str:
    """Return the table of loops as Markdown."""
    lines = [
        "| process | loop | recurrence and its distance in rounds | intended II |",
        "|---|---|---|---|",
    ]
    for row in loop_table(headers):
        interval = "holds other loops" if row.interval is None else str(row.interval)
        lines.append(f"| `{row.function}` | `{row.label}` | {row.recurrence} | {interval} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(loop_markdown(plain_headers(Path(__file__).resolve().parents[2] / "hw" / "hls")), end="")
