"""Faults to plant in attention_bwd_dbias and what it is made of; see mutations.py."""

from cases import Modified
from mutations import WRONG, Mutation

KERNEL, SUM = "kernels/attention_bwd_dbias.cu", "kernels/attention_bwd_dbias_sum.cu"
STATISTICS = "kernels/attention_bwd_delta.cu"


def case(*names: str, dims: int = 80, dtype: str = "float16", **options: object) -> Modified:
    """Return a problem of two chunks a product and several tiles."""
    sizes = {"batch": 2, "heads_q": 4, "heads_k": 2} | options
    return Modified(150, 140, dims, dims, dtype, modifiers=names, **sizes)


# The problems that show the faults, each with the blocks that there may be: each is small, and
# right without them.
PROBLEMS = {
    "heads repeat": (case("bias_fp16", causal=True), 1),
    "batch entries repeat": (case("bias_bf16"), 1),
    "queries repeat": (case("bias_of_keys", causal=True), 1),
    "keys repeat": (case("bias_of_queries", window_size=(30, 9)), 1),
    "in parts": (case("bias_of_keys", causal=True), 64),
    "rows apart": (case("bias", dims=16), 1),
    "fp32": (case("bias_fp64", dtype="float32", batch=1), 1),
    "dropout": (case("bias_fp16", "dropout"), 1),
    "lengths in use": (case("bias_fp16", "used_q", "used_k", batch=5), 1),
    "packed": (
        Modified.varlen(
            ((70, 90), *((0, 3),) * 40, (150, 40), (5, 9)), 16, 16, "float16", heads_q=2,
            heads_k=1, modifiers=("bias_bf16",), tail=5,
        ),
        1,
    ),
}  # fmt: skip

IN_FLIGHT = "into which a copy is in flight"
NO_BARRIER = "and no barrier stands between"
AT_ANOTHER = "barrier, while other threads are at the barrier of"

