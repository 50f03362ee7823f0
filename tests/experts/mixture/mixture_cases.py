"""In-process experts that answer, fail, hang or return invalid results on demand."""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchweft.core.pytree import flatten, map_leaves, unflatten
from torchweft.core.spec import TensorSpec
from torchweft.experts.client.connections import Connections, LocalTransport
from torchweft.experts.client.retry import NEVER
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.wire import Call, Header, Kind, Received, write_fault
from torchweft.experts.wire.service import StepReceipt, describe

WIDTH = 5
GRID = [(0, 0), (0, 1), (1, 0), (1, 1)]
FOREVER = 1000.0
Answer = list[Tensor]
Fault = Callable[[Header, Answer], Answer | None]
"""Replaces a valid answer, raises, or returns None so that no answer is ever sent."""
Reply = Callable[[Call], None]
Mixture = TypeVar("Mixture")


def fails(header: Header, answer: Answer) -> Answer:
    raise ConnectionError("it is gone")


def hangs(header: Header, answer: Answer) -> None:
    return None


def first_row_is_nan(header: Header, answer: Answer) -> Answer:
    spoiled = [x.clone() for x in answer]
    spoiled[0][0] = float("nan")
    return spoiled


def lacks_a_row(header: Header, answer: Answer) -> Answer:
    return [x[:-1] for x in answer]


def only(kind: Kind, fault: Fault) -> Fault:
    return lambda header, answer: fault(header, answer) if header.kind is kind else answer


class Servers:
    """Serves modules. ``faults`` and ``late`` (seconds until the answer) are keyed by expert.

    ``trained`` is the flag in every description. Gradients accumulate in the parameters, because no optimizer steps.
    """

    def __init__(self, modules: Mapping[str, nn.Module], sample: tuple[Any, Any], most: int = 4096) -> None:
        self.modules = dict(modules)
        self.faults: dict[str, Fault] = {}
        self.late: dict[str, float] = {}
        self.headers: list[Header] = []
        self.rows: list[int] = []
        self.trained = True
        self._sample, self._most = sample, most

    def called(self, kind: Kind) -> list[str]:
        return sorted(header.uid for header in self.headers if header.kind is kind)

    def transport(self, address: str) -> LocalTransport:
        return LocalTransport(self.handle, name=address)

    def handle(self, call: Received, reply: Reply) -> None:
        self.headers.append(call.header)
        if call.header.kind is not Kind.INFO and call.header.uid in self.late:
            timer = threading.Timer(self.late[call.header.uid], self._answer, (call, reply))
            timer.daemon = True
            timer.start()
        else:
            self._answer(call, reply)

    def _answer(self, call: Received, reply: Reply) -> None:
        header = call.header
        fault = self.faults.get(header.uid, lambda _, unchanged: unchanged)
        try:
            copies = [tensor.clone() for tensor in call.tensors()]
            answer = fault(header, [] if header.kind is Kind.INFO else self._work(header, copies))
        except Exception as error:
            reply(Call(Header(kind=Kind.ERROR, call_id=header.call_id, data=write_fault(error))))
            return
        if answer is None:
            return
        if header.kind is Kind.INFO:
            reply(Call(Header(kind=Kind.INFO, call_id=header.call_id, uid=header.uid, data=self._info(header.uid))))
        else:
            self.rows += [len(output) for output in answer[:1]]
            receipt = StepReceipt(None, 1).to_bytes()
            reply(Call(Header(kind=Kind.RESULT, call_id=header.call_id, uid=header.uid, data=receipt), answer))

    def _info(self, uid: str) -> bytes:
        args, kwargs = self._sample
        with torch.no_grad():
            outputs = self.modules[uid](*args, **kwargs)
        description = {"name": uid, "max_batch_size": self._most, "trained": self.trained, "steps": 0}
        schemas = {"outputs_schema": _specs(outputs), "forward_schema": _specs(self._sample)}
        return describe({**description, **schemas}, None, 1)

    def _work(self, header: Header, tensors: Sequence[Tensor]) -> Answer:
        if header.kind in (Kind.PREPARE, Kind.COMMIT):
            return []
        count = len(flatten(self._sample)[0])
        inputs = [x.requires_grad_(x.is_floating_point()) for x in tensors[:count]]
        args, kwargs = unflatten(flatten(self._sample)[1], inputs)
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            outputs = flatten(self.modules[header.uid](*args, **kwargs))[0]
            if header.kind is Kind.FORWARD:
                return [x.detach() for x in outputs]
            torch.autograd.backward(outputs, list(tensors[count:]))
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]


def _specs(value: Any) -> Any:
    return map_leaves(TensorSpec.of, value)


def two_layers(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 7, dtype=dtype), nn.Tanh(), nn.Linear(7, WIDTH, dtype=dtype))


class World:
    """Context manager for a directory and `Servers` of the same experts. ``here`` has local copies of the modules."""

    def __init__(
        self,
        places: Sequence[tuple[int, ...]],
        make: Callable[[], nn.Module] = two_layers,
        sample: tuple[Any, Any] | None = None,
        most: int = 4096,
    ) -> None:
        uids = [".".join(["ffn", *map(str, place)]) for place in places]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(len(places))
            modules = {uid: make() for uid in uids}
        self.here = copy.deepcopy(modules)
        plain = ((torch.zeros(1, WIDTH, dtype=torch.float64),), {})
        self.servers = Servers(modules, plain if sample is None else sample, most)
        self.directory = LocalDirectory()
        self.leases = {uid: self.directory.declare(uid, f"{uid}:1", FOREVER) for uid in uids}
        self.connections = Connections(self.directory, open_transport=self.servers.transport)

    def options(self, **more: Any) -> dict[str, Any]:
        plain = {"in_features": WIDTH, "uid_prefix": "ffn", "dtype": torch.float64, "forward_timeout": 5.0}
        return {**plain, "backward_timeout": 5.0, "connections": self.connections, **more}

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *error: object) -> None:
        self.connections.close()
        self.directory.close()


def routed(kind: Callable[..., Mixture], world: World, **more: Any) -> Mixture:
    """Mixture over the places of `GRID`, with fixed router weights and without retries."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return kind(**world.options(grid_size=[2, 2], retry=NEVER, **more))


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
