// The intersection of masks.
#pragma once
#include "masks/mask.cuh"

template <class First, class... Others>
struct All {
  static constexpr bool INTERVALS = First::INTERVALS && All<Others...>::INTERVALS;

  struct Params {
    First::Params first;
    All<Others...>::Params others;
  };

  First first;
  All<Others...> others;

  DEVICE All(const Params &p, int batch, int head, int len_q, int len_k)
      : first(p.first, batch, head, len_q, len_k), others(p.others, batch, head, len_q, len_k) {}

  DEVICE Range keys(int q, int q_end) const { return common(first.keys(q, q_end), others.keys(q, q_end)); }
  DEVICE Range queries(int k, int k_end) const { return common(first.queries(k, k_end), others.queries(k, k_end)); }
  DEVICE bool whole(int q, int q_end, int k, int k_end) const {
    return first.whole(q, q_end, k, k_end) && others.whole(q, q_end, k, k_end);
  }
  DEVICE bool keep(int q, int k) const { return first.keep(q, k) & others.keep(q, k); }

  template <class Team>
  DEVICE void look(int q, int q_end, Range keys, const Team &team) {
    if constexpr (LOOKS<First>) first.look(q, q_end, keys, team);
    if constexpr (LOOKS<All<Others...>>) others.look(q, q_end, keys, team);
  }
  DEVICE bool intervals() const { return ::intervals(first) && ::intervals(others); }

  DEVICE bool whole_but_array(int q, int q_end, int k, int k_end) const {
    return first.whole(q, q_end, k, k_end) && others.whole_but_array(q, q_end, k, k_end);
  }
  DEVICE decltype(auto) array() const { return others.array(); }

 private:
  DEVICE static Range common(const Range &a, const Range &b) {
    return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
  }
};

template <class Mask>
struct All<Mask> : Mask {
  using Mask::Mask;
};

template <class... Masks>
constexpr bool LOOKS<All<Masks...>> = (LOOKS<Masks> || ...);

template <class First, class... Others>
struct ArrayOf<All<First, Others...>> : ArrayOf<All<Others...>> {
  static constexpr bool EXISTS = First::INTERVALS && ArrayOf<All<Others...>>::EXISTS;
};
template <class Mask>
struct ArrayOf<All<Mask>> : ArrayOf<Mask> {};
