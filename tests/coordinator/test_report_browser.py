"""The report in a real Chromium: no error, no request, sorting and filtering by keyboard, a phone's
width, paper. Driven over its own pipe (--remote-debugging-pipe), so that no library is needed."""

from __future__ import annotations

import base64
import json
import os
import re
import select
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("jinja2", reason="the extra `report` is not installed")
pytest.importorskip("plotly", reason="the extra `report` is not installed")

from pichak_coordinator.cli import app
from pichak_coordinator.records import Finding
from pichak_coordinator.simulated_fleet import drawn_fleet
from pichak_coordinator.simulated_rounds import Clock, put_network, put_profile
from pichak_coordinator.store import Store

BROWSER = next(
    (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on this machine (apt install chromium)"
)
EVIL = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=2'>"
_SECONDS = 120.0
CLOSE_ALL = "document.querySelectorAll('details.device').forEach((each) => (each.open = false))"

LINES_OF_MARKS = """[...document.querySelectorAll("#table tbody th bdi")].map((each) => {
  const [text, mark, at] = [each.firstChild, "(simulated)", document.createRange()];
  at.setStart(text, text.data.indexOf(mark));
  at.setEnd(text, text.data.indexOf(mark) + mark.length);
  return at.getClientRects().length;
})"""


class Browser:
    """One page of a headless Chromium."""

    def __init__(self, profile: Path) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        command = (
            f"exec 3<&{theirs_in} 4>&{theirs_out}; exec {BROWSER} --headless=new --no-sandbox "
            "--disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-pipe "
            f"--user-data-dir={profile} about:blank 2>/dev/null"
        )
        self._process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=[theirs_in, theirs_out], start_new_session=True
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in, self._left, self._count = ours_out, ours_in, b"", 0
        self.events: list[dict[str, Any]] = []
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            if not select.select([self._in], [], [], _SECONDS)[0]:
                raise TimeoutError("Chromium says nothing")
            self._left += os.read(self._in, 1 << 20)
        text, _, self._left = self._left.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        self._count += 1
        asked = {"id": self._count, "method": method, "params": params}
        if session:
            asked["sessionId"] = session
        os.write(self._out, json.dumps(asked).encode() + b"\0")
        while (answer := self._message()).get("id") != asked["id"]:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def do(self, method: str, **params: Any) -> dict[str, Any]:
        return self._call(method, self._session, **params)

    def js(self, expression: str) -> Any:
        made = self.do(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in made, made
        return made["result"].get("value")

    def key(self, name: str, code: int, text: str = "") -> None:
        common = {"key": name, "code": name, "windowsVirtualKeyCode": code}
        self.do("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.do("Input.dispatchKeyEvent", type="keyUp", **common)

    def open(self, path: Path, width: int = 1280, *, dark: bool = False) -> None:
        self.do(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.do("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.do("Page.navigate", url=path.as_uri())
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._message())

    def draw_all(self) -> int:
        """Open every section and scroll past every chart; how many are drawn."""
        return int(
            self.js(
                """(async () => {
                  for (const each of document.querySelectorAll("details.device")) each.open = true;
                  const places = [...document.querySelectorAll(".plot")];
                  for (const place of places) {
                    place.scrollIntoView();
                    for (let i = 0; i < 200 && !place.querySelector(".main-svg"); i++)
                      await new Promise((done) => setTimeout(done, 25));
                  }
                  return places.filter((p) => p.querySelector(".main-svg")).length;
                })()"""
            )
        )

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, and requests for anything but the page itself."""
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if (
                method in ("Runtime.exceptionThrown", "Log.entryAdded")
                or method == "Runtime.consoleAPICalled"
            ):
                found.append(json.dumps(params)[:500])
            elif method == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:", "blob:")):
                    found.append(url)
        return found

    def close(self) -> None:
        try:
            self._call("Browser.close")
            self._process.wait(_SECONDS)
        finally:
            self._process.kill()
            os.close(self._out)
            os.close(self._in)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("chromium"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    fleet = drawn_fleet(4, seed=111, fault_rate=0.0)
    clock = Clock(1_764_000_000.0)
    with Store.open(folder / "fleet.db", clock=clock) as store:
        for _ in range(2):
            clock.now += 86400
            put_profile(store, fleet.hosts, clock, settings={"name": EVIL})
        names = [host.host for host in fleet.hosts]
        put_network(store, fleet.hosts, clock, closed={(names[0], names[1])})
        run = store.runs()[1].run
        told = Finding("disk_slow", "warn", f"slow {EVIL}", {EVIL: EVIL}, metric=EVIL)
        store.record_findings(run, store.nodes_of(run)[0], "", [told])
    made = folder / "fleet.html"
    asked = ["fleet", "report", "--html", str(made), "--store", str(folder / "fleet.db")]
    done = CliRunner().invoke(app, [*asked, "--title", EVIL])
    assert done.exit_code == 0, done.output
    return made


@pytest.mark.parametrize(
    ("width", "dark"),
    [pytest.param(1280, True, marks=pytest.mark.slow), (1280, False), (360, False)],
)
def test_it_is_drawn_without_an_error_or_a_request_and_fits(
    browser: Browser, page: Path, width: int, dark: bool
) -> None:
    browser.open(page, width, dark=dark)
    drawn = browser.draw_all()
    assert drawn == browser.js("Object.keys(JSON.parse(figures.textContent)).length")
    assert drawn > 4 * 2
    assert browser.complaints() == []
    assert browser.js("typeof window.hacked") == "undefined"
    assert browser.js("document.querySelectorAll('img[src=x]').length") == 0
    # Nothing but what scrolls by itself is wider than the window.
    assert browser.js("document.documentElement.scrollWidth <= innerWidth")
    # The mark of the simulated, behind a node's name, is in one line.
    assert browser.js(LINES_OF_MARKS) == [1] * 4
    background = browser.js("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(18, 22, 28)" if dark else "rgb(255, 255, 255)")
    text = browser.js("getComputedStyle(document.querySelector('.device .plot .ytitle')).fill")
    assert text == ("rgb(228, 232, 238)" if dark else "rgb(26, 31, 39)")


def column(browser: Browser, title: str) -> tuple[int, list[str]]:
    number = browser.js(
        "[...document.querySelectorAll('#table thead th')].findIndex("
        f"(th) => th.textContent.trim().startsWith({json.dumps(title)}))"
    )
    cells = browser.js(
        f"[...document.querySelectorAll('#table tbody tr')].map((r) => r.cells[{number}].innerText)"
    )
    return number, cells


def test_the_table_sorts_by_keyboard_with_the_unmeasured_last(browser: Browser, page: Path) -> None:
    browser.open(page)
    number, before = column(browser, "bf16")
    measured = [float(c.replace(",", "")) for c in before if c != "–"]
    assert 0 < len(measured) < len(before)
    head = f"document.querySelectorAll('#table thead th')[{number}]"
    for direction, expected in (
        ("descending", sorted(measured, reverse=True)),
        ("ascending", sorted(measured)),
    ):
        browser.js(f"{head}.querySelector('button').focus()")
        browser.key("Enter", 13, "\r")
        assert browser.js(f"{head}.getAttribute('aria-sort')") == direction
        cells = column(browser, "bf16")[1]
        numbers = [float(c.replace(",", "")) for c in cells[: len(measured)]]
        assert numbers == expected
        assert set(cells[len(measured) :]) == {"–"}
    browser.key("Tab", 9)
    assert browser.js("document.activeElement.tagName") == "BUTTON"


def test_the_table_filters_by_words(browser: Browser, page: Path) -> None:
    browser.open(page)
    visible = "[...document.querySelectorAll('#table tbody tr')].filter((r) => !r.hidden).length"
    assert browser.js(visible) == 4
    browser.js("filter.focus()")
    for letter in "A100":
        browser.do("Input.insertText", text=letter)
    wanted = browser.js(
        "[...document.querySelectorAll('#table tbody tr')]"
        ".filter((r) => r.textContent.includes('A100')).length"
    )
    assert 0 < wanted < 4
    assert browser.js(visible) == wanted
    assert browser.js("shown.textContent") == f"{wanted} of 4 devices"
    browser.js("filter.value = ''; filter.dispatchEvent(new Event('input'))")
    browser.js("only.value = 'bad'; only.dispatchEvent(new Event('change'))")
    assert browser.js(visible) == browser.js(
        "document.querySelectorAll('#table tr.fail, #table tr.warn').length"
    )


@pytest.mark.slow
def test_paper_gets_every_section_of_a_small_fleet(
    browser: Browser, page: Path, tmp_path: Path
) -> None:
    browser.open(page, dark=True)
    browser.js(CLOSE_ALL)
    made = browser.do("Page.printToPDF", printBackground=True)
    (tmp_path / "fleet.pdf").write_bytes(base64.b64decode(made["data"]))
    assert (tmp_path / "fleet.pdf").read_bytes().startswith(b"%PDF")
    drawn = "document.querySelectorAll('.plot .main-svg').length"
    assert browser.js(drawn) > 4 * 2
    assert browser.complaints() == []
    if shutil.which("pdftotext"):
        command = ["pdftotext", "-q", str(tmp_path / "fleet.pdf"), "-"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert text.count("Micro-batch ramp") == 4
        assert "supervised_per_row" in text
        assert min(filled(tmp_path / "fleet.pdf")[:-1]) > 0.6


@pytest.mark.slow
def test_paper_has_the_light_colours_and_the_screen_gets_its_own_back(
    browser: Browser, page: Path
) -> None:
    browser.open(page, dark=True)
    browser.js("new Promise((done) => setTimeout(done, 500))")
    colour = "getComputedStyle(document.querySelector('.plot .xtick text')).fill"
    order = "[...document.querySelectorAll('.device .body > *')].map((e) => e.className).join()"
    before = browser.js(colour), browser.js(order)
    browser.js("dispatchEvent(new Event('beforeprint'))")
    browser.js("new Promise((done) => setTimeout(done, 500))")
    assert browser.js(colour) == "rgb(26, 31, 39)" != before[0]
    assert browser.js(order) != before[1]
    browser.js("dispatchEvent(new Event('afterprint'))")
    browser.js("new Promise((done) => setTimeout(done, 500))")
    assert (browser.js(colour), browser.js(order)) == before
    assert browser.complaints() == []


def filled(pdf: Path) -> list[float]:
    """Of each page the share of its height down to the lowest word on it."""
    command = ["pdftotext", "-q", "-bbox", str(pdf), "-"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pages = re.findall(r'<page width="[0-9.]+" height="([0-9.]+)">(.*?)</page>', text, re.DOTALL)
    return [
        max((float(y) for y in re.findall(r'yMax="([0-9.]+)"', words)), default=0.0) / float(height)
        for height, words in pages
    ]


def test_a_link_to_a_device_opens_its_section(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.js(CLOSE_ALL)
    browser.js("document.querySelector('#table tbody a').click()")
    browser.js("new Promise((done) => setTimeout(done, 200))")
    assert browser.js("document.querySelectorAll('details.device[open]').length") == 1
