"""The page of `pipedraft serve` in a headless browser."""

import json
import re

import pytest
from browser_runs import BROWSER, Browser, browsing
from http_runs import alone, make_engine, serving

pytestmark = [
    pytest.mark.all,
    pytest.mark.skipif(BROWSER is None, reason="no browser that could be asked"),
]
HOSTILE = "<img/src=x/onerror=window.hacked=1><script>window.hacked=1</script>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def place():
    with serving(make_engine()) as made:
        yield made


def ask(browser: Browser, text: str) -> None:
    browser.type(text)
    browser.wait_until("document.getElementById('send').textContent === 'Send' && !waiting.length")


def texts(browser: Browser, selector: str) -> list[str]:
    return browser.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map(part => part.textContent)"
    )


def test_a_typed_message_streams_an_answer_colored_by_who_made_it(browser, place):
    browser.open(f"{place.url}/", width=1000, height=700)
    browser.wait_until("document.getElementById('about').textContent")
    (about,) = texts(browser, "#about")
    assert about.startswith("tiny · target ") and "a tiny model" in about
    assert about.endswith("language_model drafts · schedule pipedec, 2 stages")
    browser.evaluate("document.getElementById('most').value = 24")
    ask(browser, "Hello")
    expected = alone(make_engine(), "user:Hello;", temperature=0.0)
    assert texts(browser, ".turn.user") == ["Hello"]
    assert texts(browser, ".turn.assistant") == [expected.text]
    assert len(texts(browser, ".assistant .draft")) == expected.num_accepted > 0
    assert len(texts(browser, ".assistant .target")) == 24 - expected.num_accepted > 0
    assert texts(browser, "#length") == [f"{expected.equivalent_acceptance_length:.2f}"]
    assert texts(browser, "#count") == [str(expected.num_steps)]
    assert len(texts(browser, "#steps ol")) == expected.num_steps
    assert len(texts(browser, "#steps ol:first-child li")) == 2
    colors = "getComputedStyle(document.querySelector('.assistant .{}')).backgroundColor"
    assert len({browser.evaluate(colors.format(kind)) for kind in ("draft", "target")}) == 2
    assert re.fullmatch(
        rf"[0-9.]+ tokens/s · 24 tokens · {expected.num_steps} steps · L′ [0-9.]+",
        *texts(browser, ".figures"),
    )
    browser.evaluate(
        "document.querySelector('[data-rejected]').dispatchEvent("
        "new Event('pointerover', {bubbles: true}))"
    )
    (tip,) = texts(browser, "#tip")
    assert re.match(r'rejected draft token: ".', tip)
    replaced = texts(browser, ".assistant .replaced")
    assert len(replaced) == expected.num_tested - expected.num_accepted


def test_an_example_is_asked_without_and_with_the_draft(browser, place):
    browser.open(f"{place.url}/", width=1000, height=700)
    browser.wait_until("document.getElementById('about').textContent")
    browser.evaluate("document.getElementById('most').value = 24")
    browser.evaluate("document.getElementById('compare').checked = true")
    top = "document.getElementById('log').getBoundingClientRect().top"
    above = browser.evaluate(top)
    browser.evaluate("document.querySelector('#start button').textContent = 'Hello'")
    browser.evaluate("document.querySelector('#start button').click()")
    browser.wait_until("document.querySelector('.verdict')?.textContent.trim()")
    expected = alone(make_engine(), "user:Hello;", temperature=0.0)
    assert texts(browser, ".turn.assistant") == [expected.text] * 2
    (verdict,) = texts(browser, ".verdict")
    assert verdict.startswith("With the draft: the same text, ")
    assert f"{expected.num_steps} pipeline steps instead of {2 * 23}" in verdict
    assert browser.evaluate(top) == above  # nothing has moved
    browser.evaluate("document.getElementById('again').click()")
    assert texts(browser, ".turn") == [] and browser.evaluate("turns.length") == 0


def test_hostile_text_stays_text_and_an_error_is_said(browser, place):
    browser.open(f"{place.url}/", width=1000, height=700)
    ask(browser, HOSTILE)
    assert texts(browser, ".turn.user") == [HOSTILE]
    assert browser.evaluate("document.images.length + document.scripts.length") == 1
    assert browser.evaluate("window.hacked") is None
    ask(browser, "two words")  # no token of this vocabulary
    assert len(texts(browser, "[role=alert]")) == 1
    assert "is no token" in texts(browser, "[role=alert]")[0]
    ask(browser, "again")
    assert len(texts(browser, ".turn.assistant:not(.error)")) == 2


def test_an_answer_can_be_stopped(browser, place):
    browser.open(f"{place.url}/", width=1000, height=700)
    with place.held() as held:
        browser.type("Hello")
        browser.wait_until("document.getElementById('send').textContent === 'Stop'")
        assert held.arrived.wait(60)
        browser.evaluate("document.getElementById('send').click()")
        browser.wait_until("document.getElementById('send').textContent === 'Send'")
    assert texts(browser, "[role=alert]") == ["stopped"]


def test_the_policy_stops_nothing_of_the_page_itself(browser, place):
    browser.events.clear()
    browser.open(f"{place.url}/", width=1000, height=700)
    ask(browser, "Hello")
    kinds = ("Log.entryAdded", "Runtime.exceptionThrown")
    assert [event for event in browser.events if event["method"] in kinds] == []


CODE = "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize(
    ("text", "is_code"),
    [
        (CODE, True),
        ("public int two() {\n", True),
        ("if (x) {\n", True),
        ("First:\n    a list\n    of two", True),
        ("Bees live in hives.\nThey make honey, for example: a lot.", False),
        ("While you wait: drink tea.", False),
        (f"```\n{CODE}```\nThis adds.", False),  # only the block is code
    ],
)
def test_code_without_fences_has_a_fixed_font(browser, place, text, is_code):
    browser.open(f"{place.url}/", width=1000, height=700)
    browser.evaluate(
        "window.place = add(document.body, 'div', '');"
        f"for (const piece of {json.dumps(text)}) put(place, 'draft', piece)"
    )
    font = browser.evaluate("getComputedStyle(place).fontFamily")
    assert ("monospace" in font) == is_code
    assert browser.evaluate("place.textContent") == text


def test_a_phone_has_room_for_the_answer(browser, place):
    browser.open(f"{place.url}/", width=390, height=760)
    browser.wait_until("document.getElementById('about').textContent")
    browser.evaluate("document.getElementById('most').value = 24")
    browser.evaluate("document.getElementById('text').focus()")
    ask(browser, "Hello")
    assert browser.evaluate("document.scrollingElement.scrollWidth") == 390
    assert browser.evaluate("document.getElementById('log').getBoundingClientRect().top") < 760 / 4
    assert not browser.evaluate("document.querySelector('.legend').open")


def test_one_stage_has_no_row_of_squares(browser):
    with serving(make_engine(num_stages=1)) as place:
        browser.open(f"{place.url}/", width=1000, height=700)
        browser.wait_until("document.getElementById('about').textContent")
        assert browser.evaluate("document.getElementById('steps').offsetHeight") == 0
