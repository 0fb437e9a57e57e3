"""How the processes of a benchmark meet, and what they ask of each other."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

COLLECTIVES = ("sync_global_devices", "broadcast_one_to_all", "process_allgather", "assert_equal")
"""Of `multihost_utils`: each runs a program on the devices, which all processes must come to."""
BARRIERS = ("wait_at_barrier",)
KEY_VALUE = ("key_value_", "blocking_key_value_")


class Asked:
    """Counts what this process asks of JAX's coordination client, and its device collectives.

    It takes the client's place, so it must be made after the devices and before any checkpointer.
    """

    def __init__(self) -> None:
        from jax._src.distributed import global_state
        from jax.experimental import multihost_utils

        self.counter: Counter[str] = Counter()
        self._client = global_state.client
        self._within = threading.local()
        global_state.client = self
        self._meet = multihost_utils.sync_global_devices
        for name in COLLECTIVES:
            call = getattr(multihost_utils, name)
            setattr(multihost_utils, name, self._counted(name, call))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        return self._counted(name, found) if callable(found) else found

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            # A collective that is made of others is one.
            if getattr(self._within, "it", False):
                return call(*args, **kwargs)
            self.counter[name] += 1
            self._within.it = name in COLLECTIVES
            try:
                return call(*args, **kwargs)
            finally:
                self._within.it = False

        return counted

    def meet(self) -> None:
        """Wait for the other processes, uncounted; what is asked in the background is over then."""
        for thread in threading.enumerate():
            if thread.name == "pytree_ckpt-coordination":
                thread.join()
        self._within.it = True
        self._meet("benchmark")
        self._within.it = False

    def figures(self) -> dict[str, int]:
        """Waits of this process for others, by kind, and calls of the key-value store."""

        def total(*starts: str) -> int:
            return sum(n for name, n in self.counter.items() if name.startswith(starts))

        return {
            "barriers": total(*BARRIERS),
            "collectives": total(*COLLECTIVES),
            "blocking_gets": total("blocking_key_value_get"),
            "key_values": total(*KEY_VALUE),
        }
