"""Routes: every value that is read was written, at the same address; and gradients walk them in reverse."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from weft.pipeline.routing import OUTSIDE, Address, Route, Wiring


@st.composite
def wirings(draw: st.DrawFn) -> Wiring:
    """Any routes between some stages and the outside; carries go from a stage to itself."""
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
def test_what_is_read_was_written_or_came_from_outside_and_nothing_else(wiring: Wiring, count: int) -> None:
    read: Counter[Address] = Counter()
    written: Counter[Address] = Counter()
    for stage in range(wiring.stages):
        for i in range(count):
            read.update(wiring.read_address(route, stage, i) for route in wiring.inputs[stage])
            for route in wiring.outputs[stage]:
                written.update(wiring.written_addresses(route, i, count))
    assert not [address for address, times in (read + written).items() if max(times, 1) > 2]
    from_outside = {address for address in read if wiring.comes_from_outside(address)}
    to_outside = {address for address in written if address.reader == OUTSIDE}
    assert set(read) - from_outside == set(written) - to_outside
    assert not from_outside & set(written)


@given(st.integers(1, 4), st.integers(1, 6))
def test_a_carry_takes_its_first_values_from_outside_and_gives_its_last_ones_there(delay: int, count: int) -> None:
    wiring = Wiring((Route("state", 0, (0,), delay),), 1)
    read = [wiring.read_address(0, 0, i) for i in range(count)]
    written = [address for i in range(count) for address in wiring.written_addresses(0, i, count)]
    few = min(delay, count)
    assert [wiring.comes_from_outside(address) for address in read] == [i < delay for i in range(count)]
    assert [address.reader for address in written] == [0] * (count - few) + [OUTSIDE] * few
    assert read[few:] == written[: count - few]


def test_a_value_with_several_readers_has_an_address_for_each() -> None:
    wiring = Wiring((Route("skip", 0, (1, 3)),), 4)
    assert wiring.written_addresses(0, 2, 5) == [Address(0, 1, 2), Address(0, 3, 2)]
    assert wiring.inputs == ((), (0,), (), (0,))
