"""Idempotency table: a retried backward or commit is applied once.

    first request with a key     runs; its result is stored under (kind, client, key)
    retry while it is running    joins the running task
    retry afterwards             receives a copy of the stored result
    retry with another payload   KeyReusedError: nothing runs
    retry after eviction         ResultEvictedError: it was applied, the result is no longer stored
    retry after a failure        runs again: nothing was applied

Every principal (whose quota a request counts against) has a share of the keys and of the result bytes, so that no
client can make another one's retry step twice. A key beyond a principal's own share replaces its own oldest one. A
full table forgets the oldest key of its largest holder once no retry of that request can come any more, and refuses
newcomers until then. Within these bounds no optimizer step is applied twice, whatever the network loses or repeats.

A key takes 48 bytes in a saved state and about 400 in memory: requests and principals are stored as digests. Of the
results, which a retry seldom asks for after a restart, the newest go into a saved state, up to `SAVED_RESULT_BYTES`.
"""

import ctypes
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, Literal
from zlib import crc32

import torch

from weft.core.errors import UsageError
from weft.core.validation import Validator
from weft.experts.errors import KeyReusedError, OverloadError, ResultEvictedError
from weft.experts.task import Results, Task
from weft.experts.telemetry import RecordsStatistics

RequestKind = Literal["backward", "commit"]
MiniBatch = tuple[str | None, str]
"""Client and name of a mini-batch."""

SAVED_RESULT_BYTES = 1_000_000
"""Of results in a saved state, which is written again and again: exactly-once needs keys and steps alone there."""
_RESULT_OVERHEAD = 512  # bytes of a result in a file, besides its tensors

_VALUE = struct.Struct("<8sqQd")  # digest of the principal, step, fingerprint, time of recording
_DIGEST = 16  # bytes, of a request
_ROW = struct.Struct(f"<{_DIGEST}s{_VALUE.size}s")  # digest of the request, and the value
_DROPPED = -1  # in place of a step, for the name of a mini-batch that must not be continued


