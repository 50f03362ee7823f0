"""A model with an ordinary forward() over processes computes what the model itself does."""

from collections.abc import Callable

import pytest

from tests.pipeline.processes import splitting
from tests.pipeline.processes.launch import Ranks
from tests.pipeline.split.test_zoo import needs_transformers

Find = Callable[[int], Ranks]
pytestmark = pytest.mark.filterwarnings("ignore")

HERE = ["unet", *(pytest.param(name, marks=needs_transformers) for name in splitting.FAMILIES if name != "unet")]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", HERE)
def test_any_model_trains_over_ranks_as_plain(ranks: Find, name: str, schedule: str, size: int) -> None:
    results = ranks(size).run(splitting.train_beside_plain, name, schedule, size == 3, seconds=120.0)
    keys = [key for result in results for key in result["keys"]]
    assert sorted(keys) == sorted(results[0]["all"])
    assert all(result["keys"] for result in results)
    assert max(result["worst"] for result in results) <= 1e-12
