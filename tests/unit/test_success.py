"""What a success is. Must fail if a number inside another counts, or if a sign or a decimal point is dropped."""

import pytest
import sympy

from hiexp.data import Sample
from hiexp.notation import equals
from hiexp.success import is_success
from hiexp.trajectory import Status, Trajectory

VALUES = [
    "2",
    "12",
    "-3",
    "3",
    "0.5",
    "1/2",
    r"\frac{1}{2}",
    r"\dfrac12",
    r"-\frac{3}{4}",
    "250",
    "2.50",
    "1000",
    "1.0",
]


@pytest.mark.parametrize("answer", VALUES)
@pytest.mark.parametrize("gold", VALUES)
def test_numbers_are_equal_by_value_alone(answer, gold):
    def value(text):
        for known in (r"\frac{1}{2}", r"\dfrac12"):
            text = text.replace(known, "1/2")
        return sympy.Rational(text.replace(r"\frac{3}{4}", "3/4"))

    assert equals(answer, [gold]) is (value(answer) == value(gold))


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        (r"\boxed{12}", "12", True),
        ("$1,000$", "1000", True),
        ("(1, 2)", "(1,2)", True),
        ("(1,200)", "(1,2)", False),
        (r"\left( 1, 2 \right)", "(1,2)", True),
        ("X + 1", "x+1", True),
        ("1+x", "x+1", False),
        ("\u22123", "-3", True),
        ("12.", "12", True),
        ("about 12", "12", False),
        ("1/0", "1/0", True),
        ("", "", False),
        ("0", "0", True),
        ("0.0", r"\boxed{0}", True),
        ("9" * 5000, "9" * 5000, True),
        (r"\$18", "18", True),
        ("\\text{Evelyn}", "evelyn", True),
        ("2^{10}", "2^10", True),
    ],
)
def test_notation_does_not_matter_and_nothing_is_calculated(answer, gold, expected):
    assert equals(answer, [gold]) is expected
    assert equals(answer, ["no such answer", gold]) is expected


def test_mathematics_wants_equality_and_search_a_cover():
    sample = Sample("s", "q", ("2",))
    attempt = Trajectory("s", status=Status.ANSWERED, answer="12")
    assert is_success(attempt, sample) and not is_success(attempt, sample, is_math=True)
    attempt.answer = r"$\frac{4}{2}$"
    assert is_success(attempt, sample, is_math=True)
    attempt.status = Status.TRUNCATED
    assert not is_success(attempt, sample, is_math=True)
