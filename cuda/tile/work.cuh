// Which tile of the output is this block's: a query tile of one head of one batch entry.
#pragma once
#include "device.cuh"

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
