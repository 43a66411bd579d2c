# SPDX-License-Identifier: Apache-2.0
"""The page in a real Chromium: it uploads, shows progress, streams, stops, and is loaded again.

In an environment of its own, where `make browser-test` runs this. Pictures go to the folder that
HILLINFER_PICTURES names.
"""

import os
import shutil
from pathlib import Path

import pytest
from servers import running
from waiting import until

from hillinfer.serve.rules import ApiKeys
from hillinfer.store.store import Store

pytestmark = pytest.mark.browser
KEY = "sk-of-the-page-01"
PROGRESS = """() => {
  const one = document.querySelector("#files progress");
  return one && one.value / one.max;
}"""
FOCUSED = "document.activeElement.id || document.activeElement.textContent"
BOOK = "".join(f"cat {i} sat on mat {i * 7 % 61}. " for i in range(120))


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or "/usr/bin/chromium"
    with sync_playwright() as playwright:
        # Its sandbox wants a user who is not root.
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    context.set_default_timeout(20_000)
    page = context.new_page()
    said = []
    page.on("console", lambda line: said.append(line.text) if line.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    yield page
    context.close()
    # A key that is asked for is an answer of status 401, which the console tells.
    assert [line for line in said if "401" not in line] == []


@pytest.fixture(scope="module")
def server(endless_folder, cold_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("page") / "store"
    Store.create(directory, 64 << 20)
    with (
        Store(directory) as store,
        running(endless_folder, cold_dir, store=store, answer_tokens=80) as server,
    ):
        yield server


@pytest.fixture
def book(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text(BOOK)
    return file


def picture(page, name):
    folder = os.environ.get("HILLINFER_PICTURES")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png")


def slow(server, seconds):
    import time

    server.passes.before = lambda shape: time.sleep(seconds)


def test_a_document_is_uploaded_and_its_progress_is_shown(page, server, book):
    slow(server, 0.2)
    page.goto(server.url)
    page.get_by_text("ok", exact=True).wait_for()
    page.get_by_label("Text file").set_input_files(book)
    page.get_by_role("button", name="Upload").click()
    page.get_by_role("progressbar", name="Reading book.txt").wait_for()
    picture(page, "page-reading")
    seen = []
    until(lambda: seen.append(page.evaluate(PROGRESS)) or seen[-1] is None)
    assert len({*seen}) > 2
    assert seen[:-1] == sorted(seen[:-1])
    assert 0 <= seen[0] <= seen[-2] <= 1
    slow(server, 0)
    box = page.get_by_role("checkbox", name="book.txt")
    box.check()
    page.get_by_label("Your message").fill("where is the cat?")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("prompt tokens came from the store").wait_for()
    picture(page, "page-answered")
    note = page.get_by_text("prompt tokens came from the store").inner_text()
    cached, whole = note.split("; ")[-1].split(" prompt tokens")[0].split(" of ")
    assert int(cached) >= 0.9 * len(BOOK)
    assert int(whole) > int(cached)
    slow(server, 0)
    page.get_by_role("button", name="Delete book.txt").click()
    box.wait_for(state="detached")


def test_an_answer_streams_is_stopped_and_is_there_after_loading_again(page, server):
    slow(server, 0.2)
    page.goto(server.url)
    page.get_by_text("ok", exact=True).wait_for()
    question = page.get_by_label("Your message")
    question.fill("the cat sat")
    question.press("Enter")
    answer = page.locator(".turn.assistant")
    lengths = []
    until(lambda: lengths.append(len(answer.inner_text())) or len(set(lengths)) > 4)
    assert lengths == sorted(lengths)
    stop = page.get_by_role("button", name="Stop")
    assert stop.is_enabled()
    picture(page, "page-streaming")
    stop.click()
    page.get_by_text("stopped", exact=True).wait_for()
    until(lambda: server.inference.running == 0)
    passes = server.passes.count
    shown = answer.inner_text()
    assert len(shown) < 80
    assert stop.is_disabled()
    page.reload()
    page.get_by_text("ok", exact=True).wait_for()
    assert page.locator(".turn.user").inner_text() == "the cat sat"
    assert page.locator(".turn.assistant").inner_text() == shown
    assert server.passes.count == passes
    page.get_by_role("button", name="New conversation").click()
    page.reload()
    page.get_by_text("ok", exact=True).wait_for()
    assert page.locator(".turn").count() == 0


def test_figures_are_shown_and_no_key_is_asked_for(page, server):
    page.goto(server.url)
    page.get_by_role("rowheader", name="Memory budget").wait_for()
    row = page.get_by_role("row", name="Memory budget")
    assert row.get_by_role("cell").inner_text() == "24.0 MiB"
    assert page.get_by_label("API key").is_hidden()


def test_another_tab_does_not_know_the_key(page, browser, endless_folder, cold_dir):
    with running(endless_folder, cold_dir, keys=ApiKeys((KEY,))) as server:
        page.goto(server.url)
        page.get_by_label("API key").fill(KEY)
        page.get_by_role("button", name="Use it").click()
        page.get_by_text("ok", exact=True).wait_for()
        page.get_by_label("API key").wait_for(state="hidden")
        other = browser.new_page()
        other.goto(server.url)
        other.get_by_label("API key").wait_for()
        other.close()
        # It would ask a server that has ended.
        page.goto("about:blank")


def test_it_is_used_with_the_keyboard_alone(page, server):
    """Every control is reached by Tab in the order of the page, and shows that it is."""
    page.goto(server.url)
    page.get_by_text("ok", exact=True).wait_for()
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("document.activeElement.id || document.activeElement.textContent")
        )
    wanted = ["talk", "question", "send", "new", "file", "Upload"]
    assert [one for one in reached if one in wanted][: len(wanted)] == wanted


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_what_is_behind_them(page, server, scheme):
    """WCAG's contrast of 4.5 for text, in both schemes."""
    page.emulate_media(color_scheme=scheme)
    page.goto(server.url)
    page.get_by_text("ok", exact=True).wait_for()
    page.evaluate("""() => document.getElementById("talk").append(
        ...["user", "assistant", "note", "error"].map(name => Object.assign(
            document.createElement("div"), {className: `turn ${name}`, textContent: name})))""")
    picture(page, f"page-{scheme}")
    ratios = page.evaluate(
        """() => {
        const canvas = document.createElement("canvas").getContext("2d");
        const over = (...colours) => {
          canvas.clearRect(0, 0, 1, 1);
          for (const one of colours) {
            canvas.fillStyle = one;
            canvas.fillRect(0, 0, 1, 1);
          }
          return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
        };
        const light = rgb => rgb.map(one => one / 255)
          .map(one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
          .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
        const probe = document.body.appendChild(document.createElement("div"));
        probe.style.backgroundColor = "Canvas";
        const paper = getComputedStyle(probe).backgroundColor;
        return [...document.querySelectorAll(".turn")].map(one => {
          const style = getComputedStyle(one), behind = over(paper, style.backgroundColor);
          canvas.globalAlpha = Number(style.opacity);
          canvas.fillStyle = style.color;
          canvas.fillRect(0, 0, 1, 1);
          const front = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
          canvas.globalAlpha = 1;
          const [a, b] = [light(front), light(behind)].sort((x, y) => y - x);
          return (a + 0.05) / (b + 0.05);
        });
      }"""
    )
    assert len(ratios) == 4
    assert min(ratios) >= 4.5
