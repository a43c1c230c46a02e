"""The page in a real browser: quiet, self-contained, readable on a phone, and its script works.

Each check looks at the page as it is laid out, in a headless Chromium that is driven over its own
DevTools protocol (by Playwright, which downloads nothing here: the browser is the system's).
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from needs import skip_if_missing
from records import a_plan, edit, fail_run
from test_compare_records import make_comparison, make_square

from compare import report
from compare.evidence.equality import Fact, Said
from compare.page.chart import PALETTE
from compare.page.formats import fact_text

WIDTHS = (390, 1440)
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), ""
)


@pytest.fixture(scope="module")
def browser():
    skip_if_missing([] if CHROMIUM else ["chromium"], "Chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


PLANS = {
    "two engines": a_plan(),
    "cases": a_plan(
        configurations=("ddp-torchrun", "ddp-mpirun", "horovod-gloo"),
        cases={"resnet50": (), "vgg16": ("--arch", "vgg16")},
        question="Does a network with many weights tell the engines apart?",
    ),
    "one configuration": a_plan(configurations=("ddp-torchrun",), workers=(1, 2, 4)),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The paths of the pages by name."""
    root = tmp_path_factory.mktemp("pages")
    folders = {
        name: make_comparison(root / name.replace(" ", "-"), plan) for name, plan in PLANS.items()
    }
    folders["square"] = make_square(root / "square", workers=(1, 2))
    folders["troubles"] = troubles = make_comparison(root / "troubles")
    for file, changes in {
        "block-2/horovod-mpi-2/outcome.json": {"other_load": 1.7},
        "block-2/horovod-mpi-2/environment.json": {"cpu_model": "Another one"},
        "plan.json": {"created_utc": "2026-11-22T12:00:00+00:00"},
    }.items():
        edit(troubles / file, **changes)
    fail_run(troubles, "block-1/ddp-torchrun-1", exit_code=3)
    assert [report.main([str(folder)]) for folder in folders.values()] == [0] * len(folders)
    paths = {name: folder / "report.html" for name, folder in folders.items()}
    paths["side by side"] = root / "side-by-side.html"
    both = [str(folders["two engines"]), str(troubles)]
    assert report.main([*both, "--html", str(paths["side by side"])]) == 0
    return paths


NAMES = ["cases", "one configuration", "square", "troubles", "side by side"]


@contextmanager
def opened(
    browser: Any, path: Path, width: int = 1440, noted: list[str] | None = None, **context: Any
) -> Iterator[Any]:
    """A page in a window of this width; what it says and asks for goes to `noted`."""
    found = [] if noted is None else noted
    window = browser.new_context(viewport={"width": width, "height": 900}, **context)
    page = window.new_page()
    page.on("console", lambda message: found.append(message.text))
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("request", lambda request: found.append(request.url))
    page.goto(path.as_uri())
    yield page
    window.close()


