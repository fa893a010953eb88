"""Faults to plant in the CUDA sources, each of which the emulator must show, and how.

A mutation replaces one text by another in one file; `report` is part of what the emulator then
says, or WRONG where the faulty kernel runs and only its result tells.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cases import Case, Modified

from cupyflash import _jit
from cupyflash.masks import Segments

WRONG = "wrong result"

KERNEL = "kernels/attention_fwd_sm80.cu"
LOAD, FRAGMENT, SOFTMAX = "tile/load.cuh", "tile/fragment.cuh", "tile/softmax.cuh"
TILE, TYPES, WORK, BAND = "tile/smem.cuh", "tile/types.cuh", "tile/work.cuh", "masks/band.cuh"
PLACE, DROP = "tile/place.cuh", "tile/drop.cuh"
SEGMENTS, TEAM = "masks/segments.cuh", "tile/team.cuh"


def case(len_q: int, len_k: int, dims: Any = 64, dtype: str = "float16", **options: Any) -> Case:
    """Return a problem of two heads that share K and V; one dimension is that of V too."""
    dim, dim_v = dims if isinstance(dims, tuple) else (dims, dims)
    return Case(len_q, len_k, dim, dim_v, dtype, heads_q=2, heads_k=1, **options)


def modified(*names: str, dims: Any = (64, 64), dtype: str = "float16", **options: Any) -> Modified:
    """Return the same with modifiers."""
    return Modified(150, 70, *dims, dtype, heads_q=2, heads_k=1, modifiers=names, **options)


class Falling(Modified):
    """Packed sequences whose bounds fall, of which the rows in between are nobody's."""

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the call."""
        return super().options | {"cu_seqlens_q": np.array([200, 260, 0, 190])}


class Documents(Modified):
    """Ids that come again, or differ in their high halves alone, and end beside ends of blocks."""

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the call."""
        other = 5 + 2**32
        q = np.repeat([5, other], [150, self.len_q - 150])
        k = np.repeat([5, other, 5], [63, 66, self.len_k - 129])
        return super().options | {"mask": Segments(q, k)}


FALLING = Falling.varlen(
    ((60, 40), (0, 3), (190, 60)), 64, 64, "float16", heads_q=2, heads_k=1, tail=150
)


# The problems that show the faults: each is small, and right without them.
PROBLEMS = {
    "causal": case(70, 130, causal=True),
    "causal, several blocks": case(150, 200, causal=True),
    "causal, one key beyond a block": case(33, 65, causal=True),
    "causal, a corner beyond a block": case(70, 132, causal=True),
    "full": case(40, 150),
    "window": case(100, 150, window_size=(40, 10), alignment="top_left"),
    "window, from the last key of a block": case(
        100, 150, window_size=(1, 10), alignment="top_left"
    ),
    "rows without keys": case(200, 30, causal=True),
    "scores that grow": case(40, 150, 128, softmax_scale=3.0),
    "negative scale": case(70, 130, softmax_scale=-0.3, causal=True),
    "odd head dims": case(70, 100, (7, 5), causal=True),
    "unequal head dims": case(40, 70, (64, 48)),
    "queries in registers": case(70, 130, 32, causal=True),
    "batch": Case(20, 20, 16, 16, "float16", batch=2, heads_q=4, heads_k=2),
    "many heads": Case(20, 20, 16, 16, "float16", batch=2, heads_q=11, heads_k=11),
    "fp32": case(70, 130, dtype="float32", causal=True),
    "lengths in use": modified("used_q", "used_k", batch=5),
    "alibi": modified("alibi_batch", batch=2),
    "dropout": modified("dropout"),
    "fp32, dropout": modified("dropout", dims=(192, 192), dtype="float32"),
    "sink": modified("sink", causal=True),
    "bounds that fall": FALLING,
    "documents": Documents(300, 200, 64, 64, "float16", heads_q=2, heads_k=1),
    "packed": Modified.varlen(
        ((70, 90), (0, 3), (150, 40), (5, 9)), 64, 64, "float16", heads_q=2, heads_k=1, tail=150
    ),
}


class Mutation(NamedTuple):
    """One fault."""

    name: str
    file: str
    old: str
    new: str
    problem: str
    report: str


