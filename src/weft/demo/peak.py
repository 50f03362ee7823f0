"""The most bytes of tensors that are alive at a time while something runs.

    operator -> result -> its storage:  new? add its bytes, and take them away when it is gone
                                        known (a view, in place)? nothing

It sees what PyTorch allocates in this thread, forward and backward, and not what an operator needs for itself.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.core.tree import flatten
from weft.recurrent import workspace


def peak_bytes(run: Callable[[], object], given: Iterable[Tensor]) -> int:
    """The peak while `run` runs, without the tensors that were there before: name those that it reads."""
    workspace.release()  # else what is kept from call to call would not be seen
    counter = _Counter(given)
    with counter:
        run()
    return counter.peak


class _Counter(TorchDispatchMode):
    lets_plans_run = True  # what a recurrent net's plan allocates is seen without its operators

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak = self._alive = 0
        self._known: dict[int, object] = {each.untyped_storage()._cdata: each.untyped_storage() for each in given}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in flatten(result)[0]:
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            # PyTorch keeps this very object as long as the storage.
            self._known[key] = weakref.ref(storage, partial(self._gone, key, size))
            self._alive += size
            self.peak = max(self.peak, self._alive)

    def _gone(self, key: int, size: int, _: object) -> None:
        self._known.pop(key, None)
        self._alive -= size
