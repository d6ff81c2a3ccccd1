"""optuna-dashboard in a real browser: an infeasible trial looks infeasible and is not the best one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import browser
import pytest
import sample_storage
import sample_study
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from vopt.optimizer.dashboard import DashboardServer

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (browser.CHROMIUM and browser.DRIVER), reason="Chromium is not installed"),
]


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DashboardServer]:
    root = tmp_path_factory.mktemp("dashboard")
    made = sample_study.on_disk(sample_study.study(), root / "data")
    url = sample_storage.store(made, root / "studies.db", raw_values=True)
    server = DashboardServer(url, lambda _: [made], port=0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.close()
    thread.join(10)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.webdriver.Chrome]:
    with browser.browser(tmp_path_factory.mktemp("profile"), width=1400) as opened:
        yield opened


def wait_for(driver: browser.webdriver.Chrome, *words: str) -> str:
    """The page's text once all words are in it."""

    def text() -> str:
        return driver.find_element(By.TAG_NAME, "body").text

    WebDriverWait(driver, 40).until(lambda _: all(word in text() for word in words), f"not seen: {words}")
    return text()


def test_the_best_trial_shown_is_feasible(driver: browser.webdriver.Chrome, dashboard: DashboardServer) -> None:
    driver.get(f"{dashboard.url}dashboard/studies/1/trials")
    text = wait_for(driver, "Trial 4", "Best Trial")
    before, _ = text.split("Best Trial", 1)
    marked = [line for line in before.splitlines() if line.startswith("Trial ")][-1]
    assert marked == "Trial 8"
    assert text.count("Best Trial") == 1


def test_an_infeasible_trial_says_so(driver: browser.webdriver.Chrome, dashboard: DashboardServer) -> None:
    driver.get(f"{dashboard.url}dashboard/studies/1/trials?numbers=4")
    wait_for(driver, "Infeasible: Limit on success rate", "51.6 %", "27,830 tokens/s, which decides nothing", "engine.log")


def test_the_dashboards_own_plots_know_infeasible_trials(driver: browser.webdriver.Chrome, dashboard: DashboardServer) -> None:
    driver.get(f"{dashboard.url}dashboard/studies/1")
    wait_for(driver, "History", "Timeline", "Infeasible")
    assert browser.console_errors(driver) == []


def test_verdict_and_command_are_the_studys_note(driver: browser.webdriver.Chrome, dashboard: DashboardServer) -> None:
    driver.get(f"{dashboard.url}dashboard/studies/1/note")
    wait_for(driver, "Better than vLLM's defaults", "--max-num-batched-tokens 16384", "p95 TTFT")


def test_nothing_outside_this_machine_is_asked_for(driver: browser.webdriver.Chrome, dashboard: DashboardServer) -> None:
    urls = browser.requested_urls(driver)
    assert urls
    assert [url for url in urls if not url.startswith(dashboard.url)] == []
