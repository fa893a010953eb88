// The policies of cuda/masks, cuda/scores and cuda/tile on the host, for tests/test_policies.py: every function takes a
// policy's Params as bytes. Instructions are those of the emulator.
#include "emu.h"
//
#include "masks/all.cuh"
#include "masks/band.cuh"
#include "masks/dense_mask.cuh"
#include "masks/prefix_lm.cuh"
#include "masks/segments.cuh"
#include "scores/alibi.cuh"
#include "scores/bias.cuh"
#include "scores/softcap.cuh"
#include "tile/dropout.cuh"
#include "tile/integers.cuh"
#include "tile/sequences.cuh"
#include "tile/sink.cuh"

#define EXPORT extern "C" __attribute__((visibility("default")))

template <class Params>
const Params &as(const void *params) {
  static_assert(sizeof(Params) % 8 == 0 && alignof(Params) <= 8, "whole words");
  return *static_cast<const Params *>(params);
}

// keep of `rows` by `columns` pairs from (q, k) on, which may be beyond the lengths.
template <class Mask>
void keep(const Mask &mask, int q, int k, int rows, int columns, bool *kept) {
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < columns; ++j) *kept++ = mask.keep(q + i, k + j);
}

// Of every two blocks of queries and keys: keys, queries, whole.
template <class Mask>
void blocks(const Mask &mask, int len_q, int len_k, int block, int *answers) {
  for (int q = 0; q < len_q; q += block)
    for (int k = 0; k < len_k; k += block) {
      const int q_end = min(q + block, len_q), k_end = min(k + block, len_k);
      const Range keys = mask.keys(q, q_end), queries = mask.queries(k, k_end);
      for (int answer : {keys.begin, keys.end, queries.begin, queries.end, int{mask.whole(q, q_end, k, k_end)}})
        *answers++ = answer;
    }
}

// One thread that looks alone.
struct Alone {
  static constexpr int SIZE = 1;
  static int index() { return 0; }
  template <class Found>
  static void join(Found &) {}
};

// Of masks that have looked at a block of queries: its keys and whether they are intervals, and of each block of keys
// whether it is whole.
template <class Mask>
void looks(Mask mask, int len_k, int q, int q_end, int block, int *answers) {
  look(mask, q, q_end, Alone());
  const Range keys = mask.keys(q, q_end);
  for (int answer : {keys.begin, keys.end, int{intervals(mask)}}) *answers++ = answer;
  for (int k = 0; k < len_k; k += block) *answers++ = mask.whole(q, q_end, k, min(k + block, len_k));
}

#define MASK(NAME, ...)                                                                                               \
  static_assert(MaskPolicy<__VA_ARGS__>);                                                                             \
  EXPORT size_t NAME##_bytes() { return sizeof(__VA_ARGS__); }                                                        \
  EXPORT unsigned NAME##_intervals() { return __VA_ARGS__::INTERVALS; }                                               \
  EXPORT size_t NAME##_params() { return sizeof(__VA_ARGS__::Params); }                                               \
  EXPORT void NAME##_keep(const void *params, int batch, int head, int len_q, int len_k, int q, int k, int rows,      \
                          int columns, bool *kept) {                                                                  \
    keep(__VA_ARGS__(as<__VA_ARGS__::Params>(params), batch, head, len_q, len_k), q, k, rows, columns, kept);         \
  }                                                                                                                   \
  EXPORT void NAME##_blocks(const void *params, int batch, int head, int len_q, int len_k, int block, int *answers) { \
    blocks(__VA_ARGS__(as<__VA_ARGS__::Params>(params), batch, head, len_q, len_k), len_q, len_k, block, answers);    \
  }                                                                                                                   \
  EXPORT bool NAME##_looks() { return LOOKS<__VA_ARGS__>; }                                                           \
  EXPORT void NAME##_look(const void *params, int batch, int head, int len_q, int len_k, int q, int q_end, int block, \
                          int *answers) {                                                                             \
    looks(__VA_ARGS__(as<__VA_ARGS__::Params>(params), batch, head, len_q, len_k), len_k, q, q_end, block, answers);  \
  }

using Window = Band<true, true>;
MASK(Full, Band<false, false>)
MASK(Causal, Band<false, true>)
MASK(From, Band<true, false>)
MASK(Window, Window)
MASK(PrefixLM, PrefixLM)
MASK(Segments1, Segments<1>)
MASK(Segments2, Segments<2>)
MASK(Segments4, Segments<4>)
MASK(Segments8, Segments<8>)
MASK(DenseMask, DenseMask)
MASK(AllOfOne, All<PrefixLM>)
MASK(AllOfTwo, All<Window, PrefixLM>)
MASK(CausalDocuments, All<Band<false, true>, Segments<4>>)
MASK(TwoDocuments, All<Segments<4>, Band<false, true>, Segments<1>>)
MASK(AllOfFour, All<Window, PrefixLM, Segments<8>, DenseMask>)

