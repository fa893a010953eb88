"""The bounded mapping behind the plan cache."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from cupyflash._plans import Recent


def test_what_was_put_is_found() -> None:
    recent = Recent(4)
    recent.put("a", 1)
    assert recent.get("a") == 1
    assert recent.get("b") is None
    recent.clear()
    assert recent.get("a") is None


@given(st.integers(1, 8), st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=200))
def test_it_is_bounded_and_keeps_the_most_recent(size: int, steps: list[tuple[bool, int]]) -> None:
    recent: Recent = Recent(size)
    used: list[int] = []  # most recent last
    for put, key in steps:
        if put or recent.get(key) is None:
            recent.put(key, key + 1)
        used = [*(k for k in used if k != key), key]
        assert len(recent) <= 2 * size
        for last in used[-size:]:
            assert recent.get(last) == last + 1
            used = [*(k for k in used if k != last), last]


def test_threads_may_use_it_at_once() -> None:
    recent = Recent(16)
    wrong = []

    def work(seed: int) -> None:
        for i in range(3000):
            key = (seed * i) % 40
            value = recent.get(key)
            if value is None:
                recent.put(key, -key - 1)
            elif value != -key - 1:
                wrong.append((key, value))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 3, 7, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(recent) <= 32
