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
    assert rows == covering(*axes)
    assert set(rows) <= set(product)


def test_the_rows_are_few():
    assert len(covering(*[(True, False)] * 8)) < 12
    assert len(covering(*[range(4)] * 4)) < 25


def test_another_turn_takes_other_rows():
    axes = [(True, False)] * 3
    some = [covering(*axes, turn=turn) for turn in range(9)]
    assert all(pairs(rows) == pairs(itertools.product(*axes)) for rows in some)
    assert set(itertools.chain(*some)) == set(itertools.product(*axes))


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_values_alone(monkeypatch, axes):
    """The first of the rows above that have every value; without the last of them a value is missing."""
    whole = covering(*axes)
    monkeypatch.setattr(cases, "VALUES_ALONE", True)
    rows = covering(*axes)
    assert rows == whole[: len(rows)]
    assert [set(column) for column in zip(*rows, strict=True)] == [set(axis) for axis in axes]
    assert [set(column) for column in zip(*rows[:-1], strict=True)] != [set(axis) for axis in axes]


def test_everything_is_the_product(monkeypatch):
    monkeypatch.setattr(cases, "EVERYTHING", True)
    axes = AXES["sizes differ"]
    assert covering(*axes) == list(itertools.product(*axes))
