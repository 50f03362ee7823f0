"""The runtimes of one server: a thread for each device, started when the first expert comes that lies there."""

import time
from collections.abc import Callable

from weft.experts.expert import ExpertBackend
from weft.experts.runtime import Runtime


class Runtimes(dict[str, Runtime]):
    """By the name of their device."""

    def run(self, backend: ExpertBackend) -> None:
        """Work on this expert's tasks from now on."""
        name = str(backend.device)
        if name not in self:
            self[name] = Runtime(name=name)
            self[name].start()
        self[name].add(backend)

    def finish(self, end: float) -> bool:
        """Finish what was accepted; whether all of it was before ``end`` (`time.monotonic`)."""
        return all([each.shutdown(timeout=max(0.0, end - time.monotonic())) for each in self.values()])

    def stop(self, left: Callable[[], float]) -> None:
        """End the threads; ``left`` tells how many seconds each may take now."""
        for each in self.values():
            each.shutdown(drain=False, timeout=left())
