"""Which slot a launch draws from: by stream identity, by capture, never one that another has."""

import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cupyflash import DeviceUnavailable, _driver, _tickets
from cupyflash._tickets import BYTES, SLOTS, Slots

IMPLICIT_CAPTURE, INVALID_HANDLE = 906, 400


class Driver:
    """Stands for the driver, behind its C interface: streams by handle."""

    def __init__(self) -> None:
        self.identities: dict[int, int] = {}
        self.capturing: dict[int, int] = {}
        self.refuses = 0
        entries: dict[str, Callable[..., int]] = {
            "cuStreamIsCapturing": self.is_capturing,
            "cuStreamGetId": self.identity,
            "cuGetErrorString": self.text,
        }
        self.functions = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *_driver.SIGNATURES[name])(entry)
            for name, entry in entries.items()
        }

    def is_capturing(self, stream: int | None, status: int) -> int:
        ctypes.c_int.from_address(status).value = self.capturing.get(stream or 0, 0)
        return self.refuses

    def identity(self, stream: int | None, identity: int) -> int:
        assert not self.capturing.get(stream or 0)
        if (stream or 0) not in self.identities:
            return INVALID_HANDLE
        ctypes.c_ulonglong.from_address(identity).value = self.identities[stream or 0]
        return 0

    def text(self, result: int, words: int) -> int:
        ctypes.c_char_p.from_address(words).value = b"invalid resource handle"
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(_driver, "function", fake.functions.__getitem__)
    return fake


def test_a_stream_keeps_its_slot_and_shares_it_with_none(driver: Driver) -> None:
    driver.identities = {0: 1, 2: 2, 4096: 2**40}
    slots = Slots()
    assert [slots.of(stream) for stream in (0, 2, 4096, 0, 2, 4096)] == [0, 1, 2, 0, 1, 2]


def test_a_handle_that_is_used_again_is_another_stream(driver: Driver) -> None:
    slots = Slots()
    seen = []
    for identity in (7, 8, 7):
        driver.identities = {4096: identity}
        seen.append(slots.of(4096))
    assert seen == [0, 1, 0]


def test_each_captured_launch_has_a_slot_of_its_own(driver: Driver) -> None:
    driver.identities, driver.capturing = {4096: 7}, {4096: 1}
    slots = Slots()
    assert [slots.of(4096) for _ in range(3)] == [0, 1, 2]
    driver.capturing = {}
    assert [slots.of(4096) for _ in range(3)] == [3, 3, 3]


def test_a_broken_capture_and_a_forbidden_stream_have_none(driver: Driver) -> None:
    driver.identities, driver.capturing = {4096: 7, 0: 1}, {4096: 2}
    slots = Slots()
    assert slots.of(4096) is None
    driver.refuses = IMPLICIT_CAPTURE
    assert slots.of(0) is None
    driver.refuses = 0
    assert slots.of(0) == 0


def test_when_the_slots_are_given_out_others_have_none(driver: Driver) -> None:
    driver.identities = {n: n + 100 for n in range(SLOTS + 2)}
    slots = Slots()
    assert [slots.of(n) for n in range(SLOTS)] == list(range(SLOTS))
    assert [slots.of(n) for n in (SLOTS, SLOTS + 1, SLOTS, 5)] == [None, None, None, 5]
    driver.capturing = {5: 1}
    assert slots.of(5) is None


def test_threads_never_get_one_slot_for_two_streams(driver: Driver) -> None:
    driver.identities = {n: n + 1 for n in range(64)}
    slots, start = Slots(), threading.Barrier(8)
    found: list[dict[int, int | None]] = []

    def work() -> None:
        start.wait()
        found.append({n: slots.of(n) for n in range(64)})

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one == found[0] for one in found)
    assert sorted(slot for slot in found[0].values() if slot is not None) == list(range(64))


def test_a_modules_array_is_indexed_by_the_slot(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(base: int) -> Any:
        return SimpleNamespace(module=SimpleNamespace(get_global_var={"tickets": base}.get))

    monkeypatch.setattr(_tickets, "_slots", {})
    driver.identities = {0: 1, 16: 2}
    first, second = _tickets.of(loaded(1 << 20), 0), _tickets.of(loaded(1 << 21), 0)
    elsewhere = _tickets.of(loaded(1 << 22), 1)
    assert [first(0), second(16), first(16)] == [1 << 20, (1 << 21) + BYTES, (1 << 20) + BYTES]
    assert elsewhere(16) == 1 << 22
    driver.capturing = {0: 2}
    assert first(0) == 0


def test_a_stream_that_is_none_is_told(driver: Driver) -> None:
    with pytest.raises(DeviceUnavailable, match=r"^cuStreamGetId failed: invalid resource handle"):
        Slots().of(12345)
