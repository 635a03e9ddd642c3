"""A browser reads the documentation site as a visitor does: its pages, its search, its reference, its chart."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from tests.harness.processes import ROOT
from tests.tools.browser import Browser

#: What ``make docs`` has built.
SITE = ROOT / "build/site"


@pytest.fixture(scope="module")
def visit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Browser]]:
    """Opens a page of the site, by its path, in one browser for all tests."""
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(SITE)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server,
        ExitStack() as stack,
    ):
        stack.callback(server.terminate)
        assert server.stdout is not None
        port = re.search(r"port (\d+)", server.stdout.readline())
        assert port is not None
        browser = stack.enter_context(Browser(os.environ["CS_CHROMIUM"], tmp_path_factory.mktemp("browser")))

        def opened(path: str) -> Browser:
            browser.open(f"http://127.0.0.1:{port[1]}/{path}")
            return browser

        yield opened


TEXT = "() => document.querySelector('article').innerText"


def test_the_front_page_is_the_readme(visit: Callable[[str], Browser]) -> None:
    shown = visit("").when_there(TEXT)
    assert "Central Storage" in shown
    assert "import central_storage as cs" in shown


def test_the_reference_shows_the_strategy_with_its_arguments_and_an_example(visit: Callable[[str], Browser]) -> None:
    shown = visit("reference/CentralStorageStrategy/").when_there(TEXT)
    for part in ("compute_devices", "experimental_distribute_dataset", "Raises", ">>> with", "DeviceError"):
        assert part in shown


def test_the_chart_is_drawn(visit: Callable[[str], Browser]) -> None:
    width = visit("").when_there("() => document.querySelector('article img[src$=\".svg\"]').naturalWidth")
    assert width > 100


def test_the_search_finds_a_public_name(visit: Callable[[str], Browser]) -> None:
    browser = visit("?q=gradient_buffers")
    first = browser.when_there(
        """() => {
          const links = [...document.querySelectorAll('.md-search-result__link')].map(link => link.href);
          return links.length ? links : null;
        }"""
    )
    assert any("/reference/gradient_buffers/" in link for link in first)


def test_every_decision_is_on_the_page_that_lists_them(visit: Callable[[str], Browser]) -> None:
    links = visit("decisions/").when_there("() => [...document.querySelectorAll('article a')].map(link => link.href)")
    for decision in ROOT.glob("docs/decisions/[0-9]*.md"):
        assert any(f"/decisions/{decision.stem}/" in link for link in links)
