# SPDX-License-Identifier: Apache-2.0
"""Every page says what it is for, in short sentences, and names only what exists.

Each rule is a function from a page's text to a list of its faults. The pages have none; a made-up
page that breaks the rule once has exactly that one.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
)
RESULTS = [page for page in PAGES if page.startswith("docs/results/") and "README" not in page]
# Pages of other folders: their links are checked, their sentences are not.
LINKING = sorted({*PAGES, "CHANGELOG.md", "bitstreams/README.md", "hw/rtl/README.md"})
ROOTS = ("bitstreams", "docs", "host", "hw", "sw_model", "tests", "tools")
# What a build makes and a checkout need not have.
MADE = re.compile(r"^bitstreams/NAME\.|\.so$")
MOST_WORDS = 40
MOST_LEAD_LINES = 3
MOST_LEAD_WORDS = 60

FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?:(?: {4}|\t)(?![-*] |\d+\. ).*\n?)+")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
FORMULA = re.compile(r"\$\$.*?\$\$", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")
CODE = re.compile(r"``(.+?)``|`([^`]+)`", re.DOTALL)
HEADING = re.compile(r"^(#{1,6}) +(.*?)\s*$", re.MULTILINE)
ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+")
# A sentence ends with a full stop before white space and what a sentence begins with.
ENDING = re.compile(r"""(?<=[.!?])["'”)*_]*\s+(?=["'“(*_]*[A-Z0-9`\u0391-\u03c9])""")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs|cf)\.\s", re.IGNORECASE)
FACTS = ("Machine", "When", "Command")


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def prose(text):
    """Return the text without code blocks, comments and display formulas."""
    text = FORMULA.sub("", COMMENT.sub("", FENCE.sub("", text)))
    return INDENTED.sub("", text)


def blocks(text):
    """Yield paragraphs and list items as lists of lines: no headings, tables or pictures."""
    block = []
    for line in [*prose(text).splitlines(), ""]:
        stripped = line.strip()
        apart = not stripped or stripped.startswith(("|", "#", "![", "<"))
        if block and (apart or ITEM.match(line)):
            yield block
            block = []
        if not apart:
            block.append(stripped)


def sentences(text):
    for block in blocks(text):
        plain = LINK.sub(lambda match: match[1], ITEM.sub("", " ".join(block), count=1))
        plain = ABBREVIATION.sub(lambda match: match[1] + " ", CODE.sub("`code`", plain))
        yield from ENDING.split(plain)


def words(sentence):
    """Return the words of a sentence; a span of code is one."""
    return [word for word in sentence.split() if re.search(r"\w", word)]


def long_sentences(text):
    counted = ((len(words(sentence)), sentence) for sentence in sentences(text))
    return [f"{count} words: {sentence}" for count, sentence in counted if count > MOST_WORDS]


def lead_faults(text):
    """Return what is wrong with the paragraph right below the title."""
    parts = re.split(r"\n\s*\n", COMMENT.sub("", text).strip() + "\n\n", maxsplit=2)
    title, lead = parts[0], parts[1] if len(parts) > 2 else ""
    if not re.fullmatch(r"# .+", title):
        return ["a page begins with its title and an empty line"]
    lines = lead.splitlines()
    if not lines or re.match(r"[#|`~<>]|!\[|    ", lead) or ITEM.match(lead):
        return ["a paragraph below the title says what the page is for"]
    faults = []
    if len(lines) > MOST_LEAD_LINES:
        faults.append(f"the lead has {len(lines)} lines, at most {MOST_LEAD_LINES} are allowed")
    if len(words(lead)) > MOST_LEAD_WORDS:
        faults.append(f"the lead has {len(words(lead))} words, at most {MOST_LEAD_WORDS}")
    return faults


def anchors(text):
    """Return the anchors that GitHub gives the headings of a page."""
    found = set()
    for _, heading in HEADING.findall(FENCE.sub("", text)):
        plain = LINK.sub(lambda match: match[1], heading).replace("`", "").lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 0
        while (anchor := f"{name}-{number}" if number else name) in found:
            number += 1
        found.add(anchor)
    return found


def link_faults(text, page):
    """Return links of a page to files or headings that do not exist."""
    faults = []
    for _, target in LINK.findall(CODE.sub("", FENCE.sub("", text))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = ((ROOT / page).parent / name).resolve() if name else ROOT / page
        if not path.is_relative_to(ROOT) or not path.exists():
            faults.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(text if not name else path.read_text("utf-8")):
            faults.append(f"{target}: no such heading")
    return faults


def named_paths(text):
    """Return the paths of the repository that a page names in code spans."""
    for first, second in CODE.findall(prose(text)):
        for word in (first or second).split():
            path = word.strip("\"'(),;:")
            if re.fullmatch(rf"(?:{'|'.join(ROOTS)})/[\w./*-]*", path) and not MADE.search(path):
                yield path


def path_faults(text):
    return sorted({path for path in named_paths(text) if not any(ROOT.glob(path.rstrip("/")))})


def result_faults(text):
    """Return sections of a page of results that lack their machine, their date or their command."""
    sections = re.split(r"^## +(.*)$", FENCE.sub("", text), flags=re.MULTILINE)[1:]
    faults = []
    for heading, body in zip(sections[::2], sections[1::2], strict=True):
        if re.match(r"What .* says?$", heading):
            continue
        told = set(re.findall(r"^- \*\*(\w+):\*\*\s+\S", body, re.MULTILINE))
        faults += [f"{heading}: no {fact}" for fact in FACTS if fact not in told]
    return faults


@pytest.mark.parametrize("page", PAGES)
def test_a_page_begins_with_what_it_is_for(page):
    assert lead_faults(read(page)) == []


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_is_long(page):
    assert long_sentences(read(page)) == []


@pytest.mark.parametrize("page", LINKING)
def test_links_lead_somewhere(page):
    assert link_faults(read(page), page) == []


@pytest.mark.parametrize("page", PAGES)
def test_named_paths_exist(page):
    assert path_faults(read(page)) == []


@pytest.mark.parametrize("page", RESULTS)
def test_figures_say_where_when_and_how_they_were_measured(page):
    assert result_faults(read(page)) == []


def test_the_pages_are_found():
    assert {"README.md", "docs/limitations.md", "docs/rivals/quest.md"} < {*PAGES}
    assert "docs/results/decode.md" in RESULTS
    assert sum(len(list(sentences(read(page)))) for page in PAGES) > 1000
    assert sum(len(list(named_paths(read(page)))) for page in PAGES) > 100


GOOD = "# Page\n\nIt says what it is for.\n\n## Part\n\nText.\n"


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace("# Page\n\n", "# Page\n", 1),
        GOOD.replace("It says what it is for.\n\n", ""),
        GOOD.replace("It says what it is for.", "- It is a list."),
        GOOD.replace("It says what it is for.", "One\ntwo\nthree\nfour."),
        GOOD.replace("It says what it is for.", "Word " * (MOST_LEAD_WORDS + 1)),
        "# Page\n",
    ],
)
def test_a_page_without_a_lead_is_seen(text):
    assert lead_faults(GOOD) == []
    assert len(lead_faults(text)) == 1