# fmt: off
SYNCHRONISATION = (
    Mutation("the wait for a chunk leaves one group too many", KERNEL,
        "ptx::cp_async_wait<LEAD - 1>();", "ptx::cp_async_wait<LEAD>();",
        "heads repeat", IN_FLIGHT),
    Mutation("the barrier of a chunk is left out", KERNEL,
        "    ptx::barrier();  // every thread's part of the chunk has landed", "    // every",
        "heads repeat", NO_BARRIER),
    Mutation("a chunk's copies are not committed", KERNEL,
        "    ptx::cp_async_commit();  // also an", "    // also an",
        "heads repeat", IN_FLIGHT),
    Mutation("chunks land in the slot that is read", KERNEL,
        "(slot + LEAD) % STAGES", "slot", "heads repeat", IN_FLIGHT),
    Mutation("fp32: the barrier before a chunk is split is left out", KERNEL,
        "    ptx::barrier();  // every warp has read the slot\n", "", "fp32", NO_BARRIER),
    Mutation("fp32: the barrier after a chunk is split is left out", KERNEL,
        "    ptx::barrier();  // every thread's part of the chunk is split", "",
        "fp32", NO_BARRIER),
    Mutation("the barrier before the walk is left out", KERNEL,
        "  ptx::barrier();  // thread 0 has written", "  // thread 0 has written",
        "heads repeat", NO_BARRIER),
    Mutation("the barrier after the first steps is left out", KERNEL,
        "  ptx::barrier();  // the first two steps", "  // the first two steps",
        "heads repeat", NO_BARRIER),
    Mutation("a step is written over the one before", KERNEL,
        "Step &to = shared.step[i % RING];", "Step &to = shared.step[i % 2];",
        "heads repeat", NO_BARRIER),
    Mutation("the statistics of all steps have one place", KERNEL,
        "load_statistics(p, shared.statistics[i % 2]", "load_statistics(p, shared.statistics[0]",
        "heads repeat", IN_FLIGHT),
    Mutation("the barrier before the sums are staged is left out", KERNEL,
        "  ptx::barrier();  // the sums lie over", "  // the sums lie over",
        "heads repeat", NO_BARRIER),
    Mutation("the barrier before staged sums are read is left out", KERNEL,
        "  ptx::barrier();  // every warp's rows", "  // every warp's rows",
        "heads repeat", NO_BARRIER),
    Mutation("the barrier after columns are summed is left out", KERNEL,
        "    ptx::barrier();  // every column's sum", "    // every column's sum",
        "queries repeat", NO_BARRIER),
    Mutation("parts of a sum overwrite each other", KERNEL,
        "p.block_splits + part.block_part) * p.batches",
        "p.block_splits + 0 * part.block_part) * p.batches", "in parts", WRONG),
    Mutation("two threads make one element of a sum", SUM,
        "dbias_sum::THREADS + threadIdx.x;", "dbias_sum::THREADS + threadIdx.x / 2;",
        "in parts", WRONG),
)
MEMORY = (
    Mutation("columns past the last are written", KERNEL,
        "    if (column >= width) continue;\n", "", "heads repeat", "a store of "),
    Mutation("rows past the last are written", KERNEL,
        "const int height = min(p.rows - part.q_begin, BLOCK_Q)", "const int height = BLOCK_Q",
        "heads repeat", "a store of "),
    Mutation("the LSE of rows that are not there is read", KERNEL,
        "  const bool used = row < step.len_q - step.q_begin;\n", "  const bool used = true;\n",
        "heads repeat", "cp.async of 4 bytes at lse"),
    Mutation("rows of the next sequence are read", KERNEL,
        "const int queries = step.len_q - step.q_begin,", "const int queries = BLOCK_Q,",
        "rows apart", "cp.async of "),
)
WALK = (
    Mutation("a step is prepared twice", KERNEL,
        "prepare(p, shared, i + 2", "prepare(p, shared, i + 1", "heads repeat", WRONG),
    Mutation("the last entry is left out", KERNEL,
        "min(first + most, entries), 0", "min(first + most, entries - 1), 0",
        "heads repeat", WRONG),
    Mutation("every step but an entry's first is left out", KERNEL,
        "if (cursor.q < cursor.q_end) {", "if (cursor.q < 0) {", "queries repeat", WRONG),
    Mutation("only the first 32 entries are looked at", KERNEL,
        "first < cursor.entry_end; first += 32", "first < cursor.entry + 1; first += 32",
        "packed", WRONG),
    Mutation("the first entry of 32 is passed over", KERNEL,
        "other < best ? other : best", "other > best ? other : best", "packed", WRONG),
    Mutation("blocks of keys begin again where the queries do", KERNEL,
        "cursor.k = cursor.k_first", "cursor.k = cursor.q", "queries repeat", WRONG),
    Mutation("parts of an entry overlap by a block", KERNEL,
        "end = min(begin + most, blocks)", "end = min(begin + most + 1, blocks)",
        "in parts", WRONG),
    Mutation("heads of a group read another head of K", KERNEL,
        "head / (p.heads_q / p.heads_k)", "head % p.heads_k", "heads repeat", WRONG),
    Mutation("batch entries that repeat read the first one's K", KERNEL,
        "p.k + start_of<Sequences>(k, batch,", "p.k + start_of<Sequences>(k, 0,",
        "batch entries repeat", WRONG),
    Mutation("the rows of delta do not move with those of Q", KERNEL,
        "step.lse_row += rows, step.stat_row += rows;", "step.lse_row += rows;",
        "queries repeat", WRONG),
)
ARITHMETIC = (
    Mutation("the sum is that of the last step", KERNEL,
        "sum.x[r / 2][n][i] += score", "sum.x[r / 2][n][i] = score", "heads repeat", WRONG),
    Mutation("dP is not initialised anew", KERNEL,
        "    dp.zero();\n", "    dp = s;\n", "heads repeat", WRONG),
    Mutation("keys beyond the last count", KERNEL,
        " & key < step.len_k;", ";", "lengths in use", WRONG),
    Mutation("a tile is taken for whole at the end of the keys", KERNEL,
        "if (k_end <= step.len_k && ", "if (", "lengths in use", WRONG),
    Mutation("delta is forgotten", KERNEL,
        "factor, -delta);", "factor, 0.0f);", "heads repeat", WRONG),
    Mutation("what dropout keeps is not rescaled", KERNEL,
        "const float factor = rescale(dropout);", "const float factor = 1.0f;",
        "dropout", WRONG),
    Mutation("half of the keys are dropped as the others are", KERNEL,
        "drop<32>(dp, dropout, step.q_begin + first_row, step.k_begin, first, lane);",
        "drop<32>(dp, dropout, step.q_begin + first_row, step.k_begin - first, first, lane);",
        "dropout", WRONG),
    Mutation("a row's sum is that of two lanes of four", KERNEL,
        "      total[r] += ptx::shfl_xor(total[r], 2);\n", "", "keys repeat", WRONG),
    Mutation("a row of a tile is left out of the columns' sums", KERNEL,
        "for (int r = 0; r < BLOCK_Q; ++r) total", "for (int r = 1; r < BLOCK_Q; ++r) total",
        "queries repeat", WRONG),
    Mutation("a part is left out of the sum", SUM,
        "int split = 0; split < p.splits", "int split = 1; split < p.splits", "in parts", WRONG),
    Mutation("the gradient of the LSE is forgotten", STATISTICS,
        "product - sums.dlse", "product", "heads repeat", WRONG),
)
# fmt: on
ALL = SYNCHRONISATION + MEMORY + WALK + ARITHMETIC
