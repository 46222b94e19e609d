"""Ends a start whose store is deaf: the one at MASTER_PORT, through which the processes meet and make their groups.

A client of torch's store waits for an answer without a limit. Short connections to its port, some hundred a second, leave its
server accepting no more (torch 2.14, both backends; docs/network-security.md), and all processes waiting without a word. So
until the first step each process also asks the store by itself, now and then. A rank that is late is none of its business: it
may read, compile or download for long, and torch's time-outs name it.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch.distributed as dist

from app.errors import HangError, leave_with
from app.place.launched import Launched

_ASK_EVERY = timedelta(seconds=10)
"""Also before the first question: most starts are over by then."""
_DEAF_S = 60.0


class StoreWatch:
    """Asks the store of the processes until `stop`, in a thread, and ends this process if it gives no answer for long."""

    def __init__(self, launched: Launched, address: str) -> None:
        """`address` is that of the store, HOST:PORT."""
        self._launched, self._address = launched, address
        self._over = threading.Event()
        self._answered_s = time.monotonic()
        self.phase = "joining the other processes"
        """What this process does now, for the message."""

    def start(self) -> StoreWatch:
        """Begin to watch; a process alone has no store."""
        if self._launched.world_size > 1:
            for target in (self._ask, self._watch):
                threading.Thread(target=target, name="store", daemon=True).start()
        return self

    def stop(self) -> None:
        """Watch no longer."""
        self._over.set()

    def _ask(self) -> None:
        """Ask it again and again. A deaf one keeps this thread for ever, in torch's code."""
        host, _, port = self._address.rpartition(":")
        store: dist.Store | None = None
        while not self._over.wait(_ASK_EVERY.total_seconds()):
            try:
                store = store or dist.TCPStore(host, int(port), None, False, _ASK_EVERY, wait_for_workers=False)
                store.check(["samerun/deaf"])
            except RuntimeError:  # there is none yet, or it is gone: that is seen and said where it is needed
                store = None
            self._answered_s = time.monotonic()

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            if time.monotonic() - self._answered_s > _DEAF_S:
                rank, size = self._launched.rank, self._launched.world_size
                leave_with(
                    HangError(
                        f"the store at {self._address}, through which the processes meet, gave rank {rank} of {size} no "
                        f"answer for {_DEAF_S:.0f} s, while it was {self.phase}. Other programs that connect to that port "
                        "again and again stop it: close it to them (docs/network-security.md), or choose another with --port"
                    ),
                    rank,
                )
