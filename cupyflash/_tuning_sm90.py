"""Tile table of attention_fwd_sm90, and the measurements that chose its sizes."""

import dataclasses
from dataclasses import dataclass

from ._array import ITEMSIZES
from ._modifiers import Policies

__all__ = [
    "EIGHT", "HALF", "HEAD_DIMS", "ForwardSm90", "Tiles", "count", "extent", "forward_sm90",
    "head_dim_classes", "row_bytes",
]  # fmt: skip

# Classes of head dims: an array's own is padded to the next of these by the zeros that TMA reads
# outside it. Pairs of 16-bit elements that are not in the table have no tiles.
HEAD_DIMS = (64, 96, 128, 192, 256)
PANEL = 128  # bytes of a row of a panel in shared memory
KEPT = 1024  # bytes of shared memory for what modifies the scores of the tiles under way
SMALL_MASK = 16  # bytes of a mask that registers hold
DRAWN = 32  # keys that one draw of random bits reaches over


@dataclass(frozen=True)
class Tiles:
    """How a block of attention_fwd_sm90 divides its work and its shared memory."""

    block_k: int  # keys of a block
    consumers: int  # warpgroups that compute, 64 rows each
    k_stages: int  # blocks of K in shared memory at a time
    v_stages: int
    q_buffers: int  # 2: the next tile's Q is loaded while this one is computed
    turns: bool = False  # consumers issue their products in turn; of 8 bits, they weigh in turn
    landings: int = 0  # blocks of V that wait to be transposed; 8-bit elements only
    parts: int = 1  # in which a product is added to O in fp32; 8-bit elements only


@dataclass(frozen=True)
class ForwardSm90:
    """``struct Config`` of attention_fwd_sm90, and what follows from it."""

    t: str
    mask: str
    score: str
    dropout: str
    sink: str
    sequences: str
    head_dim: int
    head_dim_v: int
    block_k: int
    consumers: int
    k_stages: int
    v_stages: int
    q_buffers: int
    turns: bool
    landings: int
    parts: int
    params_bytes: int
    smem_bytes: int

    @property
    def block_q(self) -> int:
        """Rows of a tile of the output."""
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        """Threads of a block: a warpgroup that loads, and those that compute."""
        return 128 * (1 + self.consumers)

    @property
    def min_blocks(self) -> int:
        """Blocks that registers must leave room for."""
        return 1


# By the classes of the head dims, first by those and the `extent` of a problem.
Table = dict[tuple[int, int] | tuple[int, int, str], Tiles]
SHORT, LONG = 512, 4096

# TFLOP/s on an H200, CUDA 13.0, bfloat16, 16k tokens, heads * head_dim = 2048, full and causal;
# others of the same run in brackets.
HALF: Table = {
    # S 1024: 521 418; 4096: 571 529 (128 keys, 3 consumers 480 352; 563 505)
    (64, 64): Tiles(64, 4, 6, 6, 2),
    (64, 64, "long"): Tiles(128, 3, 4, 4, 2),  # S 8192 full: 560 (64 keys, 4 consumers 552)
    (96, 96): Tiles(128, 2, 2, 2, 2),
    # S 512: 552 361 (128 and 64 keys, 2 consumers 539 334); 8192: 729 724 (128 keys 692 689)
    (128, 128): Tiles(64, 3, 4, 4, 2),
    (64, 128): Tiles(128, 2, 2, 2, 2),
    (192, 128): Tiles(128, 2, 2, 2, 1),  # S 8192: 743 700 (96 keys, 2 buffers of Q 722 667)
    (192, 192): Tiles(80, 2, 2, 2, 1),
    (256, 256): Tiles(64, 2, 2, 3, 1),  # S 8192: 750 696 (3 + 2 stages 735 695; 80 keys 733 689)
}
# Where one modifier acts on the scores, or a sink on packed sequences: the same but for these.
HALF_MODIFIED: Table = {
    (64, 64): Tiles(128, 3, 4, 4, 2),
    (64, 64, "short"): Tiles(64, 3, 6, 6, 2),
    (128, 128): Tiles(128, 2, 3, 2, 2),
    (128, 128, "short"): Tiles(64, 2, 4, 4, 2),
    (192, 128): Tiles(96, 2, 2, 2, 2),
    (256, 256): Tiles(64, 2, 3, 2, 1),
}
# Where scores are capped alone.
HALF_CAPPED: Table = {
    (128, 128): Tiles(64, 3, 4, 4, 2),  # S 4096, causal: 499 (128 keys, 2 consumers in turns 476)
    (128, 128, "long"): Tiles(128, 2, 3, 2, 2, turns=True),  # S 8192: 566 (500 without turns)
}

# 8-bit elements; what lies between two of these classes is padded to the larger, with its partner.
# TFLOP/s at S 8192 full and causal, as above.
EIGHT: Table = {
    (64, 64): Tiles(192, 3, 3, 3, 2, landings=2),  # 671 631 (160 keys 593 573, 128 586 556)
    # 930 895 (without turns 875 834; 2 consumers, 224 keys 866 826)
    (128, 128): Tiles(128, 3, 3, 3, 2, landings=3, turns=True, parts=2),
    # 1041 981 (without turns 1025 940; 8 parts 973 906)
    (256, 256): Tiles(128, 2, 2, 2, 1, landings=2, turns=True, parts=4),
}
# Where registers also hold what several modifiers, a bias or a mask of arrays need.
HALF_HEAVY: Table = {
    (64, 64): Tiles(64, 3, 6, 6, 2),
    (96, 96): Tiles(64, 2, 4, 4, 2),
    (128, 128): Tiles(64, 2, 4, 4, 2),
    (64, 128): Tiles(64, 2, 4, 4, 2),
    (192, 128): Tiles(64, 2, 3, 3, 2),
    (192, 192): Tiles(32, 2, 4, 4, 1),
    (256, 256): Tiles(32, 2, 4, 4, 1),
}
EIGHT_HEAVY: Table = {
    (64, 64): Tiles(160, 3, 3, 3, 2, landings=2),
    (128, 128): Tiles(96, 3, 3, 3, 2, landings=3, turns=True, parts=2),
    (256, 256): Tiles(96, 2, 2, 2, 1, landings=2, turns=True, parts=4),
}
TYPES = {
    "float16": "Float16",
    "bfloat16": "Bfloat16",
    "float8_e4m3fn": "Float8E4m3",
    "float8_e5m2": "Float8E5m2",
}


