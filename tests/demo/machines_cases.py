"""A made-up story of the act "across machines", for tests of its sums and of its page."""

from typing import Any

from weft.demo.machines_story import Stay, Story, Trainer


def status(uid: str, steps: int, keys: int, *, restored: int | None = None, repeated: int = 0) -> dict[str, Any]:
    """What `Server.status` says, as far as it is read."""
    expert = {"steps": steps, "records": {"keys": keys, "repeated": repeated}}
    return {"experts": {uid: expert}, "keeping": {uid: {"restored": restored, "durable": steps}}}


def trainer(name: str, back: int, other: int, *, step: int, durable: int | None, first: float) -> Trainer:
    """It has had ``back`` and ``other`` backwards acknowledged, and 5 ms steps from 1.0 on."""
    accounts = {
        "dead:1": {"x": {"sent": 9, "acknowledged": 8, "step": step, "durable": durable}},
        "back:1": {"x": {"sent": back, "acknowledged": back, "step": 30, "durable": 20}},
        "other:1": {"y": {"sent": other, "acknowledged": other, "step": 40, "durable": 33}},
    }
    ledger = {"accounts": accounts, "errors": {}, "lost": 2}
    losses = [(1.0 + 0.005 * i, 1.0) for i in range(100)]
    result = {"accuracy": 0.9, "calls": 50, "given_up": 1, "ledger": ledger}
    return Trainer(name, True, losses, [(1.2, 0.8)], {"back:1": first}, result)


def story_of_a_death() -> Story:
    """Two trainers; expert x dies at step 17 and comes back at 12; y stays."""
    told = [
        trainer("0", 6, 20, step=15, durable=12, first=4.5),
        trainer("1", 4, 22, step=17, durable=None, first=4.25),
    ]
    back = Stay("a, again", ("x",), "back:1", 4.0, status("x", 12, 14, restored=12), status("x", 21, 24, repeated=3))
    other = Stay("b", ("y",), "other:1", 0.5, status("y", 0, 0), status("y", 41, 42))
    return Story(
        told, began=1.0, killed=2.0, noticed=2.1, ended=6.0, dead=Stay("a", ("x",), "dead:1"), back=back, other=other
    )
