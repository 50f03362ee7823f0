"""Routes: every value that is read was written at the same address. Gradients follow the routes in reverse."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from torchweft.pipeline.routing import OUTSIDE, Address, Route, Wiring
from torchweft.pipeline.step import StepMessages


def messages_of(wiring: Wiring, micro_batches: int) -> StepMessages:
    """The messages of a step in which every stage has its own worker."""
    return StepMessages(wiring, tuple(range(wiring.stages)), micro_batches)


def comes_from_outside(wiring: Wiring, address: Address) -> bool:
    """Whether no stage computes the value."""
    return wiring.routes[address.route].source == OUTSIDE or address.micro_batch < 0


@st.composite
def wirings(draw: st.DrawFn) -> Wiring:
    """Random routes between stages and the outside. A carry goes from a stage to itself."""
    stages = draw(st.integers(1, 4))
    routes: list[Route] = []
    for number in range(draw(st.integers(1, 5))):
        source = draw(st.integers(OUTSIDE, stages - 1))
        if source >= 0 and draw(st.booleans()):
            routes.append(Route(f"carry {number}", source, (source,), delay=draw(st.integers(1, 3))))
            continue
        readers = draw(st.sets(st.integers(source + 1, stages - 1), max_size=3)) if source + 1 < stages else set()
        routes.append(Route(f"value {number}", source, tuple(sorted(readers)) or (OUTSIDE,)))
    return Wiring(tuple(routes), stages)


@given(wirings())
def test_a_stage_knows_its_routes_in_their_order(wiring: Wiring) -> None:
    for stage in range(wiring.stages):
        reads = [number for number, route in enumerate(wiring.routes) if stage in route.readers]
        writes = [number for number, route in enumerate(wiring.routes) if stage == route.source]
        assert list(wiring.inputs[stage]) == reads
        assert list(wiring.outputs[stage]) == writes


@given(wirings(), st.integers(1, 5))
def test_reads_are_writes_or_outside_values(wiring: Wiring, count: int) -> None:
    messages = messages_of(wiring, count)
    read: Counter[Address] = Counter()
    written: Counter[Address] = Counter()
    for stage in range(wiring.stages):
        for i in range(count):
            read.update(messages.reads[stage][i])
            for route in wiring.outputs[stage]:
                written.update(messages.writes[route][i])
    assert not [address for address, times in (read + written).items() if max(times, 1) > 2]
    from_outside = {address for address in read if comes_from_outside(wiring, address)}
    to_outside = {address for address in written if address.reader == OUTSIDE}
    assert set(read) - from_outside == set(written) - to_outside
    assert not from_outside & set(written)


@given(st.integers(1, 4), st.integers(1, 6))
def test_carry_begins_and_ends_outside(delay: int, count: int) -> None:
    wiring = Wiring((Route("state", 0, (0,), delay),), 1)
    messages = messages_of(wiring, count)
    read = [address for i in range(count) for address in messages.reads[0][i]]
    written = [address for i in range(count) for address in messages.writes[0][i]]
    few = min(delay, count)
    assert [comes_from_outside(wiring, address) for address in read] == [i < delay for i in range(count)]
    assert [address.reader for address in written] == [0] * (count - few) + [OUTSIDE] * few
    assert read[few:] == written[: count - few]


def test_a_value_with_several_readers_has_an_address_for_each() -> None:
    wiring = Wiring((Route("skip", 0, (1, 3)),), 4)
    assert messages_of(wiring, 5).writes[0][2] == (Address(0, 1, 2), Address(0, 3, 2))
    assert wiring.inputs == ((), (0,), (), (0,))
