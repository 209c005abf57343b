"""A lock that a thread in a loop cannot keep from the others, and that a forked child finds free."""

from __future__ import annotations

import os
import threading
from _thread import RLock
from weakref import WeakValueDictionary


class FairLock(RLock):  # type: ignore[misc]  # final in typeshed alone
    """A reentrant lock for ``with``. Whoever releases it and wants it again goes behind a thread that waits.

    It is released by C code, so that KeyboardInterrupt cannot leave it held. fork() waits until it is free, as an
    engine's lock is between two steps, and the child can take it.
    """

    def __init__(self) -> None:
        self._door = RLock()  # held while waiting: who comes later waits here
        _locks[id(self)] = self

    @property
    def mine(self) -> bool:
        """Whether this thread has it."""
        owned: bool = self._is_owned()  # type: ignore[attr-defined]
        return owned

    def __enter__(self) -> bool:  # type: ignore[override]
        if self.mine:
            return self.acquire()
        try:
            with self._door:
                return self.acquire()
        except BaseException:  # an interrupt just after it was acquired
            if self.mine:
                self.release()
            raise


class _Forks(threading.local):
    """What a thread that forks does before and after. ``held``: locks that it has acquired for it."""

    def __init__(self) -> None:
        self.held: list[FairLock] = []

    def before(self) -> None:
        for lock in _living():
            if not lock.mine:
                self.held.append(lock)  # first: an interrupt may come between the two
                lock.acquire()

    def in_parent(self) -> None:
        while self.held:
            if (lock := self.held.pop()).mine:
                lock.release()

    def in_child(self) -> None:
        for lock in _living():
            lock._door = RLock()  # nobody waits there
        while self.held:
            self.held.pop()._at_fork_reinit()  # type: ignore[attr-defined]


_locks: WeakValueDictionary[int, FairLock] = WeakValueDictionary()
_forks = _Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_forks.before, after_in_parent=_forks.in_parent, after_in_child=_forks.in_child)


def any_mine() -> bool:
    """Whether this thread has any of them: to wait for another then may be to wait for ever."""
    return any(lock.mine for lock in _living())


def _living() -> list[FairLock]:
    return [lock for lock in (ref() for ref in _locks.valuerefs()) if lock is not None]
