# SPDX-License-Identifier: Apache-2.0
"""Citations of the scoring contract name sections of its page that are about what is cited.

A citation reads `contract, section 9`, or `sections 2, 3 and 9`, or `sections 5 to 7`.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scoring-contract.md"
FOLDERS = ("host", "hw", "plugins", "sw_model", "tests", "tools")
SUFFIXES = (".py", ".h", ".cpp", ".c", ".sv", ".j2")
HEADING = re.compile(r"^#{2,3} (\d+)\. (.+)$", re.MULTILINE)
# A citation may go on in the next line of a comment.
BREAK = re.compile(r"\n *(?://|#)? *")
CITATION = re.compile(r"\bcontract, (?=sections? |§|\d)([a-z§]* ?[\d, §]*(?:(?:and|to) \d+)?)")
FORM = re.compile(r"section \d+|sections \d+(?:, \d+)*(?:,| and| to) \d+")
# Words of which one stands near a citation of a section.
NEAR = 500
SUBJECTS = {
    1: "position|group|segment|token|round|int64|truncat",
    2: "fp16|nan|half|infinit|centr|cod",
    3: "statistic|centr|exponent|code|key|mean",
    4: "quer|mean",
    5: "product|align|log|l'",
    6: "offset|reference|window|addend|φ|no key yet",
    7: "score|weight|mag",
    8: "rank|select|choice|choos|tie",
    9: "shadow|layout|tile|group|beat|lie",
    10: "launch|descriptor|block|query|row|host",
    11: "score|status|tuple|error",
    12: "spec|version",
    13: "chain|hand",
    14: "value|code",
    15: "exact|coded|near",
    16: "attention|weight|value|coded|power|sum|float32",
    17: "quer",
}


def sources():
    """Every source; texts of mutants are wrong on purpose."""
    own = Path(__file__).resolve()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            made = {"build", "mutants", "__pycache__"} & {*path.parts}
            if path.suffix in SUFFIXES and path.is_file() and not made and path != own:
                yield path


def sections():
    return {int(number): title for number, title in HEADING.findall(PAGE.read_text("utf-8"))}


def cited(citation):
    """The numbers of a citation in its form; a range names all between."""
    numbers = [int(number) for number in re.findall(r"\d+", citation)]
    return range(numbers[0], numbers[1] + 1) if " to " in citation else numbers


def faults(text, known):
    """What is wrong with the citations of a source, as text, and how many there are."""
    flat = BREAK.sub(" ", text)
    found, count = [], 0
    for match in CITATION.finditer(flat):
        count += 1
        citation = match.group(1).strip(" ,")
        if not FORM.fullmatch(citation):
            found.append(f"'contract, {citation}' is no citation")
            continue
        near = flat[max(0, match.start() - NEAR) : match.end() + NEAR].lower()
        numbers = [*cited(citation)]
        strange = [number for number in numbers if number not in known]
        missing = [
            number for number in numbers if not strange and not re.search(SUBJECTS[number], near)
        ]
        found += [f"section {number} is not on the page" for number in strange]
        # A range is about the whole of something, which few of its sections are named by.
        if missing and (" to " not in citation or missing == numbers):
            found.append(f"nothing near it is about {known[missing[0]]}")
    return found, count


def test_the_page_has_its_sections():
    assert sorted(sections()) == sorted(SUBJECTS)


def test_every_citation_names_what_it_is_about():
    known, count, wrong = sections(), 0, []
    for path in sources():
        found, own = faults(path.read_text(encoding="utf-8"), known)
        count += own
        wrong += [f"{path.relative_to(ROOT)}: {fault}" for fault in found]
    assert wrong == []
    # The twin below shows what a fault is; this, that citations are found at all.
    assert count > 150


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Words of a status beat (contract, section 18).", "section 18 is not on the page"),
        ("Words of a status beat (contract, 11).", "'contract, 11' is no citation"),
        ("Words of a status beat (contract, §11).", "'contract, §11' is no citation"),
        ("Words of a status beat (contract, section 11 and 10).", "is no citation"),
        ("// A status beat (contract, sections 11\n// to 18).", "section 18 is not on the page"),
        ("A count of cycles (contract, section 6).", "nothing near it is about Offsets"),
    ],
)
def test_a_wrong_citation_is_found(text, said):
    found, count = faults(text, sections())
    assert count == 1
    assert said in found[0]


@pytest.mark.parametrize(
    "text",
    [
        "Words of a status beat (contract, section 11).",
        "Score blocks behind a status beat (scoring contract, sections 7 and 11).",
        "// A launch and its status beats (contract, sections 10\n// to 11).",
        "The contract, which has 16 sections.",
    ],
)
def test_a_right_citation_is_not(text):
    assert faults(text, sections())[0] == []
