// Which tile of the output is this block's: a query tile of one head of one batch entry.
#pragma once
#include "device.cuh"
#include "ptx/warp.cuh"

struct Work {
  int tile;  // query tile
  int head, batch;

  // Blocks run roughly in the order of their index. Heads go in groups that share the L2 cache; inside a group the last
  // query tiles come first, since under a causal mask they are the longest, and heads alternate fastest.
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

// The same where tiles of a head follow one another and the first are the longest: from the first tile on, and the
// second half of a group's tiles alternates with the first half of the next group's, so that short tiles of one head do
// not all begin at once. There are `groups` + 1 phases: first halves alone, both, ..., second halves alone.
struct RollingWork {
  int tile;
  int head, batch;

  DEVICE RollingWork(u32 block, int tiles, int heads, int batches, int group) {
    const u32 all_heads = static_cast<u32>(heads) * batches, size = group, half = (tiles + 1) / 2;
    const u32 groups = (all_heads + size - 1) / size,
              last = all_heads - (groups - 1) * size;  // heads of the last group
    const u32 first = min(size, all_heads) * half, end = all_heads * tiles - last * (tiles - half);
    u32 phase, rest;
    if (block >= end) {
      phase = groups, rest = block - end;
    } else if (block < first) {
      phase = 0, rest = block;
    } else {
      phase = 1 + (block - first) / (size * tiles), rest = (block - first) % (size * tiles);
    }
    const u32 begun = phase > 0 ? min(size, all_heads - (phase - 1) * size) : 0;  // heads with second halves
    const u32 begin = phase < groups ? min(size, all_heads - phase * size) : 0;   // and with first halves
    const u32 step = rest / (begin + begun), at = rest % (begin + begun);
    const u32 flat_head = at < begin ? phase * size + at : (phase - 1) * size + at - begin;
    tile = static_cast<int>(at < begin ? step : half + step);
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