#define SCORE(NAME, ...)                                                                                          \
  static_assert(ScorePolicy<__VA_ARGS__>);                                                                        \
  EXPORT bool NAME##_identity() { return __VA_ARGS__::IDENTITY; }                                                 \
  EXPORT size_t NAME##_params() { return sizeof(__VA_ARGS__::Params); }                                           \
  EXPORT void NAME##_apply(const void *params, int batch, int head, int len_q, int len_k, int q, int k, int rows, \
                           int columns, float *scores) {                                                          \
    const __VA_ARGS__ score(as<__VA_ARGS__::Params>(params), batch, head, len_q, len_k);                          \
    for (int i = 0; i < rows; ++i)                                                                                \
      for (int j = 0; j < columns; j += 2) {                                                                      \
        float none = 0, &odd = j + 1 < columns ? scores[1] : none;                                                \
        score.apply(scores[0], odd, q + i, k + j / 16 * 16, j % 16);                                              \
        scores += j + 1 < columns ? 2 : 1;                                                                        \
      }                                                                                                           \
  }

// What a quick policy makes of the scores of 16 rows and 32 keys from (q, k) on. 0: it does not apply, 1: not to these
// scores, 2: it does.
#define QUICK(NAME, ...)                                                                                              \
  static_assert(__VA_ARGS__::QUICK);                                                                                  \
  EXPORT int NAME##_quick(const void *params, int batch, int head, int len_q, int len_k, int q, int k, float scale,   \
                          float unit, float *scores) {                                                                \
    return quick<__VA_ARGS__>(as<__VA_ARGS__::Params>(params), batch, head, len_q, len_k, q, k, scale, unit, scores); \
  }
template <class Score>
int quick(const typename Score::Params &p, int batch, int head, int len_q, int len_k, int q, int k, float scale,
          float unit, float *scores) {
  const Score score(p, batch, head, len_q, len_k);
  int said = 2;
  for (int lane = 0; lane < 32; ++lane) {
    const int row = lane / 4, column = lane % 4 * 2;
    typename Score::template Quick<32> quick(score, p, {q, q + 16, k, k + 32, q + row, k + column, scale * unit, unit});
    if (!quick.applies()) return 0;
    for (int r = 0; r < 2; ++r)
      for (int c = 0; c < 32; c += 8) {
        float shift[2] = {quick.base(r), quick.base(r)}, *pair = scores + (row + 8 * r) * 32 + column + c;
        quick.shift(shift, r, c);
        float gain[2];
        quick.gains(pair[0], pair[1], gain);
        for (int i = 0; i < 2; ++i) pair[i] = ptx::fma(pair[i], gain[i], shift[i]);
      }
    if (!quick.holds()) said = 1;
  }
  return said;
}

