"""The page in a real browser: it draws, fits, filters, copies, and asks for nothing."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
import sample_study
from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.ui import WebDriverWait

from vopt.optimizer.recommend import Importance
from vopt.optimizer.report.page import page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (browser.CHROMIUM and browser.DRIVER), reason="Chromium is not installed"),
]
IMPORTANCE = Importance({"max_num_seqs": 0.6, "max_num_batched_tokens": 0.4})


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pages")
    for name, make in {**sample_study.VARIANTS, "running": sample_study.running}.items():
        made = sample_study.on_disk(make(), root / "data")
        (root / f"{name}.html").write_text(page(made, IMPORTANCE), encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.webdriver.Chrome]:
    with browser.browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def drawn(driver: browser.webdriver.Chrome) -> int:
    return int(driver.execute_script("return document.querySelectorAll('.plot .main-svg').length"))


def open_page(driver: browser.webdriver.Chrome, path: Path, width: int = 1280, height: int = 900) -> None:
    browser.resize(driver, width, height)
    driver.get(path.as_uri())
    WebDriverWait(driver, 30).until(lambda _: driver.execute_script("return document.readyState") == "complete")


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", [*sample_study.VARIANTS, "running"])
def test_pages_fit_and_ask_for_nothing(driver: browser.webdriver.Chrome, pages: Path, name: str, width: int) -> None:
    browser.requested_urls(driver)
    browser.console_errors(driver)
    # As tall as a page can be: every figure is in view and has to be drawn.
    open_page(driver, pages / f"{name}.html", width, 30_000)
    figures = len(driver.find_elements(By.CLASS_NAME, "plot"))
    WebDriverWait(driver, 30).until(lambda _: drawn(driver) >= 2 * figures, "a figure was not drawn")
    assert browser.overflow(driver) <= 0
    assert browser.console_errors(driver) == []
    assert [url for url in browser.requested_urls(driver) if not url.startswith("file:")] == []
    assert driver.find_element(By.TAG_NAME, "h1").is_displayed()
    assert figures >= (13 if name == "better" else 1)


def test_the_filter_shows_what_was_asked_for(driver: browser.webdriver.Chrome, pages: Path) -> None:
    open_page(driver, pages / "better.html")
    words = driver.find_element(By.ID, "filter-words")
    kind = Select(driver.find_element(By.ID, "filter-kind"))

    def shown() -> int:
        return sum(row.is_displayed() for row in driver.find_elements(By.CSS_SELECTOR, "#trials tbody tr"))

    assert shown() == 29
    words.send_keys("max_num_seqs=768 confirmation")
    assert 0 < shown() < 10
    words.clear()
    words.send_keys("x")
    words.clear()
    kind.select_by_value("rejected")
    assert shown() == 9
    assert driver.find_element(By.ID, "filter-count").text == "9 of 29"
    kind.select_by_value("limit:success_rate")
    assert shown() == 1
    row = driver.find_element(By.CSS_SELECTOR, "#trials tbody tr:not([hidden]) summary")
    row.click()
    assert "51.6 %" in driver.find_element(By.CSS_SELECTOR, "#trials tbody tr:not([hidden]) details").text


def test_the_command_is_copied_as_it_is(driver: browser.webdriver.Chrome, pages: Path) -> None:
    open_page(driver, pages / "better.html")
    permission = {"origin": "file://", "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    driver.execute_cdp_cmd("Browser.grantPermissions", {"permissions": permission["permissions"]})
    button = driver.find_element(By.CSS_SELECTOR, "button[data-copy=command]")
    button.click()
    WebDriverWait(driver, 10).until(lambda _: button.text == "Copied")
    copied = driver.execute_async_script(
        "const done = arguments[0]; navigator.clipboard.readText().then(done, e => done(String(e)))"
    )
    assert copied == driver.find_element(By.ID, "command").text
    words = shlex.split(copied.replace("\\\n", " "))
    program = words.index("vllm")
    assert [word.partition("=")[0] for word in words[:program]] == ["LMCACHE_NOTE", "VLLM_USE_DEEP_GEMM"], "its variables"
    assert words[program + 1 : program + 3] == ["serve", "Qwen/Qwen3.5-35B-A3B-FP8"]


def test_dark_is_dark_and_its_figures_too(driver: browser.webdriver.Chrome, pages: Path) -> None:
    read = "return getComputedStyle(document.body).backgroundColor"
    ink = "return getComputedStyle(document.querySelector('#history .xtick text')).fill"
    open_page(driver, pages / "better.html", height=4000)
    WebDriverWait(driver, 30).until(lambda _: drawn(driver) >= 2)
    seen = []
    for scheme in ("light", "dark"):
        browser.color_scheme(driver, scheme)
        time.sleep(0.5)
        seen.append((driver.execute_script(read), driver.execute_script(ink)))
    browser.color_scheme(driver, "light")
    assert seen[0][0] == "rgb(255, 255, 255)"
    assert seen[0][0] != seen[1][0]
    assert seen[0][1] != seen[1][1], "the figures follow the theme"


def test_it_prints_in_a_few_pages_with_its_figures(driver: browser.webdriver.Chrome, pages: Path, tmp_path: Path) -> None:
    open_page(driver, pages / "better.html")
    driver.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    figures = len(driver.find_elements(By.CLASS_NAME, "plot"))
    assert drawn(driver) >= 2 * figures, "also those that nobody scrolled to"
    widths = driver.execute_script("return [...document.querySelectorAll('.plot .main-svg')].map(plot => plot.clientWidth)")
    assert max(widths) <= 650, "A4 between its margins is 718 pixels wide: a wider plot would be cut"
    printed = driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert len(printed["data"]) > 100_000
    driver.execute_script("window.dispatchEvent(new Event('afterprint'))")
    widest = "return Math.max(...[...document.querySelectorAll('.plot .main-svg')].map(plot => plot.clientWidth))"
    WebDriverWait(driver, 10).until(lambda _: driver.execute_script(widest) > 650)


def test_without_scripts_verdict_command_and_tables_are_there(driver: browser.webdriver.Chrome, pages: Path) -> None:
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        driver.get((pages / "better.html").as_uri())
        text = driver.find_element(By.TAG_NAME, "body").text
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    for part in ("Better than vLLM's defaults", "--max-num-seqs 768", "Limit on success rate", "confirm-3-lite"):
        assert part in text