@dataclass(frozen=True)
class IdempotencyOptions:
    """Bounds of an `IdempotencyTable`.

    Args:
        max_result_bytes: total size of stored results; 0 stores none, and every late retry is refused.
        max_result_age: seconds for which a retry is expected after a request was applied, or until the deadline of
            the request if that is later. Until then its result is stored and its key is not forgotten for the sake of
            another principal.
        max_keys: number of remembered keys.
        max_client_keys: number of keys that one principal may hold; None: half of ``max_keys``.
        max_age: seconds after which a key is forgotten.

    Raises ``UsageError`` that lists all bounds that make no sense.

    Example:
        >>> rows, records = (weft.TensorSpec((None, 8), torch.float32),), weft.experts.IdempotencyOptions(max_age=600.0)
        >>> expert = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), torch.optim.SGD, args_schema=rows, records=records)
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
        """The number of keys that one principal may hold."""
        most = max(1, self.max_keys // 2) if self.max_client_keys is None else self.max_client_keys
        return min(most, self.max_keys)


@dataclass(slots=True)
class _Result:
    tensors: Results
    nbytes: int
    expires_at: float  # no retry is expected afterwards


@dataclass(slots=True)
class _Share:
    """What one principal holds, oldest first."""

    keys: "OrderedDict[bytes, None]" = field(default_factory=OrderedDict["bytes", None])
    results: "OrderedDict[bytes, _Result]" = field(default_factory=OrderedDict["bytes", _Result])
    result_bytes: int = 0
    # Until when retries are expected where that is later than `max_result_age` says; also of results that were evicted.
    deadlines: dict[bytes, float] = field(default_factory=dict[bytes, float])


class _PackedKeys:
    """Keys as rows of one block of memory, which a saved state copies without holding the interpreter.

    A row is the digest of a request and its packed value; the rows of a table are in no order.
    """

    def __init__(self, rows: bytearray | None = None) -> None:
        self._memory = bytearray(64 * _ROW.size) if rows is None else rows
        digests = [] if rows is None else [digest for digest, _ in _ROW.iter_unpack(rows)]
        self._starts = dict(zip(digests, range(0, len(self._memory), _ROW.size), strict=False))

    def principals(self) -> dict[bytes, list[bytes]]:
        """The keys of each principal, by their digests, in the order of the rows."""
        found: dict[bytes, list[bytes]] = {}
        for digest, value in _ROW.iter_unpack(self._memory[: len(self._starts) * _ROW.size]):
            found.setdefault(value[:8], []).append(digest)
        return found

    def __len__(self) -> int:
        return len(self._starts)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._starts

    def principal(self, digest: bytes) -> bytes:
        """Digest of the principal that holds this key."""
        start = self._starts[digest] + _DIGEST
        return bytes(self._memory[start : start + 8])

    def recorded_at(self, digest: bytes) -> float:
        """Time of recording of this key."""
        return _VALUE.unpack_from(self._memory, self._starts[digest] + _DIGEST)[3]

    def get(self, digest: bytes) -> tuple[bytes, int, int, float] | None:
        """Principal, step, fingerprint and time of recording."""
        start = self._starts.get(digest)
        return None if start is None else _VALUE.unpack_from(self._memory, start + _DIGEST)

    def put(self, digest: bytes, principal: bytes, step: int, fingerprint: int, recorded_at: float) -> None:
        """Add a key, or replace its value."""
        start = self._starts.setdefault(digest, len(self._starts) * _ROW.size)
        if start == len(self._memory):
            self._memory = self._memory + bytes(len(self._memory) or 64 * _ROW.size)
        _ROW.pack_into(self._memory, start, digest, _VALUE.pack(principal, step, fingerprint, recorded_at))

    def remove(self, digest: bytes) -> None:
        """Remove a key; the last row takes its place."""
        start, last = self._starts.pop(digest), len(self._starts) * _ROW.size
        if start != last:
            row = self._memory[last : last + _ROW.size]
            self._memory[start : start + _ROW.size] = row
            self._starts[bytes(row[:_DIGEST])] = start

    def rows(self, without: Iterable[bytes]) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of all rows, and which of them count: not those of the digests ``without``."""
        count = len(self._starts)
        rows = torch.empty(count, _ROW.size, dtype=torch.uint8, device="cpu")
        counts = torch.ones(count, dtype=torch.bool, device="cpu")
        if count:
            rows.view(-1).copy_(torch.frombuffer(self._memory, dtype=torch.uint8, count=count * _ROW.size))
            out = [self._starts[digest] // _ROW.size for digest in without if digest in self._starts]
            counts[torch.tensor(out, dtype=torch.int64, device="cpu")] = False
        return rows, counts


class IdempotencyTable:
    """Requests that one expert has applied or is applying. Thread-safe."""

    def __init__(self, options: IdempotencyOptions | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.options = options or IdempotencyOptions()
        self._clock = clock
        self._offset = 0.0  # so that ages go on where a loaded state was saved
        self._lock = threading.Lock()
        self._running: dict[bytes, Task] = {}
        self._applied = _PackedKeys()
        self._shares: dict[bytes, _Share] = {}  # by digest of the principal
        self._uncommitted: dict[MiniBatch, dict[bytes, None]] = {}
        # Part of no step yet, hence of no saved state: uncommitted requests, and (None) names of dropped mini-batches.
        self._unsaved: dict[bytes, MiniBatch | None] = {}
        self._result_bytes = 0
        self._next_expiry = 0.0
        self._repeated = 0

    def begin(self, kind: RequestKind, task: Task) -> Task | Results | None:
        """Return the running task, a copy of the stored result, or None for a new request, which is running now.

        Raises:
            KeyReusedError: the key was used with another payload.
            ResultEvictedError: the request was applied, and its result is no longer stored.
            OverloadError: the table is full of keys of others whose retries may still come.
        """
        digest, given = _request(kind, task), fingerprint(task)
        with self._lock:
            self._expire()
            running = self._running.get(digest)
            if running is not None:
                _check_same(kind, task, fingerprint(running), given)
                self._repeated += 1
                return running
            entry = self._entry(digest)
            if entry is None:
                self._check_room(task)
                self._running[digest] = task
                return None
            principal, step, known, _ = entry
            _check_same(kind, task, known, given)
            self._repeated += 1
            result = self._shares[principal].results.get(digest)
            if result is None:
                raise ResultEvictedError(
                    f"{kind} with key {task.key!r} of client {task.client!r} was applied in step {step}, "
                    "but its result is no longer stored; do not send it again (raise max_result_bytes and "
                    "max_result_age to store results longer)"
                )
            # The receiver owns its tensors and may write into them, so the table hands out a copy.
            return [tensor.clone() for tensor in result.tensors]

    def abandon(self, kind: RequestKind, task: Task) -> None:
        """Remove a task that is no longer running; what was recorded stays."""
        digest = _request(kind, task)
        with self._lock:
            # A retry may have registered another task under the same key in the meantime.
            if self._running.get(digest) is task:
                del self._running[digest]

    def record(self, kind: RequestKind, task: Task, result: Results, step: int) -> None:
        """Store the result of an applied request, which is part of ``step``; or of none yet, if it has a mini-batch.

        Takes ownership of ``result``. Called after the optimizer has stepped, so it must not fail: whatever can fail
        (cloning, checksums) happens before the step.
        """
        digest, principal = _request(kind, task), _principal(task)
        with self._lock:
            self._insert(digest, principal, step, fingerprint(task))
            if kind == "backward" and task.mini_batch is not None:
                mini_batch = (task.client, task.mini_batch)
                self._uncommitted.setdefault(mini_batch, {})[digest] = None
                self._unsaved[digest] = mini_batch
            expires_at = self._now() + self.options.max_result_age
            if task.deadline is not None:
                expires_at = max(expires_at, task.deadline + self._offset)
            self._store(digest, principal, _Result(result, sum(tensor.nbytes for tensor in result), expires_at))

    def step_of(self, kind: RequestKind, client: str | None, key: str) -> int | None:
        """The optimizer step that a request was part of; None if it is not known as applied."""
        with self._lock:
            entry = self._entry(_digest((kind, client, key)))
            return None if entry is None else entry[1]

    def commit_mini_batch(self, client: str | None, mini_batch: str, step: int) -> None:
        """Mark the requests accumulated in a mini-batch as part of optimizer step ``step``."""
        with self._lock:
            for digest in self._uncommitted.pop((client, mini_batch), ()):
                if (value := self._applied.get(digest)) is not None:
                    self._applied.put(digest, value[0], step, *value[2:])
                del self._unsaved[digest]

    def forget_mini_batch(self, client: str | None, mini_batch: str) -> None:
        """Forget the requests of a mini-batch whose accumulated gradient was lost; retries run again."""
        with self._lock:
            for digest in list(self._uncommitted.get((client, mini_batch), ())):
                self._forget(digest)

    def drop_mini_batch(self, client: str | None, mini_batch: str, principal: str | None) -> None:
        """Forget a mini-batch, and remember its name: it must not be continued, or a commit would apply a part."""
        self.forget_mini_batch(client, mini_batch)
        with self._lock:
            digest = _digest(("dropped", client, mini_batch))
            self._insert(digest, _digest(principal, 8), _DROPPED, 0)
            self._unsaved[digest] = None

    def is_dropped(self, client: str | None, mini_batch: str) -> bool:
        """Whether a mini-batch was dropped."""
        with self._lock:
            return self._entry(_digest(("dropped", client, mini_batch))) is not None

    def state_dict(self) -> dict[str, Any]:
        """All that is part of a step: to be saved with it.

        ``keys``: uint8 of shape (number of keys, 48), oldest first; ``results``: for each of the newest stored results
        its digest in hex, the seconds for which it is still wanted, and its tensors; ``now``: the time by which keys
        are dated.
        """
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Return a function that makes the `state_dict` of this moment later, without a lock."""
        with self._lock:
            self._expire(at_once=True)
            now, (rows, counts) = self._now(), self._applied.rows(self._unsaved)
            results = [item for share in self._shares.values() for item in _newest(share.results, self._unsaved)]
        return partial(_state, now, rows, counts, results)

    def load_state_dict(self, state: Any) -> None:
        """Replace all that is known by a `state_dict`, except the names of dropped mini-batches.

        Raises:
            UsageError: it is not the state of such a table; nothing was changed.
        """
        try:
            keys, now = state["keys"], float(state["now"])
            if keys.dtype != torch.uint8 or keys.ndim != 2 or keys.shape[1] != _ROW.size:
                raise ValueError(f"keys of {keys.dtype} and shape {tuple(keys.shape)}")
            applied = _PackedKeys(bytearray(_bytes(keys)))
            results = [
                (bytes.fromhex(digest), float(seconds), list[torch.Tensor](tensors))
                for digest, seconds, tensors in state["results"]
            ]
        except (TypeError, ValueError, KeyError, AttributeError, struct.error) as error:
            raise UsageError(f"this is no state of an idempotency table: {type(error).__name__}: {error}") from error
        with self._lock:
            dropped = {
                digest: self._applied.principal(digest)
                for digest, mini_batch in self._unsaved.items()
                if mini_batch is None
            }
            self._applied = applied
            self._uncommitted.clear()
            self._unsaved = dict.fromkeys(dropped)
            self._result_bytes, self._next_expiry, self._offset = 0, 0.0, now - self._clock()
            held = applied.principals()
            self._shares = {principal: _Share(OrderedDict.fromkeys(digests)) for principal, digests in held.items()}
            for digest, principal in dropped.items():
                self._insert(digest, principal, _DROPPED, 0)
            for digest, seconds, tensors in results:
                if digest in applied:
                    nbytes = sum(tensor.nbytes for tensor in tensors)
                    self._store(digest, applied.principal(digest), _Result(tensors, nbytes, now + seconds))
            self._expire(at_once=True)

    def statistics(self) -> RecordsStatistics:
        """What is held now."""
        with self._lock:
            self._expire(at_once=True)
            results = sum(len(share.results) for share in self._shares.values())
            return RecordsStatistics(
                len(self._running), len(self._applied), results, self._result_bytes, self._repeated
            )

    # All that follows is called with the lock held.

    def _now(self) -> float:
        return self._clock() + self._offset

    def _entry(self, digest: bytes) -> tuple[bytes, int, int, float] | None:
        """Principal, step, fingerprint and time of a key that is not too old."""
        value = self._applied.get(digest)
        return None if value is None or value[3] <= self._now() - self.options.max_age else value

    def _insert(self, digest: bytes, principal: bytes, step: int, fingerprint: int) -> None:
        self._forget(digest)
        share = self._shares.get(principal)
        if share is not None and len(share.keys) >= self.options.client_share:
            self._forget(next(iter(share.keys)))
        if len(self._applied) >= self.options.max_keys:
            victim = self._victim(self._shares.get(principal))
            # Without one the table grows by this key, the first of its principal: `start` admitted it.
            if victim is not None:
                self._forget(victim)
        self._applied.put(digest, principal, step, fingerprint, self._now())
        self._shares.setdefault(principal, _Share()).keys[digest] = None
        self._expire()

    def _victim(self, own: _Share | None) -> bytes | None:
        """The key that a full table forgets for a new one of a principal; None if it must not forget any."""
        largest = max(self._shares.values(), key=lambda share: len(share.keys))
        oldest = next(iter(largest.keys))
        recorded_at = self._applied.recorded_at(oldest)
        expected_until = largest.deadlines.get(oldest, recorded_at + self.options.max_result_age)
        if expected_until <= self._now():
            return oldest
        return None if own is None else next(iter(own.keys))

    def _store(self, digest: bytes, principal: bytes, result: _Result) -> None:
        share = self._shares[principal]
        share.results[digest] = result
        if result.expires_at > self._now() + self.options.max_result_age:
            share.deadlines[digest] = result.expires_at
        share.result_bytes += result.nbytes
        self._result_bytes += result.nbytes
        while self._result_bytes > self.options.max_result_bytes:
            largest = max(self._shares.values(), key=lambda share: share.result_bytes)
            self._evict_result(largest, next(iter(largest.results)))

    def _expire(self, *, at_once: bool = False) -> None:
        """Forget old keys and evict old results: now and then, since `_entry` does not show what is too old."""
        now = self._now()
        if now < self._next_expiry and not at_once:
            return
        self._next_expiry = now + min(self.options.max_age, self.options.max_result_age) / 10
        oldest_allowed = now - self.options.max_age
        for share in list(self._shares.values()):
            while share.results and next(iter(share.results.values())).expires_at <= now:
                self._evict_result(share, next(iter(share.results)))
            while share.keys:
                digest = next(iter(share.keys))
                if self._applied.recorded_at(digest) > oldest_allowed:
                    break
                self._forget(digest)

    def _forget(self, digest: bytes) -> None:
        if digest not in self._applied:
            return
        principal = self._applied.principal(digest)
        self._applied.remove(digest)
        share = self._shares[principal]
        self._evict_result(share, digest)
        share.deadlines.pop(digest, None)
        del share.keys[digest]
        if not share.keys:
            del self._shares[principal]
        mini_batch = self._unsaved.pop(digest, None)
        if mini_batch is not None:
            del self._uncommitted[mini_batch][digest]
            if not self._uncommitted[mini_batch]:
                del self._uncommitted[mini_batch]

    def _evict_result(self, share: _Share, digest: bytes) -> None:
        result = share.results.pop(digest, None)
        if result is not None:
            share.result_bytes -= result.nbytes
            self._result_bytes -= result.nbytes

    def _check_room(self, task: Task) -> None:
        """Raise ``OverloadError`` where a new key finds no room."""
        if len(self._applied) < self.options.max_keys:
            return
        self._expire(at_once=True)
        own = self._shares.get(_principal(task))
        if len(self._applied) >= self.options.max_keys and self._victim(own) is None:
            raise OverloadError(
                f"the idempotency table is full: it holds {len(self._applied)} keys of {len(self._shares)} "
                f"clients, all applied in the last {self.options.max_result_age:g} s; come back later, or "
                "raise max_keys"
            )


def _check_same(kind: RequestKind, task: Task, known: int, given: int) -> None:
    if known != given:
        what = "payload" if known >> 32 == given >> 32 else "mini-batch, mode or shapes"
        raise KeyReusedError(
            f"key {task.key!r} of client {task.client!r} was used for a {kind} with another {what}; "
            "use a new key for every new request, and the old one only to retry"
        )


def fingerprint(task: Task) -> int:
    """What a retry has to repeat exactly, as 64 bits: checksums of mode, mini-batch and shapes, and of the payload.

    Computed once, so before anybody writes into the tensors.
    """
    if not task.fingerprint:
        shapes = [(tensor.dtype, tuple(tensor.shape)) for tensor in task.tensors]
        form = crc32(repr((task.mini_batch, task.evaluation, shapes)).encode("utf-8", "backslashreplace"))
        payload = 0
        for tensor in task.tensors:
            plain = tensor
            if tensor.is_conj() or tensor.is_neg() or not (tensor.is_cpu and tensor.is_contiguous()):
                plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            # Not by way of numpy, which is not needed in a process that only has its own experts.
            payload = crc32((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()), payload)
        task.fingerprint = form << 32 | payload
    return task.fingerprint


def _newest(results: "OrderedDict[bytes, _Result]", unsaved: Container[bytes]) -> list[tuple[bytes, _Result]]:
    """The newest results of one principal that a saved state may have room for."""
    found: list[tuple[bytes, _Result]] = []
    room = SAVED_RESULT_BYTES
    for digest, result in reversed(results.items()):
        if digest not in unsaved:
            room -= result.nbytes + _RESULT_OVERHEAD
            if room < 0:
                break
            found.append((digest, result))
    return found


def _state(
    now: float, rows: torch.Tensor, counts: torch.Tensor, results: list[tuple[bytes, _Result]]
) -> dict[str, Any]:
    """See `IdempotencyTable.state_dict`."""
    rows = rows[counts]
    times = rows[:, -8:].contiguous().view(torch.float64).view(-1)
    keys = rows[torch.argsort(times, stable=True)]
    saved: list[tuple[str, float, Results]] = []
    room = SAVED_RESULT_BYTES
    for digest, result in sorted(results, key=lambda item: item[1].expires_at, reverse=True):
        room -= result.nbytes + _RESULT_OVERHEAD
        if room < 0:
            break
        saved.append((digest.hex(), result.expires_at - now, result.tensors))
    return {"now": now, "keys": keys, "results": saved[::-1]}


def _request(kind: RequestKind, task: Task) -> bytes:
    """The identity of a request. Keys are scoped by client: no client can reach another one's results."""
    return _digest((kind, task.client, task.key))


def _digest(value: tuple[str | None, ...] | str | None, size: int = 16) -> bytes:
    return blake2b(repr(value).encode("utf-8", "backslashreplace"), digest_size=size).digest()


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.cpu().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b""


def _principal(task: Task) -> bytes:
    return _digest(task.client if task.principal is None else task.principal, 8)
