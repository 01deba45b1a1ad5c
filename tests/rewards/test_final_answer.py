"""Where a response's answer is found, in time linear in its length."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.rewards.final_answer import MAX_ANSWER_LENGTH, final_answer, unwrapped

BALANCED = st.recursive(
    st.text("ab1+ ,", max_size=6), lambda inner: st.builds("x{{{}}}y{}".format, inner, inner)
)


@given(BALANCED.filter(str.strip), st.text("ab c{}$", max_size=30))
def test_the_content_of_the_last_box(content, before):
    assert final_answer(rf"{before}\boxed{{{content}}} .") == content.strip()


@given(st.text(max_size=200))
def test_any_text_has_an_answer_or_none(text):
    answer = final_answer(text)
    assert answer is None or answer.strip() == answer != ""
    unwrapped(text)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"\boxed{1} or \boxed{2}", "1 or 2"),
        (r"\boxed{1} apples and \boxed{2} pears", "1, 2"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"$\boxed{1}$, $\boxed{2}$", "1, 2"),
        (r"\boxed{1}. Or rather: \boxed{2}", "2"),
        (r"\boxed{3} \boxed{3}", "3"),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed{1} \boxed{", None),
        (r"\boxed{1} \boxed{}", None),
        (r"\boxed 42", None),
        (r"\boxedness{3}", None),
        ("The answer is: 12 apples.", "12 apples"),
        (r"The answer is \(x^2\), of course.", "x^2"),
        ("The answer is $5", "$5"),
        ("The answer is not 5. We get 7.", None),
        ("The answer is 5. No, the answer is not 5.", None),
        ("The answer is 42, which is 6 times 7.", "42"),
        ("The answer is 2, 3 or 4", "2, 3 or 4"),
        ("#### 42\n" + "x" * 8500, "42"),
        ("Therefore $x>5$ is the solution.", "x>5"),
        ("It is not $5$.", None),
        ("From $3$ we get $5$.", None),
        ("28 percent", "28 percent"),
        ("Answer: 5\nThe answer is 6", "6"),
        ("is the answer?", None),
        (" 1,234.5 ", "1,234.5"),
        ("x" * (MAX_ANSWER_LENGTH + 1), None),
        (rf"\boxed{{{'x' * (MAX_ANSWER_LENGTH + 1)}}}", None),
    ],
)
def test_examples(response, answer):
    assert final_answer(response) == answer


@pytest.mark.parametrize(
    "part", [r"\boxed{", r"\boxed{1} ", r"\boxed{1}", "answer is ", "{", "}", "$", "1,", "\\"]
)
def test_long_responses_take_no_time(part):
    started = time.process_time()
    for text in (part * 20_000, part * 20_000 + r"\boxed{", r"\boxed{" + part * 20_000):
        final_answer(text)
    assert time.process_time() - started < 2
