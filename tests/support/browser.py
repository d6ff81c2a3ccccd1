"""Debian's Chromium for the browser tests: headless, without any network but loopback, as wide and as dark as asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
_QUIET = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    # Whatever a page asks for beyond this machine is refused at once and seen in the log.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
    "--hide-scrollbars",
)


@contextmanager
def browser(profile: Path, *, width: int = 1280, height: int = 900) -> Iterator[webdriver.Chrome]:
    """A browser with its console and its requests logged."""
    options = Options()
    options.binary_location = str(CHROMIUM)
    for word in (*_QUIET, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(executable_path=str(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()


def resize(driver: webdriver.Chrome, width: int, height: int = 900) -> None:
    """The viewport of a device; narrower than a desktop window can be."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def color_scheme(driver: webdriver.Chrome, name: str) -> None:
    """``light`` or ``dark``."""
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": name}]})


def overflow(driver: webdriver.Chrome) -> int:
    """Pixels by which the page is wider than the window."""
    return int(driver.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def console_errors(driver: webdriver.Chrome) -> list[str]:
    return [str(entry["message"]) for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def requested_urls(driver: webdriver.Chrome) -> list[str]:
    """Every URL that a page asked for since the last call, data and blob URLs excluded."""
    found: list[str] = []
    for entry in driver.get_log("performance"):
        message: dict[str, Any] = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            url = str(message["params"]["request"]["url"])
            if not url.startswith(("data:", "blob:", "chrome:", "about:")):
                found.append(url)
    return found