FORTY = "Word " * 39 + "end."
MORE = "Word " * 40 + "end."


@pytest.mark.parametrize(
    "page",
    [
        "# Page\n\n{}\n",
        "- {}\n- Another item.\n",
        "1. {}\n   It goes on.\n",
        "Before. {} Behind.\n",
        "**Bold.** {}\n",
        "| a | b |\n|---|---|\n\n{}\n",
        "- An item.\n\n    - {}\n",
        "The `code.` ends. {} `Code` begins a sentence.\n",
        "```\ncode\n```\n\n{}\n",
    ],
)
def test_a_long_sentence_is_seen_wherever_it_stands(page):
    assert long_sentences(page.format(FORTY)) == []
    assert len(long_sentences(page.format(MORE))) == 1


@pytest.mark.parametrize(
    "page", ["```\n{}\n```\n", "\n\n    {}\n", "| {} | b |\n", "<!-- {} -->\n", "$$ {} $$\n"]
)
def test_code_tables_and_formulas_are_no_sentences(page):
    assert long_sentences(page.format(MORE)) == []


def test_a_span_of_code_is_one_word_and_a_list_ends_a_sentence():
    assert long_sentences("`" + "word " * 50 + "`" + " and" * 39) == []
    assert long_sentences("These are:\n\n" + "- some words of an item;\n" * 20) == []


@pytest.mark.parametrize(
    "link",
    [
        "docs/no-such-page.md",
        "docs/glossary.md#no-such-heading",
        "#no-such-heading",
        "../outside.md",
        "docs/pictures/no-such-picture.svg",
    ],
)
def test_a_link_to_nothing_is_seen(link):
    good = (
        GOOD + "[a](#part), [b](docs/glossary.md#signs), [c](https://example.org/none), `[d](e)`\n"
    )
    assert link_faults(good, "README.md") == []
    assert len(link_faults(f"{good}[x]({link})\n", "README.md")) == 1


def test_anchors_are_those_of_github():
    text = "# What a step's time\n## `pip` & more\n## Twice\n## Twice\n```\n# none\n```\n"
    assert anchors(text) == {"what-a-steps-time", "pip--more", "twice", "twice-1"}


def test_a_path_that_is_not_there_is_seen():
    good = "`tests/test_docs.py`, `pytest tests/hw`, `docs/`, `tools/*.py`, `model/none`, `a/b`\n"
    assert path_faults(good + "```\ntools/none.py\n```\n") == []
    assert path_faults(good + "`python tools/none.py --out x`, `host/none/`\n") == [
        "host/none/",
        "tools/none.py",
    ]


@pytest.mark.parametrize("fact", FACTS)
def test_figures_without_their_machine_date_or_command_are_seen(fact):
    facts = "".join(f"- **{name}:** x\n" for name in FACTS)
    good = f"# Results\n\nLead.\n\n## One\n\n{facts}\n## Two\n\n{facts}\n## What it says\n\nText.\n"
    assert result_faults(good) == []
    assert result_faults(good.replace(f"- **{fact}:** x\n", "", 1)) == [f"One: no {fact}"]
