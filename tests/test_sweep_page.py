"""report.html in a real browser: no network, a silent console, tables that sort, hover."""

from __future__ import annotations

import re
import shutil

import pytest

from sweeps import report, results
from tests.filled_sweep import STUDY, fill

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium and chromedriver here"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    folder = fill(tmp_path_factory.mktemp("page") / "sweep")
    report.write(folder, STUDY, results.read(folder))
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1300,1700",
                     "host-resolver-rules=MAP * ~NOTFOUND"):  # fmt: skip
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    driver.get((folder.path / "report.html").absolute().as_uri())
    WebDriverWait(driver, 60).until(
        lambda d: len(d.find_elements(By.CSS_SELECTOR, ".plotly-graph-div .trace")) > 0
    )
    yield driver
    driver.quit()


def column(browser, table, index):
    rows = browser.find_elements(By.CSS_SELECTOR, f"#{table} tbody tr")
    return [row.find_elements(By.TAG_NAME, "td")[index].text for row in rows]


def heading(browser, table, index):
    return browser.find_elements(By.CSS_SELECTOR, f"#{table} th button")[index]


def test_the_page_holds_everything_it_shows(browser):
    assert "does a sweep work?" in browser.find_element(By.TAG_NAME, "h1").text
    assert browser.find_element(By.CSS_SELECTOR, "p code").text  # the command
    fetched = browser.execute_script(
        "return performance.getEntriesByType('resource').map(e => e.name)"
    )
    assert [name for name in fetched if not name.startswith(("data:", "blob:"))] == []
    assert column(browser, "verdicts", 3) == ["CONFIRMED", "NOT CONFIRMED"]
    commands = column(browser, "runs", -1)
    assert len(commands) == 8 and all(c.startswith("python train.py ") for c in commands)
    assert "'--config=a <b>.py'" in commands[0]


def test_a_click_sorts_by_value_and_a_second_one_turns_it_round(browser):
    accuracy = 4
    assert heading(browser, "runs", accuracy).text.startswith("copy/accuracy")
    heading(browser, "runs", accuracy).click()
    rising = ["0.250", "0.250", "0.500", "0.500", "0.625", "0.750", "1", "–"]
    assert column(browser, "runs", accuracy) == rising
    assert (
        heading(browser, "runs", accuracy).find_element(By.XPATH, "..").get_attribute("aria-sort")
        == "ascending"
    )
    heading(browser, "runs", accuracy).click()
    # What has no value stays at the end.
    assert column(browser, "runs", accuracy) == [*rising[-2::-1], "–"]
    heading(browser, "runs", 0).click()
    names = column(browser, "runs", 0)
    assert names == sorted(names) and names[0] == "gqa,lr=0.001,seed=0"


def test_hovering_over_a_curve_names_its_run_and_its_value(browser):
    plot = browser.find_element(By.ID, "curves0")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    point = browser.execute_script(
        """const plot = arguments[0], layout = plot._fullLayout, box = plot.getBoundingClientRect();
        const trace = plot.data.findIndex(t => t.name === 'mqa,lr=0.01,seed=0');
        return [layout.xaxis.l2p(plot.data[trace].x[2]) + layout._size.l - box.width / 2,
                layout.yaxis.l2p(plot.data[trace].y[2]) + layout._size.t - box.height / 2];""",
        plot,
    )
    ActionChains(browser).move_to_element_with_offset(plot, *map(round, point)).perform()
    shown = WebDriverWait(browser, 20).until(
        lambda d: d.find_elements(By.CSS_SELECTOR, "#curves0 .hoverlayer .hovertext")
    )
    text = " ".join(label.get_attribute("textContent") for label in shown)
    assert re.search(r"680.*1", text) and "mqa,lr=0.01" in text


def test_the_console_is_silent(browser):
    assert browser.get_log("browser") == []