# Texts of the page and of its plots that lie over each other, or out of their picture or window.
# Letters' boxes have room above and below, hence the slack.
FAULTS = """() => {
  const faults = [], slack = 2.5, width = document.documentElement.clientWidth;
  for (const one of document.querySelectorAll('details')) one.open = true;
  const pageWidth = document.documentElement.scrollWidth;
  if (pageWidth > width) faults.push('the page is broader than the window');
  const seen = (element) => {  // what a box that scrolls leaves to be seen of it
    const box = element.getBoundingClientRect(), frame = element.closest('.scroll');
    if (!frame) return box;
    const { left, right } = frame.getBoundingClientRect();
    const [from, to] = [Math.max(box.left, left), Math.min(box.right, right)];
    return { left: from, right: to, top: box.top, bottom: box.bottom, width: to - from,
             height: box.height };
  };
  const phone = matchMedia('screen and (max-width: 46rem)').matches;
  const hidden = (element) => phone && element.closest('.cards thead');
  const shown = (box) => box.width > 0 && box.height > 0;
  const overlap = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > slack
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > slack;
  const check = (items, where) => {
    items.forEach((a, i) => items.slice(i + 1).forEach((b) => {
      if (overlap(a.box, b.box)) faults.push(`${where}: "${a.text}" over "${b.text}"`);
    }));
  };
  for (const svg of document.querySelectorAll('svg')) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')]
      .map((element) => ({ text: element.textContent, box: element.getBoundingClientRect() }));
    check(texts, svg.closest('figure').id);
    for (const { text, box } of texts) {
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1
          || box.bottom > frame.bottom + 1) faults.push(`"${text}" sticks out of its plot`);
    }
  }
  const leaves = [...document.querySelectorAll(
    'h1, h2, h3, p, li, th, td, dt, dd, figcaption, summary, pre, svg, .tools > *, footer')];
  const boxes = leaves.filter((element) => !element.querySelector('p, li, pre, svg'))
    .map((element) => ({ text: element.textContent.trim().slice(0, 40), element,
                         box: seen(element) }))
    .filter(({ box }) => shown(box) && box.width > 1);
  const apart = boxes.filter(({ element }) => !hidden(element));
  check(apart, 'page');
  for (const { text, box } of apart) {
    if (box.left < 0 || box.right > width + 1) faults.push(`"${text}" sticks out of the window`);
  }
  for (const table of document.querySelectorAll('table')) {
    const frame = table.closest('.scroll') ? null : table.parentElement.getBoundingClientRect();
    if (frame && table.getBoundingClientRect().right > frame.right + 1)
      faults.push(`a table is broader than the text: ${table.tHead.textContent}`);
  }
  const probe = document.body.appendChild(document.createElement('span'));
  for (const cell of phone ? document.querySelectorAll('.cards td') : []) {
    const style = getComputedStyle(cell, '::before');  // a label, which has no box of its own
    probe.textContent = cell.dataset.label;
    probe.style = `font: ${style.font}; position: absolute; white-space: nowrap`;
    const room = parseFloat(getComputedStyle(cell).gridTemplateColumns);
    if (style.whiteSpace === 'nowrap' && probe.getBoundingClientRect().width > room)
      faults.push(`the label "${cell.dataset.label}" runs into its value`);
  }
  probe.remove();
  for (const cell of document.querySelectorAll('td, th, dd, dt, pre')) {
    if (cell.scrollWidth > cell.clientWidth + 1 && !hidden(cell))
      faults.push(`"${cell.textContent.trim()}" is broader than its cell`);
  }
  return faults;
}"""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_quiet_asks_for_nothing_and_nothing_lies_over_anything_else(
    browser, pages, name, width
):
    noted: list[str] = []
    with opened(browser, pages[name], width, noted) as page:
        page.wait_for_load_state("networkidle")
        assert page.evaluate(FAULTS) == []  # it opens all that is folded
        page.mouse.wheel(0, 3000)
    assert noted == [pages[name].as_uri()]
    assert pages[name].stat().st_size < 1_000_000


BROAD = "td, th { white-space: nowrap !important; min-width: 12rem }</style>"


@pytest.mark.parametrize(
    ("pattern", "new", "width", "words"),
    [
        ("<h2>Results", '<h2 style="margin-bottom:-40px">Results', 1440, "Results"),
        (
            "(<svg[^>]*>)",
            r'\1<text x="340" y="60">far too far</text>',
            1440,
            "sticks out of its plot",
        ),
        ("</style>", BROAD, 390, "runs into its value"),
        ("</style>", BROAD, 1440, "is broader than the text"),
    ],
)
def test_the_check_sees_a_fault(browser, pages, tmp_path, pattern, new, width, words):
    path = tmp_path / "page.html"
    path.write_text(re.sub(pattern, new, pages["square"].read_text()))
    with opened(browser, path, width) as page:
        assert any(words in fault for fault in page.evaluate(FAULTS))


def speeds(page: Any) -> list[float]:
    """The numbers of the first table's column images/s, as they are shown."""
    cells = page.locator("table.cards >> nth=0 >> tbody tr > :nth-child(3)").all_inner_texts()
    return [float(re.findall(r"[\d,]+", text)[0].replace(",", "")) for text in cells]


def test_a_click_on_a_header_sorts_and_a_third_one_restores(browser, pages):
    with opened(browser, pages["two engines"]) as page:
        header = page.locator("table.cards >> nth=0 >> th", has_text="images/s")
        numbers = speeds(page)
        assert numbers != sorted(numbers)
        for state, wanted in (
            ("ascending", sorted(numbers)),
            ("descending", sorted(numbers, reverse=True)),
            (None, numbers),
        ):
            header.locator("button").click()
            assert (header.get_attribute("aria-sort"), speeds(page)) == (state, wanted)


def test_a_phone_folds_all_but_the_first_table_and_sorts_by_a_menu(browser, pages):
    with opened(browser, pages["two engines"], 390) as page:
        folds = page.locator("details.fold")
        is_open = [fold.get_attribute("open") is not None for fold in folds.all()]
        assert is_open == [True] + [False] * (len(is_open) - 1) and len(is_open) > 4
        page.locator(".tools select").first.select_option(label="images/s")
        assert speeds(page) == sorted(speeds(page))


