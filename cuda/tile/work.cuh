// Which tile of the output is this block's: a query tile of one head of one batch entry.
#pragma once
#include "device.cuh"
#include "ptx/warp.cuh"

struct Work {
  int tile;  // query tile
  int head, batch;

  // Blocks run roughly in the order of their index. Heads go in groups whose K and V fit the L2 cache together; inside
  // a group the last query tiles come first, since under a causal mask they are the longest, and heads alternate
  // fastest.
  DEVICE Work(u32 block, int tiles, int heads, int batches, int group) {
    const u32 all_heads = static_cast<u32>(heads) * batches;
    const u32 per_group = static_cast<u32>(group) * tiles;
    const u32 first = block / per_group * group, rest = block % per_group;
    const u32 size = all_heads - first < static_cast<u32>(group) ? all_heads - first : group;
    const u32 flat_head = first + rest % size;
    tile = tiles - 1 - static_cast<int>(rest / size);
    head = static_cast<int>(flat_head % heads);
    batch = static_cast<int>(flat_head / heads);
  }
};

// The last i of [0, count) with at(i) <= x, where at does not fall and at(0) <= x. The lanes of a warp look at 32
// places at a time.
template <class At>
DEVICE int last_at_most(int x, int count, At at, u32 lane) {
  int step = 1, found = 0;
  while (count / 32 >= step) step *= 32;
  for (; step > 0; step /= 32) {
    const int i = found + static_cast<int>(lane) * step;
    u32 best = i < count && at(i) <= x ? i : found;
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) {
      const u32 other = ptx::shfl_xor(best, bit);
      best = other > best ? other : best;
    }
    found = best;
  }
  return found;
}
