// What a mask is: it answers four questions, and a kernel asks no others. Queries and keys are positions within their
// sequences. A policy is built from (Params, batch, head, len_q, len_k), so that its diagonal is that of the lengths in
// use.
#pragma once
#include "device.cuh"

struct Range {
  int begin, end;  // half open; empty when end <= begin
};

template <class Mask>
concept MaskPolicy = requires(const Mask &mask, int i) {
  typename Mask::Params;  // what the host passes: plain data of whole 8-byte words
  Mask(typename Mask::Params{}, i, i, i, i);
  Range(mask.keys(i, i));        // keys(q, q_end): a range holding every key that some query of [q, q_end) sees
  Range(mask.queries(i, i));     // queries(k, k_end): the transpose
  bool(mask.whole(i, i, i, i));  // whole(q, q_end, k, k_end): every pair of the block is kept
  bool(mask.keep(i, i));         // keep(q, k): this pair is kept
  bool(Mask::INTERVALS);         // a query sees every key of keys(q, q + 1): no pair needs to be asked about
};

// Whether ids decide, so that only a look at them tells which keys some queries see. Such a mask has
//   look(q, q_end, keys, team): all threads of a team (tile/team.cuh), which share the mask, look which of a range of
//   keys are seen by the queries [q, q_end), of which alone it is asked from then on; the first thread notes it there;
//   intervals(): what INTERVALS is of the others, as far as the look has told.
template <class Mask>
constexpr bool LOOKS = false;

template <class Mask, class Team>
DEVICE void look(Mask &mask, int q, int q_end, const Team &team) {
  if constexpr (LOOKS<Mask>) {
    if (q < q_end) mask.look(q, q_end, mask.keys(q, q_end), team);
  }
}

template <class Mask>
DEVICE bool intervals(const Mask &mask) {
  if constexpr (LOOKS<Mask>) {
    return mask.intervals();
  } else {
    return Mask::INTERVALS;
  }
}

// How many bounds the interval of keys has that a query sees, beside the first key and the last; 0 of other masks.
template <class Mask>
constexpr int BOUNDS = 0;
// Whether one of them hides keys before the interval.
template <class Mask>
constexpr bool LOWER_BOUND = false;

// Of a mask that leaves an interval of keys to each query but for what an array hides. Such a mask has
//   whole_but_array(q, q_end, k, k_end): every pair of the block is kept that the array keeps;
//   array(): the array, whose elements of a block are a Read<KEYS>.
template <class Mask>
struct ArrayOf {
  static constexpr bool EXISTS = false;
  template <int>
  struct Read {};
};