def head_dim_classes(dtype: str, head_dim: int, head_dim_v: int) -> tuple[int, int] | None:
    """Return the classes that two head dims are compiled for, or None if there are no tiles."""
    if ITEMSIZES[dtype] == 1:
        holding = [dims[:2] for dims in EIGHT if dims[0] >= head_dim and dims[1] >= head_dim_v]
        return min(holding, default=None)
    pair = [
        next((size for size in HEAD_DIMS if size >= dim > 0), 0) for dim in (head_dim, head_dim_v)
    ]
    classes = (pair[0], pair[1])
    return classes if classes in HALF else None


def shared_bytes(dtype: str, head_dim: int, head_dim_v: int, tiles: Tiles) -> int:
    """Return ``sizeof(Shared)`` of attention_fwd_sm90."""
    itemsize = ITEMSIZES[dtype]
    row_k, row_v = row_bytes(itemsize * head_dim), row_bytes(itemsize * head_dim_v)
    q = tiles.q_buffers * 64 * tiles.consumers * row_k
    k, v = tiles.k_stages * tiles.block_k * row_k, tiles.block_k * row_v
    if itemsize > 1:
        return q + k + tiles.v_stages * v + 1024  # the barriers, padded to a panel's alignment
    transposed = head_dim_v * tiles.block_k
    return q + k + tiles.v_stages * transposed + tiles.landings * v + 2048


def extent(longest: int, *, bounded: bool) -> str:
    """Return the class of a problem by the length of its longest sequence and its mask.

    "short" under a mask that has a bound, where smaller key blocks waste less of the diagonal;
    "long" without one; else "".
    """
    if bounded:
        return "short" if longest <= SHORT else ""
    return "long" if longest > LONG else ""


def count(policies: Policies) -> int:
    """Return how many policies need registers."""
    modifiers = sum(name in policies.score for name in ("Softcap", "Alibi", "Bias"))
    return modifiers + (policies.mask_bytes > SMALL_MASK) + (policies.dropout != "KeepAll")


def _is_heavy(policies: Policies, head_dim: int, *, eight: bool) -> bool:
    """Return whether the policies of a kernel need registers that larger tiles do not leave."""
    if eight:
        return policies.mask_bytes > SMALL_MASK or count(policies) > 1
    # Scores that are modified quickly, which the kernel does up to head dim 128.
    limit = {"Softcap": 128, "Alibi": 64}.get(policies.score, 0)
    if policies.sequences == "Packed" and head_dim <= limit:
        return True
    if count(policies) > 1:
        return True
    masks = policies.mask_bytes > SMALL_MASK
    return masks if head_dim <= 64 else head_dim > 128 and (masks or "Bias" in policies.score)


def row_bytes(size: int) -> int:
    """Return the bytes of a tile's row of so many, in whole panels."""
    return -(-size // PANEL) * PANEL


def forward_sm90(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    *,
    policies: Policies,
    extent: str,
    params_bytes: int,
) -> ForwardSm90:
    """Return the configuration of attention_fwd_sm90.

    Parameters
    ----------
    dtype : str
        Element type, of `TYPES`.
    head_dim, head_dim_v : int
        The arrays' own, for which there are classes.
    policies : Policies
        The CUDA types of what acts on the scores.
    extent : str
        What `extent` returns.
    params_bytes : int
        Bytes of Params.
    """
    dims = head_dim_classes(dtype, head_dim, head_dim_v)
    assert dims is not None, f"no tiles for head dims {head_dim} and {head_dim_v}"
    eight = ITEMSIZES[dtype] == 1
    light = policies.dropout == "KeepAll" and policies.mask_bytes <= SMALL_MASK
    plain = light and policies.score == "Identity"
    heavy = _is_heavy(policies, max(dims), eight=eight)
    modified = not plain or (policies.sink != "NoSink" and policies.sequences == "Packed")
    half = HALF_HEAVY if heavy else HALF | HALF_MODIFIED if modified else HALF
    if policies.score == "Softcap" and not heavy:
        half |= HALF_CAPPED
    table = (EIGHT_HEAVY if heavy else EIGHT) if eight else half
    tiles = table.get((*dims, extent)) or table[dims]
    if "Segments" in policies.mask:  # three leave no registers to the warp that looks at ids
        tiles = dataclasses.replace(tiles, consumers=2)
    if policies.dropout != "KeepAll":  # random bits come for so many keys at a time
        tiles = dataclasses.replace(tiles, block_k=tiles.block_k // DRAWN * DRAWN)
    return ForwardSm90(
        t=TYPES[dtype],
        mask=policies.mask,
        score=policies.score,
        dropout=policies.dropout,
        sink=policies.sink,
        sequences=policies.sequences,
        head_dim=dims[0],
        head_dim_v=dims[1],
        **dataclasses.asdict(tiles),
        params_bytes=params_bytes,
        smem_bytes=shared_bytes(dtype, *dims, tiles) + (0 if plain else KEPT),
    )
