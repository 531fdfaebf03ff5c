"""Final number in an answer to GSM8K, in the forms written by models."""

from decimal import Decimal

import pytest

from pipedraft.eval.answer import _boxes, find_number

NUMBERS = {
    # "####" first, wherever it is.
    "9 eggs at $2 make 18.\n#### 18\nThat is 9 eggs at 2 dollars.": "18",
    "#### 18\n\nShall I go on with question 2?": "18",
    "#### $1,080.00": "1080",
    "#### **18**": "18",
    "####18": "18",
    "####\n7": "7",
    "#### -5": "-5",
    "#### \u22125": "-5",
    "#### $-5$": "-5",
    "#### 18 dollars": "18",
    "#### 18%": "18",
    "#### €70": "70",
    "#### \\boxed{18}": "18",
    "#### $\\boxed{18}$": "18",
    "#### 1\\,250": "1250",
    "#### 70{,}000": "70000",
    "#### 18\n\nQuestion: 2 + 2?\n#### 4": "18",
    "\\boxed{17}\n#### 18": "18",
    "10 legs.\n#### 18 legs on 2 dogs": "18",
    "##### 5\nSo 18": "18",
    "#### Step 1: 5 cats\nTogether 40": "40",
    "#### 1. Eggs\n9\n#### 2. Money\nThe answer is 18.": "18",
    "#### 1. Eggs\n9\n#### 2. Money\n#### 18": "18",
    # Then the last box with a number.
    "So the profit is \\boxed{70,000}. To check: 2 ways give it.": "70000",
    "The answer is $\\boxed{1\\,250}$.": "1250",
    "\\boxed{70{,}000} in 2 years": "70000",
    "\\boxed{1{,}234{,}567}": "1234567",
    "\\boxed{12\\;000}": "12000",
    "\\boxed{1,\\!250}": "1250",
    "\\boxed{\\$18}": "18",
    "\\boxed{18\\%}": "18",
    "\\boxed{\\text{18 dollars}} each of 3": "18",
    "\\boxed{18 \\text{ m}^2}": "18",
    "\\boxed{x = 18}, from 4 steps": "18",
    "\\boxed{-5} at 3 o'clock": "-5",
    "\\boxed{3}, no, \\boxed{4}. See 9": "4",
    "\\boxed{18} and \\boxed{A}, 3": "18",
    "\\boxed{A} is 3": "3",
    "\\fbox{18} in 2 days": "18",
    "\\boxed{18": "18",
    # Then the last number.
    "The answer is 72, altogether.": "72",
    "It is 18.": "18",
    "9 * 2 = $18": "18",
    "so **$1,234,567.50** in all": "1234567.5",
    "10.00 dollars": "10",
    "a share of .5": "0.5",
    "x = -3": "-3",
    "x = \u22123": "-3",
    "10 - 3": "3",
    "- 3 legs": "3",
    "a loss of -$5": "-5",
    "a loss of $-5": "-5",
    "10-3": "3",
    "10 \u2013 3 = 7": "7",
    "between 5\u201312": "12",
    "an area of 18 m^2": "18",
    "1\u202f250 in all": "1250",
    "1\u00a0250": "1250",
    "CHF 12'500": "12500",
    "5, 6": "6",
    "+18": "18",
    "\uff11\uff18": "18",
    "<think>\\boxed{3} #### 4</think>It is 18.": "18",
    "<think>It is 18</think>": "18",
    "none": None,
    "": None,
}


@pytest.mark.parametrize("answer", NUMBERS, ids=lambda text: ascii(text[-24:]))
def test_number_of_an_answer(answer: str) -> None:
    number = NUMBERS[answer]
    assert find_number(answer) == (None if number is None else Decimal(number))


def test_a_boxs_contents_end_before_its_brace() -> None:
    assert [*_boxes("\\boxed{a{b}c} \\fbox{2} \\boxed{3")] == ["a{b}c", "2", "3"]
