"""Params of the policies as a kernel on the host reads them, by the C structs of cuda/."""

import math
import re
import struct
from typing import Any

import numpy as np
import pytest

from cupyflash._array import Array, contiguous_strides
from cupyflash._array.host import host_view
from cupyflash.masks import Band, Mask, PrefixLM, Segments

STORAGE = {
    "Float16": "float16", "Bfloat16": "bfloat16", "Float32": "float32", "Float64": "float64",
}  # fmt: skip


class Reader:
    """Takes the policies one after the other from the end of Params.

    ``options`` are then those of the CPU path, and ``rest`` the bytes that no policy has.
    """

    def __init__(self, unit: str, data: bytes, sizes: dict[str, int]) -> None:
        self.data = data
        self.at = 0
        self.sizes = sizes  # batch, heads_q, len_q, len_k
        self.options: dict[str, Any] = {"masks": []}
        for member in ("Mask", "Score", "Dropout", "Sink", "Sequences"):
            (types,) = re.findall(rf"using {member} = (?:::)?(.*);", unit)
            self.read(types)
        self.rest = data[self.at :]
        self.options.setdefault("band", Band())

    def read(self, types: str) -> None:
        name, _, inner = types.partition("<")
        inner = inner.removesuffix(">")
        if name in ("All", "Chain"):
            for part in re.findall(r"\w+(?:<[^<>]*>)?", inner):
                self.read(part)
        elif name in ("Identity", "KeepAll", "NoSink", "Dense"):
            self.take("Q")
        else:
            getattr(self, f"read_{name.lower()}")(inner)

    def take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return values

    def view(self, pointer: int, shape: tuple[int, ...], strides: Any, dtype: str) -> np.ndarray:
        return host_view(Array(pointer, shape, tuple(strides), dtype, -1, "fake", True, None))

    def integers(self, count: int) -> np.ndarray | None:
        pointer, stride, width, signed = self.take("Qq2i")
        if not pointer:
            return None
        dtype = f"{'' if signed else 'u'}int{8 * width}"
        return self.view(pointer, (count,), (stride,), dtype)

    def mask(self, mask: Mask) -> None:
        if isinstance(mask, Band) and "band" not in self.options:
            self.options["band"] = mask
        else:
            self.options["masks"].append(mask)

    def read_band(self, flags: str) -> None:
        left, right, bottom_right, _ = self.take("4i")
        sides = [
            side if flag == "true" else None
            for side, flag in zip((left, right), flags.split(", "), strict=True)
        ]
        self.mask(Band(*sides, "bottom_right" if bottom_right else "top_left"))

    def read_prefixlm(self, _: str) -> None:
        prefix = self.integers(self.sizes["batch"])
        bottom_right, _unused = self.take("2i")
        self.mask(PrefixLM(prefix, "bottom_right" if bottom_right else "top_left"))

    def read_segments(self, width: str) -> None:
        at = [self.take("Q2q") for _ in range(2)]
        ids = []
        for (pointer, *strides), extent, word in zip(
            at, self.take("2i"), ("len_q", "len_k"), strict=True
        ):
            shape = (self.sizes["batch"], extent or self.sizes[word])
            ids.append(self.view(pointer, shape, strides, f"uint{8 * int(width)}"))
        self.mask(Segments(*ids))

    def dense(self, dtype: str) -> np.ndarray:
        pointer, *strides, rows, columns = self.take("Q4q2i")
        lengths = rows or self.sizes["len_q"], columns or self.sizes["len_k"]
        return self.view(
            pointer, (self.sizes["batch"], self.sizes["heads_q"], *lengths), strides, dtype
        )

    def read_densemask(self, _: str) -> None:
        self.options["attn_mask"] = self.dense("bool")

    def read_bias(self, arguments: str) -> None:
        dtype, read = arguments.split(", ")
        bias = self.options["attn_bias"] = self.dense(STORAGE[dtype])
        steps = [n // bias.itemsize for n in (*bias.strides[:3], bias.ctypes.data)]
        assert read == "0" or bias.strides[3] == bias.itemsize or bias.shape[3] == 1
        assert read != "2" or not any(n % 2 for n in (*steps, bias.shape[3]))

    def read_softcap(self, _: str) -> None:
        cap, inverse, *near, reach, _unused = self.take("8f")
        assert inverse == np.float32(2 / cap)
        if reach >= 0:  # where score * scale = cap / 2
            assert near[0] * math.sqrt(reach) == pytest.approx(cap / 2 / math.log(2), rel=1e-5)
        self.options["softcap"] = cap

    def read_alibi(self, _: str) -> None:
        pointer, batch, head, bottom_right, _unused = self.take("Q2q2i")
        shape = (self.sizes["batch"], self.sizes["heads_q"])
        self.options["alibi_slopes"] = self.view(pointer, shape, (batch, head), "float32")
        band = self.options.setdefault("band", Band(None, None, "bottom_right"))
        alignment = "bottom_right" if bottom_right else "top_left"
        if not band.bounded:
            self.options["band"] = Band(None, None, alignment)
        assert self.options["band"].alignment == alignment

    def read_dropout(self, _: str) -> None:
        pointer, seed, offset, drops, factor, words, _unused = self.take("3QIf2i")
        assert factor == np.float32(65536 / (65536 - drops) if drops < 65536 else 0)
        state: Any = (seed, offset)
        if pointer:
            dtype = "uint64" if words == 2 else "uint32"
            state = self.view(pointer, (abs(words),), contiguous_strides((abs(words),)), dtype)
        self.options |= {"dropout_p": drops / 65536, "rng_state": state}

    def read_sink(self, dtype: str) -> None:
        pointer, head = self.take("Qq")
        shape = (self.sizes["heads_q"],)
        self.options["learnable_sink"] = self.view(pointer, shape, (head,), STORAGE[dtype])

    def read_used(self, _: str) -> None:
        for name in ("seqused_q", "seqused_k"):
            self.options[name] = self.integers(self.sizes["batch"])

    def read_packed(self, _: str) -> None:
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            self.options[name] = self.integers(self.sizes["batch"] + 1)
        self.read_used("")
