"""Rule for retries of calls.

    overloaded, draining, no connection, another owner     certainly not executed      retry
    a follower answers, and there is a directory           an owner takes over soon    retry; not counted
    expired in the server's queue                          certainly not executed      retry
    connection lost, no answer in time                     possibly executed           retry
    the expert has a new owner, and there is no answer     possibly executed           retry there, at once
    a certificate that one end rejects                     would fail again            raise
    any other error                                        would fail again            raise

A dead address stays in the directory until its lease ends, so every attempt takes the next address. A hung server does
not answer at all, so a waiting call checks the directory's snapshot from time to time.
"""

import math
import random
from dataclasses import dataclass

from torchweft.core.validation import Validator
from torchweft.experts import errors
from torchweft.experts.wire import RETRYABLE

_MAX_EXPONENT = 60.0  # far beyond any pause, and far from overflow
_random = random.Random()  # a generator of its own, so that the user's seeds give the same numbers as without torchweft


@dataclass(frozen=True)
class Retry:
    """Rule for retries of calls.

    Args:
        attempts: most times that a call is sent. 1: no retries. None: until its deadline.
        first, growth, longest: seconds of the first pause, its growth factor, and the bound of all pauses.
        attempt_seconds: longest wait for an answer before the call is sent again. None: until the deadline. For
            networks that drop messages although the connection seems intact.

    The timeout of the call bounds attempts and pauses together. Raises ``UsageError`` that lists all invalid numbers.

    Example:
        >>> from torchweft.experts.client import NEVER, Retry
        >>> remote = weft.RemoteExpert("ffn.0", "10.0.0.7:7070", retry=Retry(attempts=3, attempt_seconds=2.0))
    """

    attempts: int | None = None
    first: float = 0.05
    growth: float = 2.0
    longest: float = 2.0
    attempt_seconds: float | None = None

    def __post_init__(self) -> None:
        with Validator("invalid retry rule") as check:
            valid = check.count("attempts", self.attempts, optional=True)
            valid &= check.number("growth", self.growth, least=1.0, most=1e9)
            valid &= check.seconds("first", self.first, zero=True)
            valid &= check.seconds("longest", self.longest, zero=True)
            fits = not valid or self.first <= self.longest
            check.require(fits, f"first is {self.first}, wanted at most longest, which is {self.longest}")
            check.seconds("attempt_seconds", self.attempt_seconds, optional=True)

    def allows_retry(self, error: BaseException, attempt: int) -> bool:
        if isinstance(error, errors.CertificateError) or (self.attempts is not None and attempt >= self.attempts):
            return False
        return not_executed(error) or isinstance(error, errors.LostError | errors.DeadlineError)

    def pause(self, attempt: int) -> float:
        # `growth ** attempt` would raise OverflowError after some thousand attempts.
        factor = math.exp(min(_MAX_EXPONENT, (attempt - 1) * math.log(self.growth)))
        # Random from zero ("full jitter", Brooker, AWS Architecture Blog 2015), so that clients that failed together do
        # not return together.
        return _random.uniform(0.0, min(self.longest, self.first * factor))


def not_executed(error: BaseException) -> bool:
    """Whether a call that ended with this error was certainly not executed, and can succeed later."""
    return isinstance(error, (*RETRYABLE, errors.ExpiredError))


NEVER = Retry(attempts=1)  # The rule without retries
