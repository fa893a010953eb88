// Documents side by side in one sequence: query i sees key j iff both have the same id. Ids have BYTES bytes each, of
// whatever sign: equal ones have equal bits. They may come in any order; a look (masks/mask.cuh) finds exactly the keys
// from the first to the last that are seen where each document is in one piece and ids rise, and hardly more where they
// do not.
#pragma once
#include "masks/mask.cuh"
#include "tile/pairs.cuh"
#include "tile/team.cuh"

template <int BYTES>
struct IdOf;
template <>
struct IdOf<1> {
  using Type = signed char;
};
template <>
struct IdOf<2> {
  using Type = short;
};
template <>
struct IdOf<4> {
  using Type = int;
};
template <>
struct IdOf<8> {
  using Type = i64;
};

template <int BYTES>
struct Segments {
  static constexpr bool INTERVALS = false;
  using Id = IdOf<BYTES>::Type;

  struct Params {
    const Id *q;            // [batch, len_q]
    i64 q_batch, q_stride;  // strides in elements
    const Id *k;            // [batch, len_k]
    i64 k_batch, k_stride;
    int rows, columns;  // extents of the positions, or 0
  };

  const Id *q_ids, *k_ids;  // of this batch entry
  i64 q_stride, k_stride;
  int len_q;
  int last_q, last_k;
  int begin, end;  // all keys that are seen are among these
  int matching;    // of them, with the one id that the queries have; less than 0 where that is not known

  DEVICE Segments(const Params &p, int batch, int, int len_q, int len_k)
      : q_ids(p.q + batch * p.q_batch),
        k_ids(p.k + batch * p.k_batch),
        q_stride(p.q_stride),
        k_stride(p.k_stride),
        len_q(len_q),
        last_q(last_position(len_q, p.rows)),
        last_k(last_position(len_k, p.columns)),
        begin(0),
        end(len_k),
        matching(-1) {}

  DEVICE Range keys(int, int) const { return {begin, end}; }
  DEVICE Range queries(int, int) const { return {0, len_q}; }
  DEVICE bool whole(int, int, int k, int k_end) const { return intervals() && k >= begin && k_end <= end; }
  DEVICE bool keep(int q, int k) const { return q_id(q) == k_id(k); }

  DEVICE bool intervals() const { return matching == end - begin; }

  template <class Team>
  DEVICE void look(int q, int q_end, Range keys, const Team &team) {
    const Id one = q_id(q);
    Ids ids = {};
    for (int i = q + team.index(); i < q_end; i += Team::SIZE) ids.add(q_id(i), one);
    team.join(ids);

    Seen seen = {{~static_cast<u32>(keys.end), static_cast<u32>(keys.begin), 0}};
    const int stop = min(keys.end, last_k + 1);  // what is beyond has the last id
    const auto id_at = [&](int k) { return k_ids[min(k, stop - 1) * k_stride]; };
    for (int part = keys.begin; part < stop; part += NEAR * Team::SIZE) {
      bring_near<NEAR / LINE>([&](int i) { return id_at(part + LINE * (team.index() + i * Team::SIZE)); });
      const int part_end = min(part + NEAR * Team::SIZE, stop);
      for (int first = part + team.index(); first < part_end; first += AT_ONCE * Team::SIZE) {
        u32 id[AT_ONCE], nearest = ~0u;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) id[i] = ordered(id_at(first + i * Team::SIZE));
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) nearest = min(nearest, id[i] - ids.least());
        if (nearest > ids.span()) continue;  // of most documents that is all to know
#pragma unroll 4
        for (int i = 0; i < AT_ONCE; ++i) {
          const int k = first + i * Team::SIZE;
          seen.add(k, k + 1, k < part_end && ids.hold(id_at(k), one));
        }
      }
    }
    const int beyond = max(stop, keys.begin);
    seen.add(beyond, keys.end, beyond < keys.end && team.index() == 0 && ids.hold(k_id(beyond), one));
    team.join(seen);
    if (team.index() == 0) {
      begin = static_cast<int>(~seen.word[0]), end = static_cast<int>(seen.word[1]);
      matching = ids.differ() ? -1 : static_cast<int>(seen.word[2]);
    }
  }

 private:
  static constexpr int AT_ONCE = 8;         // loads under way
  static constexpr int LINE = 128 / BYTES;  // ids that come into the L1 cache with one
  static constexpr int NEAR = 4 * LINE;     // of a thread's, that are brought there at a time

  // The ids of some queries: the complement of the least, the greatest, a bit for each, and whether some are not `one`.
  struct Ids {
    static constexpr int WORDS = 4;
    u32 word[WORDS];

    DEVICE void add(const Ids &other) {
      word[0] = max(word[0], other.word[0]), word[1] = max(word[1], other.word[1]);
      word[2] |= other.word[2], word[3] |= other.word[3];
    }
    DEVICE void add(Id id, Id one) { add({{~ordered(id), ordered(id), bit(id), id != one}}); }

    DEVICE u32 least() const { return ~word[0]; }
    DEVICE u32 span() const { return word[1] - least(); }
    DEVICE bool differ() const { return word[3] != 0; }
    // Surely all that were added, and few others; no others than `one` where it is the only one.
    DEVICE bool hold(Id id, Id one) const {
      return (ordered(id) - least() <= span()) & ((word[2] & bit(id)) != 0) & (BYTES < 8 || differ() || id == one);
    }
  };
  // Keys: the complement of the first, the one after the last, and how many there are.
  struct Seen {
    static constexpr int WORDS = 3;
    u32 word[WORDS];

    DEVICE void add(const Seen &other) {
      word[0] = max(word[0], other.word[0]), word[1] = max(word[1], other.word[1]);
      word[2] += other.word[2];
    }
    // Keys that are seen if `any` is, and come after those before.
    DEVICE void add(int k, int k_end, bool any) {
      word[0] = max(word[0], any ? ~static_cast<u32>(k) : 0), word[1] = any ? k_end : word[1];
      word[2] += any ? k_end - k : 0;
    }
  };

  // Equal of equal ids, and in the order of signed ones; of 8 bytes the lower half.
  DEVICE static u32 ordered(Id id) { return static_cast<u32>(id) ^ 0x80000000u; }
  DEVICE static u32 bit(Id id) { return 1u << static_cast<u32>(id) % 32; }

  DEVICE Id q_id(int q) const { return q_ids[(q < last_q ? q : last_q) * q_stride]; }
  DEVICE Id k_id(int k) const { return k_ids[(k < last_k ? k : last_k) * k_stride]; }
};

template <int BYTES>
constexpr bool LOOKS<Segments<BYTES>> = true;
