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

// A divisor that is known before what it divides: the long part of a division comes first.
struct Divisor {
  u32 by, reciprocal;

  DEVICE explicit Divisor(u32 by) : by(by), reciprocal(ptx::opaque(0xffffffffu / by)) {}
  DEVICE u32 quotient(u32 x) const {
    const u32 below = static_cast<u32>(static_cast<u64>(x) * reciprocal >> 32);  // the quotient, or one less
    return below + (x - below * by >= by);
  }
};

// The same where tiles of a head follow one another and the first are the longest: from the first tile on, and the
// second half of a group's tiles alternates with the first half of the next group's, so that short tiles of one head do
// not all begin at once. There are `groups` + 1 phases: first halves alone, both, ..., second halves alone.
struct RollingOrder {
  u32 half, size, groups, last;                // tiles of a first half, heads of a group and of the last one
  u32 first, end;                              // blocks of the first phase, and before the last one
  Divisor heads, period;                       // of a batch entry; blocks of a phase with both halves
  Divisor alone, both, both_last, alone_last;  // heads that alternate in the phases

  DEVICE RollingOrder(int tiles, int heads_k, int batches, int group)
      : half((tiles + 1) / 2),
        size(min(group, heads_k * batches)),
        groups((heads_k * batches + size - 1) / size),
        last(heads_k * batches - (groups - 1) * size),
        first(size * half),
        end(static_cast<u32>(heads_k) * batches * tiles - last * (tiles - half)),
        heads(heads_k),
        period(size * tiles),
        alone(size),
        both(2 * size),
        both_last(size + last),
        alone_last(last) {}
};
struct RollingWork {
  int tile;
  int head, batch;

  DEVICE RollingWork(const RollingOrder &order, u32 block) {
    u32 phase = 0, rest = block;
    if (block >= order.end) {
      phase = order.groups, rest = block - order.end;
    } else if (block >= order.first) {
      rest -= order.first, phase = order.period.quotient(rest);
      rest -= phase * order.period.by, ++phase;
    }
    // Heads with first halves come before those with second halves, which are of the group before.
    const Divisor &heads = phase == order.groups       ? order.alone_last
                           : phase == 0                ? order.alone
                           : phase == order.groups - 1 ? order.both_last
                                                       : order.both;
    const u32 begin = phase == order.groups ? 0 : phase == order.groups - 1 ? order.last : order.size;
    const u32 step = heads.quotient(rest), at = rest - step * heads.by;
    const u32 flat_head = at < begin ? phase * order.size + at : (phase - 1) * order.size + at - begin;
    tile = static_cast<int>(at < begin ? step : order.half + step);
    batch = static_cast<int>(order.heads.quotient(flat_head));
    head = static_cast<int>(flat_head - batch * order.heads.by);
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
