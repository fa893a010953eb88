"""The host's side of cuda/kernels/attention_bwd_sm90.cu and its wide form: what they take, steps.

A block of keys sums what it adds to dQ into an accumulator in fp32, whose blocks of queries lie in
the order of the fragments of the tensor cores; attention_bwd_dq_sm90 brings them into rows.
"""

import dataclasses
import struct
from dataclasses import dataclass
from typing import NamedTuple

from . import _backward_delta, _backward_dsink, _unit
from ._backward_delta import STAT_ROWS, stat_heads, stat_rows
from ._backward_shared import Scratch, key_tiles, without_sink
from ._forward import refuse_dtype, refuse_lengths
from ._launch import Launch, Steps
from ._modifiers import LOG2_E, SIZES, pack, pack_sequences, places, policies
from ._problem import Operands, Problem
from ._problem_backward import Backward
from ._sm90 import padded, refuse_dims, refuse_strides, tensor_maps
from ._tensor_map import BYTES

__all__ = ["DTYPES", "NAME", "config", "refusal", "steps"]

NAME = "attention_bwd_sm90"
WIDE = "attention_bwd_wide_sm90"  # its form for the widest head dims
CONVERT = "attention_bwd_dq_sm90"
TYPES = {"float16": "Float16", "bfloat16": "Bfloat16"}
DTYPES: tuple[str, ...] = tuple(TYPES)
CLASSES = (64, 128, 256)  # of head dims; what is less is zeros that TMA reads outside the arrays
MODIFIERS = ("softcap", "alibi_slopes", "attn_bias", "dropout_p")  # that act on scores by pairs
SMALL_MASK = 16  # bytes of a mask that registers hold
MAX_BLOCKS = 2**31 - 1
CONSUMERS = 2  # warpgroups that compute

# After the six maps: 3 + 3 pointers, strides of dk, dv and dq, 12 integers, the scales.
PARAMS = struct.Struct("<6Q9q12i2f")
MAPS = ("q", "dout", "k", "v", "dk", "dv")
OFFSET = len(MAPS) * BYTES
POLICIES_OFFSET = OFFSET + PARAMS.size
POINTERS = ("dk", "dv", "dq")  # whose addresses come first
SCRATCH = ("lse", "delta", "dq")  # and those that follow
ROWS_STORED = 64  # of a copy of dk and dv
L2_BYTES = 32 << 20  # what blocks under way may share
GROUP_OF_TILES = 4  # heads of a group for each block of keys of one, at most
MOST_SHARES = 9  # of a walk
MULTIPROCESSORS = 132  # of an H200
FEW_BLOCKS = 4 * MULTIPROCESSORS  # that an H200 runs in four turns
CONVERT_PARAMS = struct.Struct("<3Q3q5if")
CONVERT_SCRATCH = ("dq", "added")  # whose addresses come first


@dataclass(frozen=True)
class BackwardSm90:
    """``struct Config`` of attention_bwd_sm90, and what follows from it."""

    t: str
    mask: str
    score: str
    dropout: str
    sink: str
    sequences: str
    head_dim: int
    block_q: int
    deterministic: bool
    splits: bool
    finishes: bool
    params_bytes: int
    smem_bytes: int

    @property
    def block_k(self) -> int:
        """Keys of a block."""
        return 64 if self.head_dim > 128 else 128

    @property
    def threads(self) -> int:
        """Threads of a block: a warpgroup that loads, and two that compute."""
        return 384

    @property
    def min_blocks(self) -> int:
        """Blocks that registers must leave room for."""
        return 1


@dataclass(frozen=True)
class Convert:
    """``struct Config`` of attention_bwd_dq_sm90."""

    t: str
    sequences: str
    head_dim: int
    params_bytes: int


def refusal(problem: Problem) -> str | None:
    """Return why the kernel does not take a problem, as the rest of a sentence, or None."""
    return (
        refuse_dtype(problem, DTYPES)
        or refuse_dims(problem)
        or _refuse_modifiers(problem)
        or _refuse_memory(problem)
        or refuse_lengths(problem)
        or _refuse_blocks(problem)
    )


