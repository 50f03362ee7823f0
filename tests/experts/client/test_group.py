"""What stands for several experts is committed, and discarded, with the others of a module."""

from collections.abc import Mapping

from torch import nn

from weft.experts.client import commit, discard
from weft.experts.client.autograd import RemoteLayer


class Several(RemoteLayer):
    accumulates = False

    def __init__(self, accumulates: bool = True, **stepped: bool) -> None:
        super().__init__()
        self.accumulates, self.asked, self._stepped = accumulates, 0, stepped

    def commit(self) -> Mapping[str, bool]:
        self.asked += 1
        return self._stepped

    def discard(self) -> None:
        self.asked -= 1


def test_all_that_accumulate_are_asked_once_and_told_by_expert() -> None:
    one, other, idle = Several(a=True, b=False, c=True), Several(b=True, c=False, d=False), Several(False, e=True)
    model = nn.Sequential(one, nn.Linear(1, 1), nn.Sequential(other, idle, one))
    assert commit(model) == {"a": True, "b": True, "c": True, "d": False}
    assert (one.asked, other.asked, idle.asked) == (1, 1, 0)
    discard(model)
    assert (one.asked, other.asked, idle.asked) == (0, 0, 0)


def test_other_layers_stand_for_no_expert() -> None:
    assert commit(nn.Linear(1, 1)) == {}
    discard(nn.Linear(1, 1))
