"""Idempotency table: a retried backward or commit is applied once.

    first request with a key     runs, and its result is stored under (kind, client, key)
    retry while it is running    joins the running task
    retry afterwards             receives a copy of the stored result
    retry with another payload   KeyReusedError, because nothing can run under this key
    retry after eviction         ResultEvictedError, because it was applied and the result is no longer stored
    retry after a failure        runs again, because nothing was applied

A plain least-recently-used cache would not be safe: a client with many keys could evict the keys of others, and their
retries would step twice. Therefore every principal (the holder of a quota) has a share of the keys and of the result
bytes. A key beyond that share replaces the principal's own oldest key. A full table forgets the oldest key of the
largest holder as soon as no retry of it is expected any more, and rejects new principals until then. Within these
bounds no optimizer step is applied twice, even if the network loses or repeats messages.

A key takes 48 bytes in a saved state and about 400 in memory, because requests and principals are stored as digests.
"""

import ctypes
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Literal

import torch

from torchweft.core.errors import UsageError
from torchweft.core.validation import Validator
from torchweft.experts.errors import KeyReusedError, OverloadError, ResultEvictedError
from torchweft.experts.statistics import IdempotencyStatistics
from torchweft.experts.task import Results, Task

RequestKind = Literal["backward", "commit"]
MiniBatch = tuple[str | None, str]  # Client and name of a mini-batch

# Bound of the results in a saved state. Exactly-once only needs keys and steps, and states are saved often.
SAVED_RESULT_BYTES = 1_000_000
_RESULT_OVERHEAD = 512  # bytes of a result in a file, in addition to its tensors

# Packed bytes, because 100,000 tuples would take several times the memory, and a state is a plain join of the rows.
_VALUE = struct.Struct("<8sqQd")  # digest of the principal, step, fingerprint, time of recording
_ROW = struct.Struct(f"<16s{_VALUE.size}s")  # digest of the request, and the value
_DROPPED = -1  # stands for a step in the entry of a mini-batch that must not be continued


