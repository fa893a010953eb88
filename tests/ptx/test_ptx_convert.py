"""Conversions: every number at which a rounding is decided, and every code the way back."""

import ml_dtypes
import numpy as np
import pytest
from machine import Kernel, Machine, Out
from model import BFLOAT16, E4M3, E5M2, FLOAT16, boundaries, codes, pairs, same_numbers, words

CONVERT = """
  const unsigned threads = gridDim.x * blockDim.x;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < p.pairs; i += threads)
    p.to[i] = p.other ? {} : {};
"""
TO_16_BITS = Kernel(
    "convert",
    "const float *from; u32 *to; u32 pairs, other;",
    CONVERT.format(
        "ptx::f16x2(p.from[2 * i], p.from[2 * i + 1])",
        "ptx::bf16x2(p.from[2 * i], p.from[2 * i + 1])",
    ),
    threads=256,
    blocks=4,
)
OF_16_BITS = Kernel(
    "convert",
    "const u16 *from; float *to; u32 count;",
    """
  for (u32 i = threadIdx.x; i < p.count; i += blockDim.x) p.to[i] = ptx::float_of_f16(p.from[i]);
""",
    threads=256,
)
TO_8_BITS = Kernel(
    "fp8",
    "const float *from; u16 *to; u32 pairs, other;",
    CONVERT.format(
        "ptx::e5m2x2(p.from[2 * i], p.from[2 * i + 1])",
        "ptx::e4m3x2(p.from[2 * i], p.from[2 * i + 1])",
    ),
    threads=256,
    capability=89,
)
WORDS = Kernel(
    "fp8",
    "const u16 *from; u32 *to; u32 count;",
    """
  for (u32 i = threadIdx.x; i < p.count; i += blockDim.x)
    p.to[i] = ptx::word_of(p.from[2 * i], p.from[2 * i + 1]);
""",
    threads=256,
    capability=89,
)
OF_8_BITS = Kernel(
    "fp8",
    "const u16 *from; u32 *to; u32 pairs, other;",
    CONVERT.format("ptx::f16x2_of_e5m2x2(p.from[i])", "ptx::f16x2_of_e4m3x2(p.from[i])"),
    threads=256,
    capability=89,
)
PERMUTE = Kernel(
    "fp8",
    "const u32 *words, *selectors; u32 *to; u32 count;",
    """
  for (u32 i = threadIdx.x; i < p.count; i += blockDim.x)
    p.to[i] = ptx::permute_bytes(p.words[0], p.words[1], p.selectors[i]);
""",
    threads=256,
    capability=89,
)


BITS = Kernel(
    "convert",
    "const float *x; u32 *bits; float *back; int *integers; u32 count;",
    """
  for (u32 i = threadIdx.x; i < p.count; i += blockDim.x) {
    p.bits[i] = ptx::float_bits(p.x[i]);
    p.back[i] = ptx::bits_float(p.bits[i]);
    p.integers[i] = ptx::integer(p.x[i]);
  }
""",
    threads=256,
)


def both_places(x: np.ndarray) -> np.ndarray:
    """Return pairs in which every number is the first once and the second once."""
    return np.stack([x, np.roll(x, 1)], axis=1)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=lambda dtype: dtype.name)
def test_16_bits_are_rounded_to_nearest_even(machine: Machine, dtype: np.dtype) -> None:
    x = both_places(boundaries(dtype))
    out = Out.empty(len(x), np.uint32)
    (pair,) = machine.run(TO_16_BITS, x, out, np.uint32(len(x)), np.uint32(dtype == FLOAT16))
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(dtype).view(np.uint16)
    expected[np.isnan(x)] = 0x7FFF  # the one NaN that cvt makes
    np.testing.assert_array_equal(pair, words(expected)[:, 0])


def test_every_code_of_fp16_is_a_number_of_fp32(machine: Machine) -> None:
    x = codes(FLOAT16)
    out = Out.empty(x.shape, np.float32)
    (wide,) = machine.run(OF_16_BITS, x.view(np.uint16), out, np.uint32(x.size))
    assert same_numbers(wide, x.astype(np.float32))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=lambda dtype: dtype.name)
def test_8_bits_are_rounded_to_nearest_even_and_saturate(machine: Machine, dtype: np.dtype) -> None:
    x = both_places(boundaries(dtype))
    out = Out.empty(len(x), np.uint16)
    (pair,) = machine.run(TO_8_BITS, x, out, np.uint32(len(x)), np.uint32(dtype == E5M2))
    largest = float(ml_dtypes.finfo(dtype).max)
    with np.errstate(invalid="ignore"):
        expected = np.clip(x, -largest, largest).astype(dtype).view(np.uint8)
    expected[np.isnan(x)] = 0x7F
    np.testing.assert_array_equal(pair, pairs(expected[:, 0], expected[:, 1]))


def test_two_halves_are_a_word(machine: Machine) -> None:
    halves = np.array([0, 1, 0x7FFF, 0x8000, 0xFFFF, 0x1234], np.uint16)
    x = np.stack(np.meshgrid(halves, halves), axis=-1).reshape(-1, 2)
    out = Out.empty(len(x), np.uint32)
    (word,) = machine.run(WORDS, x, out, np.uint32(len(x)))
    np.testing.assert_array_equal(word, x.astype(np.uint32) @ np.array([1, 65536], np.uint32))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=lambda dtype: dtype.name)
def test_every_code_of_8_bits_is_a_number_of_fp16(machine: Machine, dtype: np.dtype) -> None:
    x = both_places(codes(dtype))
    from_ = pairs(x[:, 0], x[:, 1])
    out = Out.empty(len(x), np.uint32)
    (wide,) = machine.run(OF_8_BITS, from_, out, np.uint32(len(x)), np.uint32(dtype == E5M2))
    got, expected = wide.view(np.float16).reshape(-1, 2), x.astype(np.float16)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view("u2")[~nan], expected.view("u2")[~nan])


def test_a_selector_names_bytes_of_two_words(machine: Machine) -> None:
    nibbles = np.stack(np.meshgrid(*[np.arange(8)] * 4), axis=-1).reshape(-1, 4)
    selectors = (nibbles << np.array([0, 4, 8, 12])).sum(axis=1).astype(np.uint32)
    source = np.array([0x13579BDF, 0x2468ACE0], np.uint32)
    out = Out.empty(len(selectors), np.uint32)
    (got,) = machine.run(PERMUTE, source, selectors, out, np.uint32(len(selectors)))
    np.testing.assert_array_equal(got.view(np.uint8).reshape(-1, 4), source.view("u1")[nibbles])


def test_a_number_and_its_bits_are_the_same(machine: Machine, rng: np.random.Generator) -> None:
    x = rng.integers(0, 2**32, 2000, np.uint32)
    outs = [Out.empty(x.shape, dtype) for dtype in (np.uint32, np.float32, np.int32)]
    bits, back, integers = machine.run(BITS, x.view(np.float32), *outs, np.uint32(x.size))
    np.testing.assert_array_equal(bits, x)
    np.testing.assert_array_equal(integers, x.view(np.int32))
    np.testing.assert_array_equal(back.view(np.uint32), x)