SCORE(Identity, Identity)
SCORE(Softcap, Softcap)
SCORE(Alibi, Alibi)
#define BIAS(TYPE)                     \
  using Strided##TYPE = Bias<TYPE, 0>; \
  using Row##TYPE = Bias<TYPE, 1>;     \
  SCORE(Bias##TYPE##0, Strided##TYPE)  \
  SCORE(Bias##TYPE##1, Row##TYPE)
#define PAIRED(TYPE)                  \
  using Paired##TYPE = Bias<TYPE, 2>; \
  SCORE(Bias##TYPE##2, Paired##TYPE)

BIAS(Float16)
BIAS(Bfloat16)
BIAS(Float32)
BIAS(Float64)
PAIRED(Float16)
PAIRED(Bfloat16)
PAIRED(Float32)
SCORE(ChainOfNothing, Chain<Identity, Identity>)
SCORE(ChainOfOne, Chain<Alibi>)
SCORE(CapThenBias, Chain<Softcap, RowFloat32>)
SCORE(BiasThenCap, Chain<RowFloat32, Softcap>)
SCORE(ChainOfThree, Chain<Softcap, Alibi, RowBfloat16>)
QUICK(Identity, Identity)
QUICK(Softcap, Softcap)
QUICK(Alibi, Alibi)
QUICK(BiasFloat162, PairedFloat16)
QUICK(BiasBfloat162, PairedBfloat16)
QUICK(QuickChain, Chain<Softcap, Alibi, PairedBfloat16>)
static_assert(!RowBfloat16::QUICK && !PairedFloat32::QUICK && !Chain<Alibi, RowBfloat16>::QUICK);
static_assert(!Chain<Alibi, Softcap>::QUICK);  // a cap is no sum with what is before it

EXPORT void integers(const void *params, int count, i64 low, i64 high, i64 *values, i64 *clipped) {
  const Integers &x = as<Integers>(params);
  for (int i = 0; i < count; ++i) values[i] = x[i], clipped[i] = x.clipped(i, low, high);
}

EXPORT void philox(u32 *counter, u32 key_low, u32 key_high) {
  u32 x[4] = {counter[0], counter[1], counter[2], counter[3]};
  philox4x32(x, key_low, key_high);
  for (int i = 0; i < 4; ++i) counter[i] = x[i];
}

static_assert(Dropout::DROPS && !KeepAll::DROPS);
EXPORT size_t Dropout_params() { return sizeof(Dropout::Params); }
EXPORT size_t KeepAll_params() { return sizeof(KeepAll::Params); }

// What is kept of the eight weights of four words.
EXPORT void of_words(const void *params, const u32 *words, bool *kept) {
  const u32 x[4] = {words[0], words[1], words[2], words[3]};
  const Dropout dropout(as<Dropout::Params>(params), 0, 0);
  for (int e = 0; e < 8; ++e) kept[e] = dropout.keep(x, e / 4, e % 4);
}

// Which draws of words drop a weight, in their bits 15 and 31; false where a kernel asks about each.
EXPORT bool signs(const void *params, int count, const u32 *words, u32 *signs) {
  const Dropout dropout(as<Dropout::Params>(params), 0, 0);
  for (int i = 0; i < count; ++i) signs[i] = dropout.signs(words[i]);
  return dropout.seldom();
}

// What is kept of `rows` by `columns` weights from (q, k) on, whole fragments of 16 by 32.
EXPORT float dropout(const void *params, int batch, int head, int q, int k, int rows, int columns, bool *kept) {
  const Dropout dropout(as<Dropout::Params>(params), batch, head);
  for (int i = 0; i < rows; i += 16)
    for (int j = 0; j < columns; j += 32)
      for (int row = 0; row < 8; ++row)
        for (int column = 0; column < 8; ++column) {
          u32 x[4];
          dropout.draw(q + i + row, k + j + column, x);
          for (int half = 0; half < 2; ++half)
            for (int group = 0; group < 4; ++group)
              kept[(i + row + 8 * half) * columns + j + column + 8 * group] = dropout.keep(x, half, group);
        }
  return dropout.rescale();
}

#define SINK(NAME, ...)                                                                           \
  EXPORT size_t NAME##_params() { return sizeof(__VA_ARGS__::Params); }                           \
  EXPORT bool NAME##_present() { return __VA_ARGS__::PRESENT; }                                   \
  EXPORT float NAME##_join(const void *params, int head, int count, float *inverse, float *lse) { \
    const __VA_ARGS__ sink(as<__VA_ARGS__::Params>(params), head);                                \
    for (int i = 0; i < count; ++i) sink.join(inverse[i], lse[i]);                                \
    return sink.logit;                                                                            \
  }

SINK(NoSink, NoSink)
SINK(SinkFloat16, Sink<Float16>)
SINK(SinkBfloat16, Sink<Bfloat16>)
SINK(SinkFloat32, Sink<Float32>)
SINK(SinkFloat64, Sink<Float64>)

// Spans as (first, length, extent), of queries for entries 0 to `entries` - 1, then of keys for those below `batch`.
#define SEQUENCES(NAME)                                                                                                \
  EXPORT size_t NAME##_params() { return sizeof(NAME::Params); }                                                       \
  EXPORT int NAME##_kind() { return 2 * NAME::PACKED + NAME::VARIES; }                                                 \
  EXPORT void NAME##_spans(const void *params, int batch, int entries, int len_q, int len_k, i64 *spans) {             \
    const auto put = [&](const Span &span) { *spans++ = span.first, *spans++ = span.length, *spans++ = span.extent; }; \
    for (int b = 0; b < entries; ++b) put(NAME::queries(as<NAME::Params>(params), b, batch, len_q));                   \
    for (int b = 0; b < batch; ++b) put(NAME::keys(as<NAME::Params>(params), b, len_k));                               \
  }

SEQUENCES(Dense)
SEQUENCES(Used)
SEQUENCES(Packed)

// Bit 0: a bound falls; bit 1: some sequence has a query from `begin` up to `end`. By all lanes of a warp.
EXPORT int Packed_rows(const void *params, int batch, int len_q, i64 begin, i64 end) {
  const auto &p = as<Packed::Params>(params);
  bool falls = false, met = false;
  for (u32 lane = 0; lane < 32; ++lane) {
    falls = falls || Packed::fall(p.cu_q, batch, len_q, lane);
    met = met || Packed::meets(p, batch, len_q, begin, end, lane);
  }
  return falls + 2 * met;
}