def edited(root: Path, edits: Iterable[tuple[str, str, str]]) -> Path:
    """Write a copy of the CUDA sources with edits (file, old, new); each has one place in them."""
    sources = _jit.sources()
    for name, old, new in edits:
        assert sources[name].count(old) == 1, f"{name} has changed: rewrite {old!r}"
        sources[name] = sources[name].replace(old, new)
    for name, text in sources.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


IN_FLIGHT = "into which a copy is in flight"
NOWHERE = "which is in no allocation"
NO_BARRIER = "and no barrier stands between"
TWO_COPIES = "into which a copy is in flight"
AT_ANOTHER = "barrier, while other threads are at the barrier of"

# fmt: off
SYNCHRONISATION = (
    Mutation("the wait for a key block is left out", KERNEL,
        "ptx::cp_async_wait<STAGES - 2>();", "", "causal", IN_FLIGHT),
    Mutation("the wait for a key block leaves one group too many", KERNEL,
        "ptx::cp_async_wait<STAGES - 2>();", "ptx::cp_async_wait<STAGES - 1>();",
        "causal", IN_FLIGHT),
    Mutation("the barrier of a key block is left out", KERNEL,
        "ptx::cp_async_wait<STAGES - 2>();\n      ptx::barrier();",
        "ptx::cp_async_wait<STAGES - 2>();\n", "causal", NO_BARRIER),
    Mutation("a key block's copies are not committed", KERNEL,
        "first());\n      ptx::cp_async_commit();\n    }\n    const Mask",
        "first());\n    }\n    const Mask", "causal, several blocks", IN_FLIGHT),
    Mutation("the first copies are not committed", KERNEL,
        "      ptx::cp_async_commit();  // also", "      // also", "causal", IN_FLIGHT),
    Mutation("the copies of Q are not committed", KERNEL,
        "thread);\n    ptx::cp_async_commit();", "thread);", "queries in registers", IN_FLIGHT),
    Mutation("the wait for Q leaves one group too many", KERNEL,
        "ptx::cp_async_wait<STAGES - 1>();\n    ptx::barrier();",
        "ptx::cp_async_wait<STAGES>();\n    ptx::barrier();", "queries in registers", IN_FLIGHT),
    Mutation("the barrier after Q has landed is left out", KERNEL,
        "    ptx::barrier();  // every thread's part of Q has landed", "",
        "queries in registers", NO_BARRIER),
    Mutation("all key blocks use one slot", KERNEL,
        "/ BLOCK_K % STAGES", "/ BLOCK_K % 1", "causal", IN_FLIGHT),
    Mutation("the barrier before the output is staged is left out", KERNEL,
        "  ptx::cp_async_wait_all();\n  ptx::barrier();  // the staged",
        "  ptx::cp_async_wait_all();  // the staged", "causal", NO_BARRIER),
    Mutation("the wait before the output is staged is left out", KERNEL,
        "  ptx::cp_async_wait_all();\n  ptx::barrier();  // the staged",
        "  ptx::barrier();  // the staged", "rows without keys", "in flight"),
    Mutation("the barrier after thread 0 has written is left out", KERNEL,
        "ptx::barrier();  // thread 0 has written", "// thread 0 has written",
        "causal", "cp.async of 16 bytes at"),
    Mutation("the warp barrier before staged rows are read is left out", KERNEL,
        "  ptx::warp_barrier();", "", "causal", NO_BARRIER),
    Mutation("half of a block comes to a barrier", KERNEL,
        "    const Mask mask = shared.mask;\n    const int",
        "    if (threadIdx.x < 64) ptx::barrier();\n"
        "    const Mask mask = shared.mask;\n    const int", "causal", AT_ANOTHER),
    Mutation("half of a warp comes to a warp barrier", KERNEL,
        "ptx::barrier();  // thread 0 has written",
        "if (thread < 16) ptx::warp_barrier();\n  ptx::barrier();  // thread 0 has written",
        "causal", "DEADLOCK"),
    Mutation("lanes leave at a warp barrier", KERNEL,
        "  ptx::warp_barrier();", "  if (lane < 16) ptx::warp_barrier();",
        "causal", "exited, while other lanes"),
    Mutation("a vote is taken under a condition of a lane", SOFTMAX,
        "if (ptx::any(moved)) rescale", "if (moved || ptx::any(moved)) rescale",
        "causal", "while other lanes of warp"),
    Mutation("fp32: the wait for Q is left out", KERNEL,
        "thread);\n      ptx::cp_async_wait_all();\n      split_rows<T, THREADS, ROWS>",
        "thread);\n      split_rows<T, THREADS, ROWS>", "fp32", TWO_COPIES),
    Mutation("fp32: the wait for K is left out", KERNEL,
        "      ptx::cp_async_wait_all();\n      ptx::barrier();  // every warp has read the slot",
        "      ptx::barrier();", "fp32", TWO_COPIES),
    Mutation("fp32: the wait for V is left out", KERNEL,
        "      ptx::cp_async_wait_all();\n      split_rows<T, THREADS, BLOCK_K>(shared.in.v",
        "      split_rows<T, THREADS, BLOCK_K>(shared.in.v", "fp32", TWO_COPIES),
    Mutation("fp32: the barrier before K is split is left out", KERNEL,
        "      ptx::cp_async_wait_all();\n      ptx::barrier();  // every warp has read the slot",
        "      ptx::cp_async_wait_all();", "fp32", IN_FLIGHT),
    Mutation("fp32: the barrier after K is split is left out", KERNEL,
        "      ptx::barrier();  // every thread's part of K is split", "", "fp32", NO_BARRIER),
    Mutation("fp32: the barrier after V is split is left out", KERNEL,
        "      ptx::barrier();  // every thread's part of V is split", "", "fp32", NO_BARRIER),
    Mutation("fp32: only warps that see a key block come to its barrier", KERNEL,
        "    if constexpr (SPLIT) {\n      ptx::cp_async_wait_all();\n"
        "      split_rows<T, THREADS, BLOCK_K>(shared.in.v",
        "    if constexpr (SPLIT) if (seen) {\n      ptx::cp_async_wait_all();\n"
        "      split_rows<T, THREADS, BLOCK_K>(shared.in.v", "fp32", AT_ANOTHER),
)
MEMORY = (
    Mutation("rows are loaded past the last", LOAD,
        "i * Mine::STEP < left && byte", "byte", "causal", "of 17920 bytes"),
    Mutation("one row is loaded past the last", LOAD,
        "i * Mine::STEP < left &&", "i * Mine::STEP <= left &&",
        "causal", "cp.async of 16 bytes at "),
    Mutation("columns are loaded past the last", LOAD,
        " && byte / SIZE < valid", "", "odd head dims", "a load of 2 bytes at "),
    Mutation("what lies outside is not filled with zeros", LOAD,
        "ptx::cp_async<WIDTH>(ptx::smem_address(to), from, present);",
        "if (present) ptx::cp_async<WIDTH>(ptx::smem_address(to), from, present);",
        "causal", WRONG),
    Mutation("rows are stored past the last", KERNEL,
        "const int rows = min(place.q.extent - place.q_begin - warp_q, WARP_Q);",
        "const int rows = WARP_Q;",
        "causal", "a store of 16 bytes at out +1"),
    Mutation("one row is stored past the last", KERNEL,
        "const int rows = min(place.q.extent - place.q_begin - warp_q, WARP_Q);",
        "const int rows = min(place.q.extent - place.q_begin - warp_q + 1, WARP_Q);",
        "causal", "a store of "),
    Mutation("rows are stored one too far", LOAD,
        "*to = target + row * stride + column", "*to = target + (row + 1) * stride + column",
        "causal", "a store of 16 bytes at out +1"),
    Mutation("columns are stored past the last", LOAD,
        "if (column < columns) *reinterpret", "*reinterpret",
        "odd head dims", "a store of 2 bytes at out +14"),
    Mutation("the LSE is stored past the last row", KERNEL,
        "if (row < rows) lse_rows", "lse_rows",
        "causal", "a store of 4 bytes at lse +560 of 560 bytes"),
    Mutation("shared memory is larger than the host believes", KERNEL,
        "ptx::shared<forward::Shared>()", "ptx::shared<forward::Shared[2]>()[0]",
        "causal", "bytes of shared memory, and the launch gave"),
    Mutation("a fragment is loaded from a misaligned row", TILE,
        "+ row * COLUMNS * 2 +", "+ row * COLUMNS * 2 + 8 +",
        "causal", "is not 16-byte aligned"),
    Mutation("fp32: threads land on each other's packets", LOAD,
        "landing[(packet + byte / 16) * THREADS + thread]", "landing[packet + byte / 16 + thread]",
        "fp32", TWO_COPIES),
)
LAYOUT = (
    Mutation("the swizzle is added instead of XORed", TILE,
        "const u32 turned = lane_offset ^ chunk % SPAN * 16;",
        "const u32 turned = lane_offset + chunk % SPAN * 16;", "full", IN_FLIGHT),
    Mutation("V is not transposed on the way", TILE,
        "ptx::ldmatrix_x4_trans(d, address(lane % 16", "ptx::ldmatrix_x4(d, address(lane % 16",
        "causal", WRONG),
    Mutation("the quarters of K are swapped", TILE,
        "ptx::ldmatrix_x4(d, address(lane % 8 + lane / 16 * 8, lane / 8 % 2",
        "ptx::ldmatrix_x4(d, address(lane % 16, lane / 16", "causal", WRONG),
    Mutation("a lane's columns of a fragment are another's", FRAGMENT,
        "index + static_cast<int>(lane % 4 * 2)", "index + static_cast<int>(lane % 4)",
        "causal", "-byte aligned"),
    Mutation("a lane's rows of a fragment are another's", FRAGMENT,
        "index / 2 * 16 + index % 2 * 8 +", "index / 2 * 16 + index % 2 * 4 +",
        "causal", NO_BARRIER),
    Mutation("two columns of the output are one", KERNEL,
        "o.x[m][n][2 * half],\n", "o.x[m][n][2 * half + 1],\n", "causal", WRONG),
    Mutation("V is read with the strides of K", KERNEL,
        "const i64 row = ptx::opaque(p.v_row);", "const i64 row = ptx::opaque(p.k_row);",
        "unequal head dims", "cp.async of 16 bytes at v"),
    Mutation("query heads of a group read another head of K", KERNEL,
        "place.head / (p.heads_q / p.heads_k)", "place.head % p.heads_k", "batch", WRONG),
    Mutation("every batch entry reads the first one's K", KERNEL,
        "p.k + start_of<Sequences>(place.k, place.batch, p.k_batch, p.k_row)", "p.k",
        "batch", WRONG),
    Mutation("a group of heads begins at the wrong head", WORK,
        "const u32 first = block / per_group * group", "const u32 first = block / per_group",
        "many heads", WRONG),
)
ARITHMETIC = (
    Mutation("O is not initialised", KERNEL,
        "  Output o;\n  o.zero();", "  Output o;", "causal", WRONG),
    Mutation("S is not initialised", FRAGMENT,
        "  s.zero();\n  gemm_transposed", "  gemm_transposed", "causal", WRONG),
    Mutation("O is not rescaled", SOFTMAX,
        "    o.each([&](float &value, int r, int) { value *= shrink[r]; });", "",
        "scores that grow", WRONG),
    Mutation("l is not rescaled", SOFTMAX,
        "      l[r] *= shrink[r];\n", "", "scores that grow", WRONG),
    Mutation("the maximum is that of two lanes of four", SOFTMAX,
        "ptx::shfl_xor(block_max[r], 2)", "ptx::shfl_xor(block_max[r], 1)", "causal", WRONG),
    Mutation("the sum is that of two lanes of four", SOFTMAX,
        "      l[r] += ptx::shfl_xor(l[r], 2);\n", "", "causal", WRONG),
    Mutation("-inf is subtracted from -inf", SOFTMAX,
        "m[r] = -LARGEST", "m[r] = -INFINITE", "rows without keys", WRONG),
    Mutation("a sum of nothing is divided by", SOFTMAX,
        "l[r] == 0.0f ? 0.0f : shrink / total", "shrink / total", "rows without keys", WRONG),
    Mutation("the LSE stays in base 2", SOFTMAX, "* LN_2;", ";", "causal", WRONG),
    Mutation("the scale is forgotten", SOFTMAX,
        "ptx::fma(score, c, -", "ptx::fma(score, 1.0f, -", "causal", WRONG),
    Mutation("a negative scale is not applied before the maximum", KERNEL,
        "Score::IDENTITY && Config::POSITIVE_SCALE", "Score::IDENTITY", "negative scale", WRONG),
    Mutation("fp32: only the leading planes are multiplied", FRAGMENT,
        "for (int order = T::PLANES - 1; order >= 0; --order)",
        "for (int order = 0; order >= 0; --order)", "fp32", WRONG),
    Mutation("fp32: a plane is subtracted from the wrong half", TYPES,
        "low -= ptx::bits_float(planes[i] << 16);", "low -= ptx::bits_float(planes[i]);",
        "fp32", WRONG),
)
MASKS = (
    Mutation("a query sees one key too many", BAND,
        "k <= q + upper); }", "k <= q + upper + 1); }", "causal", WRONG),
    Mutation("a query sees one key too few", BAND,
        "k <= q + upper); }", "k < q + upper); }", "causal", WRONG),
    Mutation("a window is one key too wide on the left", BAND,
        "k >= q + lower) &", "k >= q + lower - 1) &", "window", WRONG),
    Mutation("a block with one hidden pair counts as whole", BAND,
        "k_end - 1 <= q + upper);", "k_end - 2 <= q + upper);",
        "causal, a corner beyond a block", WRONG),
    Mutation("no pair is ever hidden", KERNEL,
        "if (!whole) hide", "if (false) hide", "causal", WRONG),
    Mutation("a block past the last key counts as whole", KERNEL,
        "key_end <= keys_used && mask.whole", "mask.whole", "full", WRONG),
    Mutation("keys past the last are not hidden", KERNEL,
        "key >= len_k || !mask", "!mask", "full", WRONG),
    Mutation("the range of keys ends one early", BAND,
        "q_end + upper : len_k;", "q_end + upper - 1 : len_k;",
        "causal, one key beyond a block", WRONG),
    Mutation("the range of keys begins one late", BAND,
        "HAS_LEFT ? q + lower : 0;\n    const int end = HAS_RIGHT ? q_end",
        "HAS_LEFT ? q + lower + 1 : 0;\n    const int end = HAS_RIGHT ? q_end",
        "window, from the last key of a block", WRONG),
    Mutation("a block with one key to see is skipped", KERNEL,
        "key_end > keys.begin;", "key_end > keys.begin + 1;",
        "window, from the last key of a block", WRONG),
    Mutation("the diagonal ends in the wrong corner", BAND,
        "p.bottom_right ? static_cast<i64>(len_k) - len_q : 0", "0", "causal", WRONG),
    Mutation("the first key block is not walked", KERNEL,
        "key >= first(); key", "key > first(); key", "causal", WRONG),
)
MODIFIERS = (
    Mutation("rows that are not in use keep what was computed", KERNEL,
        "if constexpr (Sequences::VARIES) clear", "if constexpr (false) clear",
        "lengths in use", WRONG),
    Mutation("tiles of which no row is in use are not written", KERNEL,
        "place.q.length) return store_nothing(p, place, threadIdx.x);", "place.q.length) return;",
        "lengths in use", WRONG),
    Mutation("rows of no sequence are not written", KERNEL,
        "p.len_q)) return store_nothing(p, place, threadIdx.x);", "p.len_q)) return;", "packed",
        WRONG),
    Mutation("keys beyond those in use count", KERNEL,
        "? shared.place.k.length : p.len_k", "? p.len_k : p.len_k", "lengths in use", WRONG),
    Mutation("positions are those of the tile", KERNEL,
        "q + Scores::row(r, lane), k + Scores::column(0, lane), c);\n  });",
        "Scores::row(r, lane), k + Scores::column(0, lane), c);\n  });", "alibi", WRONG),
    Mutation("scores are modified before they are scaled", KERNEL,
        "even *= p.scale, odd *= p.scale;\n    score.apply(even, odd, q + Scores::row(r, lane), "
        "k + Scores::column(0, lane), c);",
        "score.apply(even, odd, q + Scores::row(r, lane), k + Scores::column(0, lane), c);\n"
        "    even *= p.scale, odd *= p.scale;", "alibi", WRONG),
    Mutation("every sequence has the modifiers of the first", KERNEL,
        "const Score score(p.score, shared.place.batch,", "const Score score(p.score, 0,",
        "alibi", WRONG),
    Mutation("neighbouring columns share a draw", DROP,
        "k + first + p.column(odd, lane), x", "k + first + p.column(0, lane), x",
        "dropout", WRONG),
    Mutation("half a draw is the other half", DROP,
        "(k + first) % 32 != 0", "(k + first) % 32 == 0", "fp32, dropout", WRONG),
    Mutation("weights are dropped before they are summed", KERNEL,
        "softmax.weigh(s, first, STEP);\n          drop<STEP>(s, dropout, warp_q, key, first, "
        "ptx::lane());",
        "drop<STEP>(s, dropout, warp_q, key, first, ptx::lane());\n          "
        "softmax.weigh(s, first, STEP);", "dropout", WRONG),
    Mutation("what dropout leaves is not rescaled", SOFTMAX,
        "shrink / total * factor", "shrink / total", "dropout", WRONG),
    Mutation("the sink is in the sum of O alone", SOFTMAX,
        "reference + ptx::lg2(total)", "reference + ptx::lg2(l[r])", "sink", WRONG),
    Mutation("a row that sees no key has no sink", SOFTMAX,
        "l[r] == 0.0f ? sink.logit : lse[r]", "l[r] == 0.0f ? -INFINITE : lse[r]", "sink", WRONG),
    Mutation("a sequence has as many slots as whole tiles", PLACE,
        "total) / BLOCK) + i; };", "total) / BLOCK); };", "packed", WRONG),
    Mutation("tiles are those of the sequence before", PLACE,
        "i <= batch ? i - 1 : i,", "i <= batch ? (i > 1 ? i - 2 : 0) : i,", "packed", WRONG),
    Mutation("rows of no sequence are zeros wherever bounds fall", KERNEL,
        "if (!falls<Sequences>(p.sequences, p.batch, p.len_q)) return store", "return store",
        "bounds that fall", WRONG),
    Mutation("no block computes the tiles that the search has missed", KERNEL,
        "      if (!first) return;\n", "      return;\n", "bounds that fall", WRONG),
    Mutation("the next place is written over the one that is read", KERNEL,
        "      place = shared.place;\n      ptx::barrier();", "      place = shared.place;",
        "bounds that fall", NO_BARRIER),
    Mutation("the search looks at one lane's place", WORK,
        "best = other > best ? other : best;", "best = best;", "packed", "have exited"),
)
DOCUMENTS = (
    Mutation("the first key of a document is passed over", SEGMENTS,
        "seen.add(k, k + 1,", "seen.add(k + 1, k + 2,", "documents", WRONG),
    Mutation("the last key of a document is passed over", SEGMENTS,
        "word[1] = any ? k_end : word[1]", "word[1] = any ? k_end - 1 : word[1]",
        "documents", WRONG),
    Mutation("ids are equal if their low halves are", SEGMENTS,
        "(BYTES < 8 || differ() || id == one)", "true", "documents", WRONG),
    Mutation("a document is whole that comes again", SEGMENTS,
        "return matching == end - begin;", "return matching >= 0;", "documents", WRONG),
    Mutation("queries of several documents see the keys of all", SEGMENTS,
        "ids.differ() ? -1 : static", "static", "documents", WRONG),
    Mutation("a block goes by what its first warp has found", TEAM,
        "warp < WARPS", "warp < 1", "documents", WRONG),
    Mutation("warps read what others have not told", TEAM,
        "    ptx::barrier();  // every warp has told what it found\n", "", "documents", NO_BARRIER),
    Mutation("warps tell over what others still read", TEAM,
        "    ptx::barrier();  // every warp has read it\n", "", "documents", NO_BARRIER),
    Mutation("warps look with a mask that is not made", KERNEL,
        "  ptx::barrier();  // thread 0 has made the mask\n", "", "documents", NOWHERE),
    Mutation("warps walk before it is noted what they found", KERNEL,
        "  ptx::barrier();  // thread 0 has noted what they found\n", "", "documents", NO_BARRIER),
)
# fmt: on
ALL = DOCUMENTS + SYNCHRONISATION + MEMORY + LAYOUT + ARITHMETIC + MASKS + MODIFIERS
