"""A pipe over processes has the results of the serial pipe, in every use."""

import pytest

from tests.pipeline.processes import compositions


@pytest.mark.parametrize("case", compositions.CASES)
def test_a_use_is_bit_equal_to_serial(ranks, case: str) -> None:
    assert ranks(2).run(compositions.run_case, case) == [[], []]
