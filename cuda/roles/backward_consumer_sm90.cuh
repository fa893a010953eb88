// What the consumer warpgroups of attention_bwd_sm90 have in common. Scores and what comes of them are transposed: a
// row for each key.
#pragma once
#include "ptx/atomic.cuh"
#include "ptx/bulk.cuh"
#include "ptx/group.cuh"
#include "ptx/math.cuh"
#include "roles/backward_sm90.cuh"
#include "tile/output.cuh"

namespace backward {

constexpr u32 FIRST_TURN = 2, FIRST_EPILOGUE = 4, BOTH = 6;  // named barriers

struct alignas(8) Pair {
  float even, odd;
};
struct alignas(16) Four {
  float x[4];
};

// The four numbers of a thread in a chunk of 8 columns.
template <int N>
DEVICE Four four(const Accumulator<N> &sum, int chunk) {
  return {{sum.x[4 * chunk], sum.x[4 * chunk + 1], sum.x[4 * chunk + 2], sum.x[4 * chunk + 3]}};
}

// Adds such numbers.
template <int N>
DEVICE void add(Accumulator<N> &sum, int chunk, const Four &x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sum.x[4 * chunk + i] += x.x[i];
}

// A consumer, as one of its four warps.
struct Consumer {
  const Params &p;
  Shared &shared;
  const int group, warp;
  u32 number = 0;  // of the query block whose P is in registers

  DEVICE Consumer(const Params &p, Shared &shared, int group, int warp)
      : p(p), shared(shared), group(group), warp(warp) {}

  DEVICE static u32 opaque_group() { return ptx::opaque(threadIdx.x) / 128; }  // no register holds it

  DEVICE static void arrive(u32 barrier) {
    if (ptx::lane() == 0) ptx::mbarrier_arrive(barrier);
  }

  // The address of a member of shared memory, which begins at `base`.
  DEVICE u32 at(u32 base, const void *member) const {
    return base + static_cast<u32>(static_cast<const char *>(member) - reinterpret_cast<const char *>(&shared));
  }

  // Whether no query block follows that whose scores have been computed.
  DEVICE bool last() const { return number + 1 >= shared.blocks; }

  // Where a block of dQ is summed; this group's part of it.
  DEVICE float *dq_of(u32 number) const {
    return p.dq + stat_of(p, shared.place, shared.block[number % BLOCKS]) * HEAD_DIM + group * PART;
  }

  // S becomes P = 2^(c S - lse), of a query block in a slot.
  DEVICE void weigh(Accumulator<64> (&s)[HALVES], u32 number, u32 slot) {
    const u32 lane = ptx::lane();
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const Pair lse = *reinterpret_cast<const Pair *>(&shared.lse_log2[slot][h * 64 + s[h].column(8 * n, lane)]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float &score = s[h].x[4 * n + i];
          score = ptx::ex2(ptx::fma(score, p.scale_log2, i % 2 ? -lse.odd : -lse.even));
        }
      }
    const Block block = shared.block[number % BLOCKS];
    const Place &place = shared.place;
    const Mask mask(p.mask, place.batch, block.head, place.q.length, place.k.length);
    const int key = place.key + (WIDE ? 0 : group * 64);
    const int q_end = min(block.q + BLOCK_Q, place.q.length);
    if (key + 64 > place.k.length || !mask.whole(block.q, q_end, key, key + 64)) hide(s, mask, block.q, key);
  }

  // Pairs that the mask hides, or beyond the keys, have no weight, whatever their scores are.
  DEVICE void hide(Accumulator<64> (&s)[HALVES], const Mask &mask, int q, int key) {
    const u32 thread = ptx::opaque(threadIdx.x), lane = thread % 32;
    const int column = q + s[0].column(0, lane);
    int begin[2], end[2];  // of the columns that see a key, counted from this lane's first
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int k = key + static_cast<int>(thread % 128 / 32 * 16) + s[0].row(r, lane);
      const Range seen = mask.queries(k, k + 1);
      begin[r] = k < shared.place.k.length ? seen.begin - column : BLOCK_Q;
      if constexpr (LOWER_BOUND<Mask>) end[r] = seen.end - column;  // else queries to the last one see it
    }
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
      s[h].each([&](float &weight, int r, int c) {
        bool sees = h * 64 + c >= begin[r];
        if constexpr (LOWER_BOUND<Mask>) sees &= h * 64 + c < end[r];
        weight = sees ? weight : 0.0f;
      });
  }

  // Leaves dS where products read it.
  DEVICE void share(u32 base, const Weights<T, 64> (&slopes)[HALVES]) {
    const Cursor<2> ds(number);
    ds.wait_empty(shared.ds_ring);
    const u32 thread = ptx::opaque(threadIdx.x), lane = thread % 32,
              row = thread % (WIDE ? 128 : 256) / 32 * 16 + lane % 16;
    const u32 tile = at(base, &shared.ds) + ds.slot * Scores::BYTES;
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
#pragma unroll
      for (int k = 0; k < 4; ++k)
        ptx::stmatrix_x4(tile + Scores::offset(row, 8 * h + 2 * k + lane / 16), slopes[h].a[k]);
    ptx::fence_proxy_async();
    ptx::warp_barrier();
    arrive(ds.full(shared.ds_ring));
  }

  // Whether a box of 64 rows is the sequence's own, up to the end of the array.
  DEVICE bool has_box(int key) const { return !PACKED || key + 64 <= shared.place.k.extent; }

  // Writes 64 rows of a gradient from shared memory, by one thread.
  DEVICE void store(const ptx::TensorMap &map, u32 tile, int key, int first_panel, int panels) const {
    const Place &place = shared.place;
    if (warp != 0 || ptx::lane() != 0 || key >= place.k.extent) return;
    for (int panel = first_panel; panel < first_panel + panels; ++panel)
      ptx::tma_store_4d(map, tile + panel * Keys::PANEL, panel * Keys::WIDTH, row_of(place.k, key), place.head_k,
                        batch_of(place));
    ptx::bulk_commit();
  }

  // Writes this warp's rows of columns [first, first + N) of a gradient, those that are the sequence's.
  template <int N>
  DEVICE void store(const Accumulator<N> &sum, Element *array, i64 batch, i64 row, i64 head, int key, int first,
                    int columns) const {
    const Place &place = shared.place;
    Element *target = array + batch_of(place) * batch + place.head_k * head + (row_of(place.k, key) + warp * 16) * row;
    store_rows<T>(sum, target + first, row, place.k.extent - key - warp * 16, columns - first, ptx::lane());
  }
};

}  // namespace backward
