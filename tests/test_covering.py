"""The calls that the conformance kit makes instead of every call of a product."""

import itertools

import pytest

from fusednorm.conformance import cases
from fusednorm.conformance.cases import covering

AXES = {
    "flags": ((True, False), (True, False), (True, False)),
    "sizes differ": ((1, 16, 77, 1030), "abc", (None, True), range(5)),
    "one value": ((1, 2, 3), ("only",), (4, 5)),
    "one axis": ((1, 2, 3),),
}


def pairs(rows):
    """Each two values in two columns that stand together in a row."""
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), min(2, len(row)))}


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_any_two_values_stand_together(axes):
    product = list(itertools.product(*axes))
    rows = covering(*axes)
    assert pairs(rows) == pairs(product)
    assert len(set(rows)) == len(rows)
    assert rows == [row for row in product if row in rows]
    assert rows == covering(*axes)


def test_the_rows_are_few():
    assert len(covering(*[(True, False)] * 8)) < 12
    assert len(covering(*[range(4)] * 4)) < 25


def test_rows_that_are_not_allowed():
    def allowed(*row):
        return sum(row) < 4

    axes = [range(4)] * 3
    product = [row for row in itertools.product(*axes) if allowed(*row)]
    rows = covering(*axes, allowed=allowed)
    assert set(rows) < set(product)
    assert pairs(rows) == pairs(product)


def test_everything_is_the_product(monkeypatch):
    monkeypatch.setattr(cases, "EVERYTHING", True)
    axes = AXES["sizes differ"]
    assert covering(*axes) == list(itertools.product(*axes))
