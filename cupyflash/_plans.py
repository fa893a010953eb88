"""The plan cache: what a call with the same facts did before, found by one look-up."""

import threading
from typing import Any

__all__ = ["Recent"]


class Recent:
    """A bounded mapping that forgets what was not used for long; any number of threads may use it.

    Two generations of at most ``size`` entries: what is used moves to the young one, and when that
    is full it becomes the old one, whose rest is forgotten. A hit in the young generation, the
    common case, takes no lock.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._young: dict[Any, Any] = {}
        self._old: dict[Any, Any] = {}
        self._lock = threading.Lock()

    def get(self, key: Any) -> Any:
        """Return the value of a key, or None."""
        value = self._young.get(key)
        if value is None:
            value = self._old.get(key)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: Any, value: Any) -> None:
        """Keep a value (not None) for a key."""
        with self._lock:
            if len(self._young) >= self._size and key not in self._young:
                self._old, self._young = self._young, {}
            self._young[key] = value

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._young, self._old = {}, {}

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())
