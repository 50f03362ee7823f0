"""The one rule by which calls are repeated.

    overloaded, draining, no connection, another owner     surely not carried out      repeat
    a follower answers, where there is a directory         an owner comes soon         repeat; not counted
    a certificate that one end does not believe            would fail again            do not
    expired in the server's queue                          surely not carried out      repeat
    connection lost, no answer in time                     nobody knows                repeat only what may be
    all else                                               would fail again            do not

What may be repeated: a forward, which changes nothing; and a backward or commit that bears its idempotency key, under
the same key, so that it steps once however often it is asked for.

Pauses grow, and are drawn at random between nothing and their size ("full jitter", Brooker, AWS Architecture Blog
2015), so that clients that failed together do not come back together.
"""

import math
import random
from dataclasses import dataclass

from weft.core.errors import UsageError, listed
from weft.experts.checks import count_fault, is_number, seconds_fault
from weft.experts.errors import ExpiredError
from weft.experts.wire import RETRYABLE, CertificateError, DeadlineError, LostError

_MOST = 60.0  # of an exponent: far beyond any pause, and far from overflow
_random = random.Random()  # its own: the caller's numbers are the caller's


@dataclass(frozen=True)
class Retry:
    """Args:
    attempts: how often a call is sent at most; 1: never again; None: until its deadline.
    first, growth, longest: seconds of the first pause, its factor each time, and where it stops growing.
    attempt_seconds: how long one attempt waits for its answer before the call is sent again; None: all the time
        that the call has. For networks that swallow messages while the connection seems fine.

    The call's own timeout goes over all: attempts and pauses end with it. So a server that is away for a while is
    waited for, and one that was never there as well: which of them it is nobody can tell.

    Raises ``UsageError`` that lists all numbers that make no sense.
    """

    attempts: int | None = None
    first: float = 0.05
    growth: float = 2.0
    longest: float = 2.0
    attempt_seconds: float | None = None

    def __post_init__(self) -> None:
        faults = count_fault("attempts", self.attempts, none=True)
        if not (is_number(self.growth) and 1 <= self.growth < math.inf):
            faults.append(f"growth is {self.growth!r}, wanted a finite number of at least 1")
        faults += seconds_fault("first", self.first, zero=True)
        longest = seconds_fault("longest", self.longest, zero=True)
        if not faults and not longest and self.first > self.longest:
            faults.append(f"first is {self.first}, wanted at most longest, which is {self.longest}")
        faults += longest
        faults += seconds_fault("attempt_seconds", self.attempt_seconds, none=True)
        if faults:
            raise UsageError(listed("calls cannot be repeated by these rules:", faults))

    def again(self, error: BaseException, attempt: int, *, repeatable: bool) -> bool:
        """Whether to send the call again, after ``attempt`` attempts of which the last ended with this error."""
        if self.attempts is not None and attempt >= self.attempts:
            return False
        if isinstance(error, CertificateError):
            return False
        if surely_not_done(error):
            return True
        return repeatable and isinstance(error, LostError | DeadlineError)

    def pause(self, attempt: int) -> float:
        """Seconds to wait after so many attempts."""
        factor = math.exp(min(_MOST, (attempt - 1) * math.log(self.growth)))
        return _random.uniform(0.0, min(self.longest, self.first * factor))


def surely_not_done(error: BaseException) -> bool:
    """Whether a call that ended so was surely not carried out, and may be next time."""
    return isinstance(error, (*RETRYABLE, ExpiredError))


NEVER = Retry(attempts=1)
"""No call is sent twice."""