@pytest.mark.parametrize("clipboard", [True, False])
def test_copying_gives_tab_separated_values(browser, pages, clipboard):
    permissions = ["clipboard-read", "clipboard-write"]
    with opened(browser, pages["two engines"], permissions=permissions) as page:
        if not clipboard:  # a page without it falls back on what browsers had before
            page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(); }")
        button = page.locator(".tools:has(+ table.cards) button").first
        button.click()
        page.wait_for_function(
            "element => element.textContent === 'copied'", arg=button.element_handle()
        )
        lines = page.evaluate("navigator.clipboard.readText()").splitlines()
        head, *rows = [line.split("\t") for line in lines]
        assert head[:3] == ["configuration", "workers", "images/s"]
        assert len(rows) == len(speeds(page))
        assert {len(row) for row in rows} == {len(head)}
        assert all(float(row[2]) > 0 for row in rows)  # no range, no thousands' comma


def test_points_tell_their_values_to_mouse_finger_and_keyboard(browser, pages):
    with opened(browser, pages["two engines"], has_touch=True) as page:
        tip = page.locator(".tip")
        assert tip.is_hidden()
        svg = page.locator("#throughput svg")
        svg.scroll_into_view_if_needed()
        box = svg.locator(".hits circle").first.bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(x, y)
        assert re.fullmatch(r"DDP over Gloo, 1 worker: [\d,]+ images/s", tip.inner_text())
        page.mouse.move(0, 0)
        assert tip.is_hidden()
        page.touchscreen.tap(x, y)
        assert tip.is_visible()
        svg.focus()
        told = []
        for key in ("Home", "ArrowLeft", "ArrowRight", "End", "ArrowRight"):
            page.keyboard.press(key)
            told.append(tip.inner_text())
        assert len(set(told)) == 3 and (told[0], told[3]) == (told[1], told[4])  # first and last
        page.keyboard.press("Escape")
        assert tip.is_hidden()


def test_the_page_works_without_its_script(browser, pages):
    with opened(browser, pages["two engines"], java_script_enabled=False) as page:
        assert page.locator("table.cards tbody tr").count() >= 8
        assert page.locator(".tools").count() == 0
        assert page.locator("#throughput .hits circle title").count() > 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_letters_stand_out_from_the_paper(browser, pages, scheme):
    """WCAG 2.1 asks for a contrast of 4.5 : 1."""
    script = """() => {
      const light = (text) => {
        const parts = text.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
          .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
      };
      const paper = light(getComputedStyle(document.body).backgroundColor);
      return [...document.querySelectorAll('p, td, th, dt, dd, li, figcaption, summary, svg text')]
        .map((element) => {
          const style = getComputedStyle(element);
          const ink = light(element.closest('svg') ? style.fill : style.color);
          const [dark, bright] = [paper, ink].sort((a, b) => a - b);
          return [(bright + 0.05) / (dark + 0.05), element.textContent.trim().slice(0, 40)];
        }).filter(([contrast]) => contrast < 4.5);
    }"""
    with opened(browser, pages["troubles"], color_scheme=scheme) as page:
        assert page.evaluate(script) == []


@pytest.mark.parametrize("name", ["two engines", "cases"])
def test_print_has_light_colours_and_no_buttons(browser, pages, name):
    with opened(browser, pages[name], color_scheme="dark") as page:
        page.emulate_media(media="print")
        page.set_viewport_size({"width": 680, "height": 900})  # A4 with margins of 15 mm
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == "rgb(255, 255, 255)"
        assert not page.locator(".tools").first.is_visible()
        verdict = page.locator("#verdict").bounding_box()
        assert verdict["y"] + verdict["height"] < 680 * 267 / 180  # on the first page
        folded = page.locator("details:not([open])")
        before = folded.count()
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert before > folded.count() == 0  # such as the commands
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert folded.count() == before
        assert page.evaluate(FAULTS) == []
        assert len(page.pdf(format="A4")) > 10_000


def test_colours_stand_in_one_place(pages):
    """Each colour is a variable of PALETTE, on light and dark screens and on paper."""
    for path in pages.values():
        text = path.read_text()
        style = text[text.index("<style>") : text.index("</style>")]
        used = set(re.findall(r"var\(--([\w-]+)\)", text)) - {"serif", "sans", "mono", "c"}
        assert used <= PALETTE.keys()
        colours = [colour for three in PALETTE.values() for colour in three]
        assert sorted(re.findall(r"#[0-9a-f]{3,6}\b", style)) == sorted(colours)
    assert used and all(len(three) == 3 for three in PALETTE.values())


def test_a_commit_that_changed_between_blocks_is_shown_with_the_later_one():
    rows = tuple(Said(block, "mine", f"commit-{max(block, 2)}") for block in (1, 2, 3))
    fact = Fact("git_commit", "", 0, True, True, (), rows)
    assert fact_text(fact) == "commit-2, then commit-3"
    seed = replace(fact, field="seed", rows=rows[1:])
    assert fact_text(seed) == "commit-2, another in each block"