@dataclass(frozen=True)
class IdempotencyOptions:
    """Bounds of an `IdempotencyTable`.

    Args:
        max_result_bytes: total size of stored results. With 0, every late retry is rejected.
        max_result_age: seconds for which a retry is expected after a request was applied, or until the deadline of
            the request if that is later. Until then its result is stored, and no other principal can evict its key.
        max_keys: number of remembered keys.
        max_client_keys: number of keys that one principal can hold. None: half of ``max_keys``.
        max_age: seconds after which a key is forgotten.

    Raises ``UsageError`` that lists every invalid bound.

    Example:
        >>> rows, bounds = (weft.TensorSpec((None, 8), torch.float32),), weft.experts.IdempotencyOptions(max_age=600.0)
        >>> expert = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), torch.optim.SGD, args_schema=rows, idempotency=bounds)
    """

    max_result_bytes: int = 64 << 20
    max_result_age: float = 30.0
    max_keys: int = 100_000
    max_client_keys: int | None = None
    max_age: float = 3600.0

    def __post_init__(self) -> None:
        with Validator("invalid idempotency options") as check:
            check.count("max_result_bytes", self.max_result_bytes, least=0)
            check.seconds("max_result_age", self.max_result_age)
            check.count("max_keys", self.max_keys)
            check.count("max_client_keys", self.max_client_keys, optional=True)
            check.seconds("max_age", self.max_age)

    @property
    def client_share(self) -> int:
        most = max(1, self.max_keys // 2) if self.max_client_keys is None else self.max_client_keys
        return min(most, self.max_keys)


@dataclass(slots=True)
class _Share:
    # Each with the time until which a retry is expected, oldest first.
    keys: "OrderedDict[bytes, float]" = field(default_factory=OrderedDict["bytes", float])
    results: "OrderedDict[bytes, Results]" = field(default_factory=OrderedDict["bytes", Results])
    result_bytes: int = 0

    def add_key(self, digest: bytes, expected_until: float) -> None:
        self.keys[digest] = expected_until

    def add_result(self, digest: bytes, result: Results, expected_until: float) -> None:
        self.keys[digest] = expected_until
        self.results[digest] = result
        self.result_bytes += _bytes_of(result)

    def evict_result(self, digest: bytes) -> int:
        result = self.results.pop(digest, None)
        nbytes = 0 if result is None else _bytes_of(result)
        self.result_bytes -= nbytes
        return nbytes


class IdempotencyTable:
    """Requests that one expert has applied or is applying. Thread-safe."""

    def __init__(self, options: IdempotencyOptions | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.options = options or IdempotencyOptions()
        self._clock = clock
        self._offset = 0.0  # added to the clock, so that ages continue after a load
        self._lock = threading.Lock()
        self._running: dict[bytes, Task] = {}
        self._applied: dict[bytes, bytes] = {}  # packed value by digest of the request, oldest first
        self._shares: dict[bytes, _Share] = {}  # by digest of the principal
        # Entries that a saved state must not contain, because they belong to no step yet: uncommitted requests with
        # their mini-batch, and dropped mini-batches (None).
        self._unsaved: dict[bytes, MiniBatch | None] = {}
        self._result_bytes, self._next_expiry, self._repeated = 0, 0.0, 0

    def begin(self, kind: RequestKind, task: Task) -> Task | Results | None:
        """Return the running task, a copy of the stored result, or None for a new request, which is registered."""
        # A pool computes the checksums before it takes its lock, which it holds now.
        digest, fingerprint = _request_digest(kind, task), task.checksums or task.fingerprint()
        with self._lock:
            self._expire()
            running, entry = self._running.get(digest), self._entry(digest)
            if running is None and entry is None:
                self._check_room(task)
                self._running[digest] = task
                return None
            known = running.fingerprint() if running is not None else entry[2] if entry is not None else fingerprint
            if known != fingerprint:
                what = "payload" if known >> 32 == fingerprint >> 32 else "mini-batch, mode or shapes"
                raise KeyReusedError(
                    f"key {task.key!r} of client {task.client!r} was used for a {kind} with another {what}; "
                    "use a new key for every new request, and the old one only to retry"
                )
            self._repeated += 1
            if running is not None or entry is None:
                return running
            result = self._shares[entry[0]].results.get(digest)
            if result is None:
                raise ResultEvictedError(
                    f"{kind} with key {task.key!r} of client {task.client!r} was applied in step {entry[1]}, "
                    "but its result is no longer stored; do not send it again (raise max_result_bytes and "
                    "max_result_age to store results longer)"
                )
            # A copy, because the receiver owns its tensors and can write to them.
            return [tensor.clone() for tensor in result]

    def abandon(self, kind: RequestKind, task: Task) -> None:
        # Only unregisters the task: a recorded result stays.
        digest = _request_digest(kind, task)
        with self._lock:
            # A retry can have registered another task under the same key in the meantime.
            if self._running.get(digest) is task:
                del self._running[digest]

    def record(self, kind: RequestKind, task: Task, result: Results, step: int) -> None:
        """Store the result of an applied request. Takes ownership of ``result``, and must not fail."""
        digest, principal = _request_digest(kind, task), _principal_digest(task)
        with self._lock:
            # With a mini-batch it is part of no step yet: a saved state leaves it out until the commit.
            self._insert(digest, principal, step, task.checksums or task.fingerprint())
            if kind == "backward" and task.mini_batch is not None:
                self._unsaved[digest] = (task.client, task.mini_batch)
            expires_at = self._now() + self.options.max_result_age
            if task.deadline is not None:
                expires_at = max(expires_at, task.deadline + self._offset)
            self._store(digest, principal, result, expires_at)

    def step_of(self, kind: RequestKind | Literal["dropped"], client: str | None, key: str) -> int | None:
        """The optimizer step that contains a request, or None. "dropped" asks whether the mini-batch was dropped."""
        with self._lock:
            entry = self._entry(_digest((kind, client, key)))
            return None if entry is None else entry[1]

    def commit_mini_batch(self, client: str | None, mini_batch: str, step: int) -> None:
        with self._lock:
            for digest in self._requests_of(client, mini_batch):
                principal, _, *rest = _VALUE.unpack(self._applied[digest])
                self._applied[digest] = _VALUE.pack(principal, step, *rest)
                del self._unsaved[digest]

    def forget_mini_batch(self, client: str | None, mini_batch: str) -> None:
        # Its sum was lost, so retries of its requests must run again.
        with self._lock:
            for digest in self._requests_of(client, mini_batch):
                self._forget(digest)

    def drop_mini_batch(self, client: str | None, mini_batch: str, principal: str | None) -> None:
        # All except its name. If it were continued, a commit would apply only a part of it.
        self.forget_mini_batch(client, mini_batch)
        with self._lock:
            digest = _digest(("dropped", client, mini_batch))
            self._insert(digest, _digest(principal, 8), _DROPPED, 0)
            self._unsaved[digest] = None

    def state_dict(self) -> dict[str, Any]:
        """All entries that are part of a step, to be saved with the weights."""
        # ``keys``: uint8 of shape (number of keys, 48), oldest first. ``results``: the newest results as tuples of the
        # digest in hex, the seconds for which it is still expected, and its tensors. ``now``: the clock of the keys.
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Return a function that builds the `state_dict` of this moment later, without holding the lock."""
        with self._lock:
            self._expire(at_once=True)
            # Shallow copies suffice: packed entries are immutable, and stored tensors are never written to.
            keys, unsaved = self._applied.copy(), self._unsaved.copy()
            shares = self._shares.values()
            results = [(s.keys[key], key, result) for s in shares for key, result in reversed(s.results.items())]
            now = self._now()

        def build_state() -> dict[str, Any]:
            rows = bytearray().join(digest + value for digest, value in keys.items() if digest not in unsaved)
            flat = (
                torch.frombuffer(rows, dtype=torch.uint8) if rows else torch.empty(0, dtype=torch.uint8, device="cpu")
            )
            saved: list[tuple[str, float, Results]] = []
            room = SAVED_RESULT_BYTES
            for expires_at, digest, result in sorted(results, key=lambda item: item[0], reverse=True):
                if digest not in unsaved:
                    room -= _bytes_of(result) + _RESULT_OVERHEAD
                    if room < 0:
                        break
                    saved.append((digest.hex(), expires_at - now, result))
            return {"now": now, "keys": flat.view(len(rows) // _ROW.size, _ROW.size), "results": saved[::-1]}

        return build_state

    def load_state_dict(self, state: Any) -> None:
        try:
            keys, now = state["keys"], float(state["now"])
            if keys.dtype != torch.uint8 or keys.ndim != 2 or keys.shape[1] != _ROW.size:
                raise ValueError(f"keys of {keys.dtype} and shape {tuple(keys.shape)}")
            # A copy, because `_read_shares` needs aligned memory, and that of a file is not.
            rows = keys.cpu().clone(memory_format=torch.contiguous_format)
            applied = dict(_ROW.iter_unpack(ctypes.string_at(rows.data_ptr(), rows.nbytes)))
            if len(applied) != len(rows):
                raise ValueError(f"{len(rows)} keys, of which {len(applied)} are different")
            results = [
                (bytes.fromhex(digest), float(seconds), list[torch.Tensor](tensors))
                for digest, seconds, tensors in state["results"]
            ]
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise UsageError(f"not a state of an idempotency table: {type(error).__name__}: {error}") from error
        with self._lock:
            dropped = {one: self._applied[one][:8] for one, mini_batch in self._unsaved.items() if mini_batch is None}
            self._applied, self._shares = applied, _read_shares(rows, applied, self.options.max_result_age)
            self._unsaved = dict.fromkeys(dropped)
            self._result_bytes, self._next_expiry, self._offset = 0, 0.0, now - self._clock()
            for digest, principal in dropped.items():
                self._insert(digest, principal, _DROPPED, 0)
            for digest, seconds, tensors in results:
                if digest in applied:
                    self._store(digest, applied[digest][:8], tensors, now + seconds)
            self._expire(at_once=True)

    def statistics(self) -> IdempotencyStatistics:
        with self._lock:
            self._expire(at_once=True)
            keys, results = len(self._applied), sum(len(share.results) for share in self._shares.values())
            return IdempotencyStatistics(len(self._running), keys, results, self._result_bytes, self._repeated)

    # The methods below are called with the lock held.

    def _now(self) -> float:
        return self._clock() + self._offset

    def _entry(self, digest: bytes) -> tuple[bytes, int, int, float] | None:
        value = _VALUE.unpack(self._applied[digest]) if digest in self._applied else None
        return None if value is None or value[3] <= self._now() - self.options.max_age else value

    def _requests_of(self, *mini_batch: str | None) -> list[bytes]:
        return [digest for digest, owner in self._unsaved.items() if owner == mini_batch]

    def _insert(self, digest: bytes, principal: bytes, step: int, fingerprint: int) -> None:
        self._forget(digest)  # a dict keeps the position of a known key, but it must become the newest
        share = self._shares.get(principal)
        if share is not None and len(share.keys) >= self.options.client_share:
            self._forget(next(iter(share.keys)))
        if len(self._applied) >= self.options.max_keys:
            victim = self._choose_victim(self._shares.get(principal))
            # Without a victim the table exceeds its bound by this key. It cannot be rejected any more: it was applied.
            if victim is not None:
                self._forget(victim)
        self._applied[digest] = _VALUE.pack(principal, step, fingerprint, self._now())
        self._shares.setdefault(principal, _Share()).add_key(digest, self._now() + self.options.max_result_age)
        self._expire()

    def _choose_victim(self, own: _Share | None) -> bytes | None:
        # For a new key of a principal with the share ``own``.
        largest = max(self._shares.values(), key=lambda share: len(share.keys))
        oldest, expected_until = next(iter(largest.keys.items()))
        if expected_until <= self._now():
            return oldest
        return None if own is None else next(iter(own.keys))

    def _store(self, digest: bytes, principal: bytes, result: Results, expires_at: float) -> None:
        self._shares[principal].add_result(digest, result, expires_at)
        self._result_bytes += _bytes_of(result)
        # From the largest holder, so that many results of one client do not displace those of others.
        while self._result_bytes > self.options.max_result_bytes:
            largest = max(self._shares.values(), key=lambda share: share.result_bytes)
            self._result_bytes -= largest.evict_result(next(iter(largest.results)))

    def _expire(self, *, at_once: bool = False) -> None:
        # Only now and then, because `_entry` hides old keys anyway.
        now = self._now()
        if now < self._next_expiry and not at_once:
            return
        self._next_expiry = now + min(self.options.max_age, self.options.max_result_age) / 10
        for share in list(self._shares.values()):
            while share.results and share.keys[next(iter(share.results))] <= now:
                self._result_bytes -= share.evict_result(next(iter(share.results)))
            while share.keys and self._entry(next(iter(share.keys))) is None:
                self._forget(next(iter(share.keys)))

    def _forget(self, digest: bytes) -> None:
        if digest not in self._applied:
            return
        principal = self._applied.pop(digest)[:8]
        share = self._shares[principal]
        self._result_bytes -= share.evict_result(digest)
        del share.keys[digest]
        if not share.keys:
            del self._shares[principal]
        self._unsaved.pop(digest, None)

    def _check_room(self, task: Task) -> None:
        if len(self._applied) < self.options.max_keys:
            return
        self._expire(at_once=True)
        own = self._shares.get(_principal_digest(task))
        if len(self._applied) >= self.options.max_keys and self._choose_victim(own) is None:
            raise OverloadError(
                f"the idempotency table is full: it holds {len(self._applied)} keys of {len(self._shares)} "
                f"clients, all applied in the last {self.options.max_result_age:g} s; come back later, or "
                "raise max_keys"
            )


def _read_shares(rows: torch.Tensor, applied: dict[bytes, bytes], max_result_age: float) -> dict[bytes, _Share]:
    # ``rows``: saved keys, uint8 of shape (keys, 48). ``applied``: the same as a dict.
    principals = rows.view(torch.int64).numpy()[:, 2]
    # The sort is stable, so that within each group the oldest key stays first, as eviction expects.
    order = principals.argsort(kind="stable")
    digests = [*map([*applied].__getitem__, order.tolist())]
    until = (rows.view(torch.float64).numpy()[order, 5] + max_result_age).tolist()
    grouped = principals[order]
    starts = [0, *((grouped[1:] != grouped[:-1]).nonzero()[0] + 1).tolist(), len(digests)]
    return {
        applied[digests[start]][:8]: _Share(OrderedDict(zip(digests[start:end], until[start:end], strict=True)))
        for start, end in (pairwise(starts) if digests else ())
    }


def _bytes_of(result: Results) -> int:
    return sum([tensor.nbytes for tensor in result])


def _request_digest(kind: RequestKind, task: Task) -> bytes:
    # With the client, so that no client can reach results of another.
    return _digest((kind, task.client, task.key))


def _digest(value: tuple[str | None, ...] | str | None, size: int = 16) -> bytes:
    return blake2b(repr(value).encode("utf-8", "backslashreplace"), digest_size=size).digest()


def _principal_digest(task: Task) -> bytes:
    return _digest(task.client if task.principal is None else task.principal, 8)
