"""What a stack learns about its layers, and when it forgets."""

import copy

import torch
from torch import nn

from weft.core.executor import SerialExecutor, ThreadExecutor
from weft.recurrent.layers.crew import Crew, configuration, kind_of
from weft.recurrent.layers.reverse import Axes


def test_the_first_call_of_a_kind_stays_in_the_callers_thread() -> None:
    crew = Crew(2)
    assert isinstance(crew.executor("a"), SerialExecutor)
    assert isinstance(crew.executor("a"), ThreadExecutor)
    assert isinstance(crew.executor("b"), SerialExecutor)
    again = copy.deepcopy(crew)
    assert isinstance(again.executor("a"), SerialExecutor) and len(again.uses) == 2


def test_a_kind_is_what_plans_depend_on_and_not_the_number_of_steps() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    x = torch.zeros(5, 2, 3)

    def kind(x: torch.Tensor = x, states: object = (None,), tables: tuple[bool, ...] = (False,)) -> object:
        return kind_of(net, x, states, tables, Axes.of(x, batch_first=False))

    first = kind()
    assert kind(torch.zeros(9, 2, 3)) == first
    others = [kind(torch.zeros(5, 3, 3)), kind(x.double()), kind(states=(x[0],)), kind(tables=(True,))]
    with torch.no_grad():
        others.append(kind())
    with torch.autocast("cpu", torch.bfloat16):
        others.append(kind())
    net[1].p = 0.1
    others.append(kind())
    net[0].weight.requires_grad_(False)
    others.append(kind())
    assert len({first, *others}) == 1 + len(others)


def test_a_configuration_knows_training_flags_and_probabilities() -> None:
    net = nn.Sequential(nn.Dropout(0.5))
    seen = [configuration(net), configuration(net.eval())]
    net[0].p = 0.25
    seen.append(configuration(net))
    assert len(set(seen)) == 3
