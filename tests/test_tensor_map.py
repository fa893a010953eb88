"""Descriptions of tensor maps and what the driver is asked to encode, without a GPU."""

import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cupyflash import DeviceUnavailable, InvalidArgument, _driver, _tensor_map
from cupyflash._array import adapter_of
from cupyflash._tensor_map import BYTES, TensorMap, encode, moving, of, refusal

PLAIN = TensorMap(4096, "float16", (80, 33, 4, 2), (1280, 160, 42240), (64, 64, 1, 1), 128)
INVALID_VALUE = 1


class Driver:
    """Stands for the driver, behind its C interface: notes its arguments and fills the map."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.result = 0
        self.functions: dict[str, Any] = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *_driver.SIGNATURES[name])(entry)
            for name, entry in (
                ("cuTensorMapEncodeTiled", self.encode), ("cuGetErrorString", self.text),
            )
        }  # fmt: skip

    def encode(
        self, room: int, dtype: int, rank: int, pointer: int, shape: int, strides: int, box: int,
        steps: int, *options: int,
    ) -> int:  # fmt: skip
        assert room % 64 == 0

        def read(kind: Any, address: int, count: int) -> tuple[int, ...]:
            return tuple((kind * count).from_address(address))

        u32, u64 = ctypes.c_uint32, ctypes.c_uint64
        self.asked.append(
            {
                "dtype": dtype,
                "pointer": pointer,
                "shape": read(u64, shape, rank),
                "strides": read(u64, strides, rank - 1) if rank > 1 else (),
                "box": read(u32, box, rank),
                "steps": read(u32, steps, rank),
                "options": options,
            }
        )
        ctypes.memmove(room, bytes([len(self.asked)]) * BYTES, BYTES)
        return self.result

    def text(self, result: int, words: int) -> int:
        ctypes.c_char_p.from_address(words).value = b"invalid argument"
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fake = Driver()
    monkeypatch.setattr(_driver, "function", fake.functions.__getitem__)
    _tensor_map._encode_at.cache_clear()
    yield fake
    _tensor_map._encode_at.cache_clear()


# Descriptions


def described(x: np.ndarray, axes: tuple[int, ...] = (3, 1, 2, 0), swizzle: int = 128) -> TensorMap:
    box = (64, 64, *(1,) * (len(axes) - 2))
    return of(adapter_of(x, "x").array(x, "x"), axes, box, swizzle)


def test_an_array_is_described_innermost_dimension_first() -> None:
    x = np.zeros((2, 33, 4, 80), np.float16)
    assert described(x) == PLAIN._replace(
        pointer=x.ctypes.data, strides=(4 * 160, 160, 33 * 4 * 160)
    )
    turned = np.zeros((2, 4, 33, 80), np.float16).transpose(0, 2, 1, 3)
    assert described(turned).strides == (160, 33 * 160, 33 * 4 * 160)


@pytest.mark.parametrize("columns", [1, 5, 8, 60, 64])
def test_dimensions_of_size_1_get_a_stride_that_fits(columns: int) -> None:
    for shape in itertools.product((1, 3), repeat=3):
        x = np.zeros((*shape, 64), np.float16)[..., :columns]
        assert _tensor_map._refuse_view(described(x)) is None
    x = np.lib.stride_tricks.as_strided(
        np.zeros(64, np.float16), (1, 1, 1, 64), (2**50, 6, 2**50, 2)
    )
    assert described(x).strides == (128, 128, 128)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pointer": 4104}, "needs an address that is a multiple of 16, got 0x1008"),
        ({"pointer": 0}, "needs an address that is a multiple of 16, got 0x0"),
        ({"dtype": "float64"}, "takes .*float16.*, got float64"),
        ({"swizzle": 16}, "needs a swizzle of 0, 32, 64, 128 bytes, got 16"),
        ({"shape": (80, 2**32 + 1, 4, 2)}, "needs sizes .* got 4294967297"),
        ({"strides": (1280, 168, 42240)}, "needs strides .* multiples of 16, got 168"),
        ({"strides": (-1280, 160, 42240)}, "needs strides .*, got -1280"),
        ({"strides": (1280, 160, 2**40)}, "needs strides .*, got 1099511627776"),
        ({"box": (64, 257, 1, 1)}, "needs a box of 1 to 256 .*, got 257"),
        ({"box": (64, 0, 1, 1)}, "needs a box of 1 to 256 .*, got 0"),
        ({"box": (128, 64, 1, 1)}, "within the swizzle's span of 128, got 256"),
        ({"box": (4, 64, 1, 1)}, "whole 16 bytes .*, got 8"),
        ({"box": (64, 64, 1)}, "a box of as many"),
        ({"strides": (1280, 160)}, "a stride for each but the first"),
        ({"shape": (1,) * 6, "strides": (16,) * 5, "box": (64, *(1,) * 5)}, "1 to 5 dimensions"),
    ],
)
def test_what_no_map_describes_is_refused_in_words(
    changes: dict[str, Any], words: str, driver: Driver
) -> None:
    bad = PLAIN._replace(**changes)
    reason = refusal(bad)
    assert reason is not None
    with pytest.raises(InvalidArgument, match=rf"^a tensor map .*{words}") as caught:
        encode(bad)
    assert str(caught.value) == f"a tensor map {reason}"
    assert not driver.asked


@pytest.mark.parametrize("axis", range(4))
def test_the_driver_is_asked_for_no_map_of_nothing(axis: int, driver: Driver) -> None:
    shape = tuple(0 if n == axis else size for n, size in enumerate(PLAIN.shape))
    nothing = PLAIN._replace(shape=shape, pointer=0)
    assert encode(nothing) == moving(nothing)(0) == bytes(BYTES)
    assert not driver.asked


def test_the_limits_themselves_are_taken() -> None:
    for changes in (
        {"shape": (2**32, 2**32, 1, 1)}, {"strides": (16, 16, 2**40 - 16)},
        {"box": (256, 256, 256, 256), "swizzle": 0}, {"shape": (5,), "strides": (), "box": (64,)},
        {"box": (128, 1, 1, 1), "dtype": "float8_e5m2"}, {"box": (16, 1, 1, 1), "swizzle": 32},
    ):  # fmt: skip
        assert refusal(PLAIN._replace(**changes)) is None


# Encoding


@pytest.mark.parametrize(
    ("dtype", "code"),
    [("float16", 6), ("bfloat16", 9), ("float32", 7), ("float8_e4m3fn", 0), ("float8_e5m2", 0)],
)
def test_the_driver_is_asked_for_what_is_described(dtype: str, code: int, driver: Driver) -> None:
    tensor = PLAIN._replace(dtype=dtype, box=(32, 64, 1, 1))
    assert encode(tensor) == b"\x01" * BYTES
    assert driver.asked == [
        {
            "dtype": code,
            "pointer": 4096,
            "shape": (80, 33, 4, 2),
            "strides": (1280, 160, 42240),
            "box": (32, 64, 1, 1),
            "steps": (1, 1, 1, 1),
            "options": (0, 3, 2, 0),  # interleave, swizzle, L2 promotion, zeros outside
        }
    ]


@pytest.mark.parametrize(("swizzle", "code"), [(0, 0), (32, 1), (64, 2), (128, 3)])
def test_every_swizzle(swizzle: int, code: int, driver: Driver) -> None:
    encode(PLAIN._replace(swizzle=swizzle, box=(16, 64, 1, 1)))
    assert driver.asked[0]["options"][1] == code


def test_large_sizes_and_strides_reach_the_driver_whole(driver: Driver) -> None:
    shape, strides = (64, 2**32, 2**31, 1), (2**40 - 16, 2**39, 2**38)
    encode(PLAIN._replace(pointer=2**47 + 16, shape=shape, strides=strides))
    (asked,) = driver.asked
    assert (asked["pointer"], asked["shape"], asked["strides"]) == (2**47 + 16, shape, strides)


def test_a_moving_map_asks_once_for_each_address(driver: Driver) -> None:
    first, second = moving(PLAIN), moving(PLAIN._replace(shape=(80, 32, 4, 2)))
    results = [(at(pointer), at, pointer) for at in (first, second) for pointer in (16, 32, 48)]
    assert [asked["pointer"] for asked in driver.asked] == [16, 32, 48] * 2
    assert [asked["shape"][1] for asked in driver.asked] == [33] * 3 + [32] * 3
    assert all(at(pointer) == result for result, at, pointer in results)
    assert len(driver.asked) == 6
    with pytest.raises(InvalidArgument, match="multiple of 16, got 0x8"):
        first(8)


def test_what_is_remembered_is_bounded(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _tensor_map._encode_at.cache_info().maxsize == _tensor_map.REMEMBERED
    monkeypatch.setattr(_tensor_map, "encode", lambda tensor: bytes(BYTES))
    at = moving(PLAIN)
    for pointer in range(16, 16 * (_tensor_map.REMEMBERED + 100), 16):
        at(pointer)
    assert _tensor_map._encode_at.cache_info().currsize == _tensor_map.REMEMBERED


# The driver


def test_the_drivers_refusal_is_told_in_its_words(driver: Driver) -> None:
    driver.result = INVALID_VALUE
    with pytest.raises(
        DeviceUnavailable, match=r"^cuTensorMapEncodeTiled failed: invalid argument \(1\)"
    ):
        encode(PLAIN)
    driver.result = 0
    assert encode(PLAIN) == b"\x02" * BYTES


def test_a_missing_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    _driver.function.cache_clear()
    monkeypatch.setattr(_driver, "LIBRARY", "libthere-is-none.so.1")
    with pytest.raises(DeviceUnavailable, match=r"cuTensorMapEncodeTiled cannot be used .*install"):
        encode(PLAIN)
    _driver.function.cache_clear()
