"""What a caller says of a task besides its tensors: who asks, under which key, for which mini-batch."""

from typing import Any

from weft.core.errors import UsageError


def check_words(pool: str, client: Any, key: Any, mini_batch: Any, *, splits: bool) -> None:
    """Raise ``UsageError`` for words that mean nothing to the pool of this name; quick, for the many that do.

    ``splits``: whether its tasks may name a mini-batch.
    """
    if mini_batch is None and all([word is None or (word and type(word) is str) for word in (client, key)]):
        return
    words = {"client": client, "key": key, "mini_batch": mini_batch}
    wrong = [f"{name} is {word!r}" for name, word in words.items() if not isinstance(word, str | None) or word == ""]
    if wrong:
        raise UsageError(f"pool {pool!r}: {', '.join(wrong)}, wanted None or a non-empty str")
    if mini_batch is not None and not splits:
        raise UsageError(f"pool {pool!r} adds up no gradients, so mini_batch={mini_batch!r} means nothing here")