def _refuse_modifiers(problem: Problem) -> str | None:
    for name in MODIFIERS:
        if name in problem.modifiers:
            return f"takes no {', '.join(MODIFIERS)}, got {name}"
    if policies(problem).mask_bytes > SMALL_MASK:
        return "takes masks of a band alone, got one that reads arrays"
    if problem.packed and problem.batch == 0 and not problem.empty:
        return "needs a sequence, got none"
    return None


def _refuse_memory(problem: Problem) -> str | None:
    """Return why no tensor maps describe the arrays, or None."""
    if problem.empty:
        return "needs queries, got none"
    if problem.len_k == 0:
        return "needs keys, got len_k 0"
    return refuse_strides(problem, "q, k, v, out and dout")


def _refuse_blocks(problem: Problem) -> str | None:
    if (count := key_tiles(problem, config(problem).block_k)) > MAX_BLOCKS:
        return f"launches at most {MAX_BLOCKS} blocks, this needs {count}"
    return None


def _heads_per_group(problem: Problem, block_k: int) -> int:
    """Return how many kv heads share the L2 cache.

    Blocks of one length need no groups, but where they wait for each other: see the page on the
    kernel.
    """
    if not problem.band.bounded and not problem.deterministic:
        return 1
    there = problem.heads_k * (1 if problem.packed else problem.batch)
    if key_tiles(problem, block_k) <= FEW_BLOCKS:  # the last to begin are the shortest of all
        return there
    # Of a query q and dout, and dq in fp32; of a key k and v.
    per_query = problem.heads_q // problem.heads_k * (8 * problem.head_dim)
    per_key = 4 * problem.head_dim
    size = problem.len_q * per_query + problem.len_k * per_key
    fit = max(1, L2_BYTES // size)
    if problem.deterministic and not problem.band.bounded:  # halves of two groups are under way
        fit = max(1, fit // 2)
    elif problem.deterministic and size <= L2_BYTES:
        fit = max(fit, 2)  # few blocks of one head wait
    tiles = -(-problem.len_k // block_k)
    return min(1 << (fit.bit_length() - 1), GROUP_OF_TILES * tiles, there)


def _is_faster_in_order(problem: Problem) -> bool:
    """Return whether dQ is summed sooner in a fixed order, which nobody need have asked for.

    Under a causal mask, microseconds in order and not, H200: head dim 64 at 512, 1k, 2k and 4k
    424 and 443, 568 and 586, 886 and 902, 1569 and 1487; 128 at 512, 1k, 2k and 4k 355 and 369,
    494 and 500, 767 and 752, 1379 and 1344; 16 heads of 2, head dim 128, at 2k and 8k 830 and 895,
    2859 and 3024. Without a mask, head dim 64 at 1k and 2k 829 and 837, 1428 and 1440, at 512 only
    as the last part makes dQ, 514 and 528; 128 at 512 and 1k 503 and 453, 746 and 725.
    """
    chosen = config(problem)
    if problem.packed or chosen.head_dim > 128:
        return False
    if chosen.mask == "Band<false, true>":
        shared = problem.heads_q >= 4 * problem.heads_k
        return shared or problem.len_k <= (2048 if chosen.head_dim == 64 else 1024)
    return chosen.mask == "Band<false, false>" and chosen.head_dim == 64 and problem.len_k <= 2048


def _finishes(problem: Problem) -> bool:
    """Return whether the block whose keys are the last that a query sees makes its dQ.

    It must have an order, and each query a key. That spares the conversion and costs a longer
    step: microseconds with and without a conversion, in order, H200: head dim 64 at 512, 1k and 2k
    causal 392 and 430, 542 and 567, 859 and 860, full 514 and 560, 788 and 819, 1494 and 1504, at
    8k causal 3048 and 2885; 128 at 512, 1k and 2k causal 317 and 360, 456 and 484, 789 and 765, at
    512 and 1k full 446 and 501, 757 and 748.
    """
    chosen = policies(problem)
    if chosen.mask not in ("Band<false, false>", "Band<false, true>"):
        return False
    if not problem.deterministic or chosen.sequences != "Dense":
        return False
    band, causal = problem.band, problem.band.right is not None
    shift = problem.len_k - problem.len_q if band.alignment == "bottom_right" else 0
    if band.right is not None and shift + band.right < 0:
        return False
    widest = max(problem.head_dim, problem.head_dim_v)
    longest = 2048 if widest <= 64 else (1024 if causal else 512) if widest <= 128 else 0
    return problem.len_k <= longest


class Split(NamedTuple):
    """The last blocks of keys that have several blocks each, which share their walk."""

    walks: int = 0
    shares: int = 1

    @property
    def more(self) -> int:
        """Blocks that there are for it."""
        return self.walks * (self.shares - 1)


def _split(problem: Problem) -> Split:
    """Return which walks are shared.

    Without a mask all are as long, and those of the last turn of the multiprocessors, of which some
    have none, may be the whole of a turn too many: 68 of 2048 at 16k tokens of 16 heads. A block
    costs as much as 3 steps beside them, a share 8. Microseconds with and without, H200: head dim
    128 at 2k and 8k 1301 and 1295, 4574 and 4628; 64 at 8k 5125 and 5201.
    """
    chosen = policies(without_sink(problem))
    widest = max(problem.head_dim, problem.head_dim_v)
    there = key_tiles(problem, 128)
    if (
        problem.deterministic
        or (chosen.mask, chosen.sequences) != ("Band<false, false>", "Dense")
        or widest > 128
        or there > 64 * MULTIPROCESSORS
    ):
        return Split()
    steps = problem.heads_q // problem.heads_k * -(-problem.len_q // (128 if widest <= 64 else 64))
    walks = there % MULTIPROCESSORS

    def time(shares: int) -> float:
        return -(-walks * shares // MULTIPROCESSORS) * (steps / shares + (8 if shares > 1 else 3))

    shares = min(range(1, min(MOST_SHARES, steps) + 1), key=time, default=1)
    return Split(walks, shares) if walks and shares > 1 else Split()


def config(problem: Problem) -> BackwardSm90:
    """Return the configuration that the unit of a problem is rendered from."""
    chosen = policies(without_sink(problem))
    widest = max(problem.head_dim, problem.head_dim_v)
    head_dim = next(size for size in CLASSES if size >= widest)
    return BackwardSm90(
        t=TYPES[problem.dtype],
        mask=chosen.mask,
        score=chosen.score,
        dropout=chosen.dropout,
        sink=chosen.sink,
        sequences=chosen.sequences,
        head_dim=head_dim,
        block_q=128 if head_dim == 64 else 64,
        deterministic=problem.deterministic,
        splits=_split(problem).walks > 0,
        finishes=_finishes(problem),
        params_bytes=padded(POLICIES_OFFSET + chosen.params_bytes + 24),
        smem_bytes=_shared_bytes(head_dim),
    )


def _shared_bytes(head_dim: int) -> int:
    """Return ``sizeof(Shared)`` of either kernel."""
    block_q, block_k = 128 if head_dim == 64 else 64, 64 if head_dim > 128 else 128
    tiles = 2 * (2 * block_k + 4 * block_q) * head_dim + 2 * 2 * block_k * block_q
    passed = 64 * 64 * 4 if head_dim > 128 else 2 * 64 * 64 * 4
    return tiles + passed + 4 * 4 * block_q + 1024  # the barriers, padded to a panel's alignment


def steps(problem: Problem, operands: Operands, backward: Backward) -> Steps:
    """Return the steps of a problem."""
    if _is_faster_in_order(problem):
        problem = dataclasses.replace(problem, deterministic=True)
    chosen = config(problem)
    wide = chosen.head_dim > 128
    split = _split(problem)
    scratch = Scratch.of(
        problem,
        chosen.head_dim,
        counted=not wide or problem.deterministic,
        more=1 + CONSUMERS * split.walks,
        partial=(split.walks + split.more) * 2 * 4 * chosen.block_k * chosen.head_dim,
    )
    first = _backward_delta.launch(
        problem,
        operands,
        backward,
        lse=scratch.lse,
        delta=scratch.delta,
        dq=scratch.dq if wide else None,  # else what is first there is stored
        dq_columns=chosen.head_dim,
        added=scratch.added,
        more=1 + CONSUMERS * split.walks,
    )
    bare = operands._replace(learnable_sink=None)
    main = _main(without_sink(problem), bare, backward, chosen, scratch)
    launches = [first, main]
    if not chosen.finishes:
        launches.append(_convert(problem, operands, backward, chosen, scratch))
    if "dsink" in problem.wanted:
        statistics = {"lse": scratch.lse, "delta": scratch.delta}
        launches.append(_backward_dsink.launch(problem, operands, backward, **statistics))
    return Steps(scratch.size, tuple(launches))


def _main(
    problem: Problem,
    operands: Operands,
    backward: Backward,
    chosen: BackwardSm90,
    scratch: Scratch,
) -> Launch:
    symbol = WIDE if chosen.head_dim > 128 else NAME
    blocks, split = key_tiles(problem, chosen.block_k), _split(problem)
    params = (
        bytes(OFFSET)
        + PARAMS.pack(
            backward.dk.pointer,
            backward.dv.pointer,
            backward.dq.pointer,
            *[0] * len(SCRATCH),
            *backward.dk.strides[:3],
            *backward.dv.strides[:3],
            *backward.dq.strides[:3],
            problem.batch,
            problem.len_q,
            problem.len_k,
            problem.heads_q,
            problem.heads_k,
            problem.head_dim,
            problem.head_dim_v,
            stat_rows(problem),
            _heads_per_group(problem, chosen.block_k),
            problem.heads_q // problem.heads_k,
            blocks - split.walks,
            split.shares,
            problem.scale * LOG2_E,
            problem.scale,
        )
        + pack(problem, operands)
    )
    arrays = (operands.q, backward.dout, operands.k, operands.v, backward.dk, backward.dv)
    rows = (*[chosen.block_q] * 2, *[chosen.block_k] * 2, *[ROWS_STORED] * 2)
    named = [(name, BYTES * n) for n, name in enumerate(MAPS)]
    named += [(name, OFFSET + 8 * n) for n, name in enumerate(POINTERS)]
    parts = [
        (OFFSET + 8 * (len(POINTERS) + n), getattr(scratch, name)) for n, name in enumerate(SCRATCH)
    ]
    # Last of all, so that no other place depends on them.
    if chosen.splits:
        parts += [(len(params), scratch.partial), (len(params) + 8, scratch.more + 4)]
    parts.append((len(params) + 16, scratch.added))
    return Launch(
        unit=_unit.render(symbol, chosen),
        symbol=symbol,
        arch=f"sm_{problem.arch}a",  # "a": with the instructions that no other architecture has
        grid=(blocks + split.more, 1, 1),
        block=(chosen.threads, 1, 1),
        shared_bytes=chosen.smem_bytes,
        params=params.ljust(chosen.params_bytes, b"\0"),
        maps=tensor_maps(arrays, rows),
        places=(*named, *places(problem, operands, POLICIES_OFFSET)),
        scratch=tuple((at, part) for at, part in parts if part is not None),
    )


def _convert(
    problem: Problem,
    operands: Operands,
    backward: Backward,
    chosen: BackwardSm90,
    scratch: Scratch,
) -> Launch:
    sequences, where = pack_sequences(problem, operands, CONVERT_PARAMS.size)
    params = CONVERT_PARAMS.pack(
        *[0] * len(CONVERT_SCRATCH),
        backward.dq.pointer,
        *backward.dq.strides[:3],
        problem.batch,
        problem.len_q,
        problem.heads_q,
        problem.head_dim,
        stat_rows(problem),
        problem.scale,
    )
    unit = Convert(
        t=chosen.t,
        sequences=chosen.sequences,
        head_dim=chosen.head_dim,
        params_bytes=CONVERT_PARAMS.size + SIZES[chosen.sequences],
    )
    parts = [(8 * n, getattr(scratch, name)) for n, name in enumerate(CONVERT_SCRATCH)]
    if chosen.head_dim > 128:  # whose sums are all there
        parts = parts[:1]
    return Launch(
        unit=_unit.render(CONVERT, unit),
        symbol=CONVERT,
        arch=f"sm_{problem.arch}",
        grid=(stat_heads(problem) * stat_rows(problem) // STAT_ROWS, 1, 1),
        block=(256, 1, 1),
        shared_bytes=0,
        params=params + sequences,
        places=(("dq", 8 * len(CONVERT_SCRATCH)), *where),
        scratch=tuple((at, part) for at, part in parts if part is not None),
    )
