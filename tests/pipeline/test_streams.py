"""No kernel of a walk reads what is not written yet, or what is freed already, whatever the streams do."""

import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.pipeline.streams import Machine, OnGpu, Stream
from weft.pipeline.routing import CudaPlace, Message, Wiring, join_current, join_walk, leave_walk, message_of
from weft.pipeline.schedule import gpipe
from weft.pipeline.step import PipeStep, Run

DEVICES = {
    "one": [torch.device("cuda", 0)] * 3,
    "two": [torch.device("cuda", number) for number in (0, 1, 0)],
}
A, B = DEVICES["two"][:2]


def in_a_thread(function: Callable[[], Any]) -> Any:
    """Run it as a worker does: with no current stream but the default ones."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def walk(machine: Machine, devices: list[torch.device], *, strided: bool) -> None:
    """Three micro-batches forward and back through a stage per device, as `Run` does it, and a sum of gradients."""
    places: list[Any] = [CudaPlace(device) for device in devices]

    def act(place: CudaPlace, name: str, message: Message, *saved: OnGpu) -> tuple[OnGpu, Message]:
        with place.here():
            arrived = place.arrive(message)
            made = machine.kernel(name, place.device, arrived, *saved, strided=strided)
            return arrived, place.depart(made)

    inputs = [machine.kernel("input", devices[0]) for _ in range(3)]
    messages = [message_of(each) for each in inputs]
    del inputs
    join_walk(places)
    saved: list[list[OnGpu]] = []
    for number, place in enumerate(places):
        done = [in_a_thread(lambda p=place, m=m, k=number: act(p, f"forward {k}", m)) for m in messages]
        saved.append([arrived for arrived, _ in done])
        messages = [message for _, message in done]
    results = [message.value for message in messages]
    leave_walk(places, results)
    del done, messages
    gradients = [machine.kernel("loss", devices[-1], result) for result in results]
    del results
    messages = [message_of(each) for each in gradients]
    del gradients
    join_walk(places)
    for number, place in reversed([*enumerate(places)]):
        kept = saved.pop()
        messages = [
            in_a_thread(lambda p=place, m=m, k=number, s=kept: act(p, f"backward {k}", m, s.pop()))[1] for m in messages
        ]
    left = [message.value for message in messages]
    leave_walk(places, left)
    total = machine.kernel("sum", devices[0], *left)
    del messages, left
    join_current(places)
    total.memory.read(machine.current_stream(), "optimizer")
    del total
    gc.collect()


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("peers", [True, False], ids=["peers", "no peers"])
@pytest.mark.parametrize("strided", [True, False], ids=["strided", "contiguous"])
def test_a_walk_has_no_race(monkeypatch: pytest.MonkeyPatch, devices: str, peers: bool, strided: bool) -> None:
    machine = Machine(monkeypatch, peers=peers)
    walk(machine, DEVICES[devices], strided=strided)
    assert not machine.faults


def nothing(*_: Any) -> None: ...


MUTANTS: dict[str, tuple[Any, str, Any, str]] = {
    "no record_stream": (OnGpu, "record_stream", nothing, "freed while it is read"),
    "no wait for events": (Stream, "wait_event", nothing, "read before it is written"),
    "no event": (CudaPlace, "depart", lambda place, value: Message(value), "read before it is written"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("devices", DEVICES)
def test_a_missing_wait_or_record_is_seen(monkeypatch: pytest.MonkeyPatch, devices: str, mutant: str) -> None:
    """The checker itself: it sees what it is there for."""
    owner, name, function, fault = MUTANTS[mutant]
    machine = Machine(monkeypatch)
    monkeypatch.setattr(owner, name, function)
    walk(machine, DEVICES[devices], strided=False)
    assert any(fault in each for each in machine.faults)


def test_a_copy_from_an_unready_stream_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without peers PyTorch makes a strided source contiguous before its barrier, on the current stream of the source's
    device. If that is the worker's default stream, the value is not there yet."""
    machine, arrive = Machine(monkeypatch, peers=False), CudaPlace._arrive

    def only_the_target_waits(place: CudaPlace, tensor: Any, message: Message) -> Any:
        if tensor.device == place.device:
            return arrive(place, tensor, message)
        place.copy.wait_event(message.ready)
        with torch.cuda.stream(place.copy):
            moved = tensor.to(place.device)
        tensor.record_stream(place.copy)
        place.compute.wait_stream(place.copy)
        moved.record_stream(place.compute)
        return moved

    monkeypatch.setattr(CudaPlace, "_arrive", only_the_target_waits)
    walk(machine, DEVICES["two"], strided=True)
    assert "contiguous() of a copy: read before it is written" in machine.faults


def test_a_walk_that_fails_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's stream waits for all kernels that were launched: a layer may have written to a buffer."""
    machine = Machine(monkeypatch)
    place, late = CudaPlace(A), list[OnGpu]()

    def failing(*_: Any) -> Any:
        for stream in (place.compute, place.copy):
            with torch.cuda.stream(stream):
                late.append(machine.kernel("buffer", A))
        raise KeyError

    plan = SimpleNamespace(places=[place], executor=SimpleNamespace(walk=failing))
    step: Any = SimpleNamespace(plan=plan, ambient=None)
    with pytest.raises(KeyError):
        PipeStep._walk(step, Run(Wiring((), 0), {}, [], [], [place]), gpipe(1, 1), {})
    assert all(machine.current_stream(A).covers(tensor.memory.written) for tensor in late)


def test_both_streams_of_a_place_wait_for_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the one that copies."""
    machine, place = Machine(monkeypatch), CudaPlace(A)
    tensor = machine.kernel("optimizer", A)
    join_walk([place])
    assert all(stream.covers(tensor.memory.written) for stream in cast("Any", [place.compute, place.copy]))


def test_readers_of_gradients_wait_for_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd lets them wait for the current stream of the output's device."""
    machine, places = Machine(monkeypatch), [CudaPlace(A), CudaPlace(B)]
    with places[1].here():
        gradient = machine.kernel("backward", B)
    leave_walk(places, [gradient])
    total = machine.kernel("sum", B, gradient)
    with torch.cuda.stream(Stream(A)):  # type: ignore[arg-type]
        join_current(places)
        assert machine.current_stream().device == A
        assert cast("Any", machine.current_stream()).covers(total.memory.written)
