"""What a caller says of a task besides its tensors: who asks, until when, under which key, for which mini-batch."""

from math import isnan
from typing import Any

from weft.core.errors import UsageError
from weft.experts.checks import is_number


def check_words(pool: str, client: Any, key: Any, mini_batch: Any, deadline: Any, *, splits: bool) -> None:
    """Raise ``UsageError`` for words that mean nothing to the pool of this name; quick, for the many that do.

    ``splits``: whether its tasks may name a mini-batch.
    """
    usual = mini_batch is None and (deadline is None or (type(deadline) is float and not isnan(deadline)))
    if usual and all([word is None or (word and type(word) is str) for word in (client, key)]):
        return
    words = {"client": client, "key": key, "mini_batch": mini_batch}
    wrong = [
        f"{name} is {word!r}, wanted None or a non-empty str"
        for name, word in words.items()
        if not isinstance(word, str | None) or word == ""
    ]
    if deadline is not None and (not is_number(deadline) or (isinstance(deadline, float) and isnan(deadline))):
        wrong.append(f"deadline is {deadline!r}, wanted None or a time of `time.monotonic`")
    if wrong:
        raise UsageError(f"pool {pool!r}: {'; '.join(wrong)}")
    if mini_batch is not None and not splits:
        raise UsageError(f"pool {pool!r} adds up no gradients, so mini_batch={mini_batch!r} means nothing here")
