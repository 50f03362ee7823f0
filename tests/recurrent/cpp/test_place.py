"""Places: which row a step uses, and where a matrix' elements are."""

import pytest

from weft.recurrent.cpp.ir import Place, Row

ROWS: dict[Row, tuple[str, str | None]] = {
    "same": ("a", "a"),
    "step": ("(a + t * 6L)", "(a + 0 * 6L)"),
    "next": ("(a + (t + 1) * 6L)", "(a + 1 * 6L)"),
    "in": ("(a + ((t + 1) & 1) * 6L)", None),
    "out": ("(a + (t & 1) * 6L)", None),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_found_in_any_step_and_in_the_first(row: Row) -> None:
    here, first = ROWS[row]
    place = Place("a", row, 6, (3, 1), 2)
    assert place.pointer == f"{here} + 2L"
    assert place.lasting == (row in ("step", "next"))
    if first is not None:
        assert place.first == f"{first} + 2L"


def test_only_what_has_a_row_for_each_step_is_lasting_and_has_a_first_step() -> None:
    with pytest.raises(KeyError):
        _ = Place("a", "in", 6, (3, 1)).first


def test_an_element_of_a_matrix_is_reached_by_its_strides() -> None:
    place = Place("a", "same", 24, (12, 3, 1), 5)
    assert place.at(2, "r0", "q") == "a + 5L + b * 12L + r0 * 3L + q * 1L"
    assert place.at(None, "0") == "a + 5L"
    assert place.turned().strides == (12, 1, 3)


def test_a_broadcast_axis_has_no_stride() -> None:
    assert Place("a", "same", 3, (3, 1)).spread((1, 3), (4, 2, 3)).strides == (0, 0, 1)
