// Boxes of tensors: what cuTensorMapEncodeTiled takes and refuses (CUDA Driver API), and which bytes of shared memory a
// box's elements have (PTX ISA, "Tensors").
#include "tensor.h"

#include <algorithm>
#include <cstring>

#include "abi.h"
#include "state.h"

namespace emu {

namespace {

constexpr int FLOAT16 = 6, FLOAT32 = 7, BFLOAT16 = 9;                       // CUtensorMapDataType
constexpr uint32_t ITEM_BYTES[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};  // of each
constexpr uint32_t SPANS[] = {0, 32, 64, 128};                              // by CUtensorMapSwizzle, in bytes
constexpr uint32_t ALIGNMENTS[] = {128, 256, 512, 1024};                    // of a box: its pattern's period
constexpr int DTYPES = sizeof ITEM_BYTES / sizeof *ITEM_BYTES, SWIZZLES = 4, PROMOTIONS = 4;
constexpr uint64_t MAX_STRIDE = uint64_t{1} << 40, MAX_SIZE = uint64_t{1} << 32;  // exclusive, inclusive
constexpr uint32_t MAX_BOX = 256, MAX_STEP = 8;

bool aligned(const void *address, uintptr_t alignment) { return reinterpret_cast<uintptr_t>(address) % alignment == 0; }

// The 16-byte chunks of a row permute with the rows of the pattern, by address.
uint32_t swizzled(uint32_t address, uint32_t swizzle) {
  const uint32_t chunks = SPANS[swizzle] / Chunk::BYTES;
  return chunks ? address ^ (address >> 7 & (chunks - 1)) * Chunk::BYTES : address;
}

const TensorMap &checked(const void *map, const char *name, Loc loc) {
  if (!aligned(map, alignof(TensorMap))) fail(loc, "%s: the tensor map is not 64-byte aligned", name);
  const auto &found = *static_cast<const TensorMap *>(map);
  if (found.mark != TensorMap::MARK) fail(loc, "%s: these 128 bytes are no tensor map", name);
  return found;
}

// A box at coordinates, as chunks: rows of it side by side in shared memory, each of them a part of the tensor.
Transfer box(const TensorMap &map, const char *name, uint32_t shared, const int (&at)[4], Loc loc) {
  if (map.rank != 4) fail(loc, "%s: the tensor map has %d dimensions", name, map.rank);
  const int64_t item = ITEM_BYTES[map.dtype], size = static_cast<int64_t>(map.size[0]) * item, begin = at[0] * item;
  if (begin % Chunk::BYTES)
    fail(loc, "%s: the box begins %lld bytes into a row: not a multiple of 16, in which hardware hangs", name,
         static_cast<long long>(begin));
  const uint32_t row_bytes = map.box[0] * static_cast<uint32_t>(item);
  const uint32_t rows = map.box[1] * map.box[2] * map.box[3];
  if (map.swizzle && row_bytes != SPANS[map.swizzle])
    fail(loc, "%s: rows of %u bytes with a swizzle of %u are not modelled", name, row_bytes, SPANS[map.swizzle]);
  machine.block->shared.at(shared, size_t{rows} * row_bytes, ALIGNMENTS[map.swizzle], name, loc);

  Transfer transfer{name, loc, {}, map.fill_nan ? NAN_BYTE : static_cast<unsigned char>(0)};
  for (uint32_t row = 0; row < rows; ++row) {
    const uint32_t index[] = {row % map.box[1], row / map.box[1] % map.box[2], row / map.box[1] / map.box[2]};
    bool inside = true;
    uintptr_t global = reinterpret_cast<uintptr_t>(map.address) + begin;
    for (int d = 1; d < 4; ++d) {
      const int64_t i = int64_t{at[d]} + index[d - 1];
      inside &= i >= 0 && i < static_cast<int64_t>(map.size[d]);
      global += i * map.stride[d - 1];
    }
    const int64_t first = std::clamp<int64_t>(-begin, 0, row_bytes);
    const int64_t end = inside ? std::clamp<int64_t>(size - begin, first, row_bytes) : first;
    if (end > first) check_range(reinterpret_cast<void *>(global + first), end - first, name, loc);
    for (uint32_t column = 0; column < row_bytes; column += Chunk::BYTES) {
      const int64_t from = std::clamp<int64_t>(first - column, 0, Chunk::BYTES);
      const int64_t to = std::clamp<int64_t>(end - column, from, Chunk::BYTES);
      transfer.chunks.push_back({swizzled(shared + row * row_bytes + column, map.swizzle) - Shared::BASE,
                                 global + column, static_cast<uint8_t>(from), static_cast<uint8_t>(to)});
    }
  }
  ++machine.stats.tma;
  return transfer;
}

// Negative coordinates are for loads only.
void require_no_negative(const char *name, const int (&at)[4], Loc loc) {
  for (int d = 0; d < 4; ++d)
    if (at[d] < 0)
      fail(loc, "%s: the box begins at %d of dimension %d: negative, in which hardware hangs", name, at[d], d);
}

}  // namespace

void tensor_prefetch(const void *map, Loc loc) { checked(map, "prefetch.tensormap", loc); }

void tensor_load(uint32_t shared, const void *map, uint32_t barrier, const int (&at)[4], Loc loc) {
  constexpr const char *NAME = "TMA load";
  issue_load(box(checked(map, NAME, loc), NAME, shared, at, loc), barrier);
}

void tensor_store(const void *map, uint32_t shared, const int (&at)[4], Loc loc) {
  constexpr const char *NAME = "TMA store";
  require_no_negative(NAME, at, loc);
  issue_store(box(checked(map, NAME, loc), NAME, shared, at, loc), Sum::NONE);
}

void tensor_reduce_add(const void *map, uint32_t shared, const int (&at)[4], Loc loc) {
  constexpr const char *NAME = "TMA reduction";
  const TensorMap &tensor = checked(map, NAME, loc);
  const int dtype = tensor.dtype;
  if (dtype != FLOAT32 && dtype != FLOAT16 && dtype != BFLOAT16)
    fail(loc, "%s: sums of data type %d are not modelled", NAME, dtype);
  require_no_negative(NAME, at, loc);
  issue_store(box(tensor, NAME, shared, at, loc), dtype == FLOAT32   ? Sum::F32
                                                  : dtype == FLOAT16 ? Sum::F16
                                                                     : Sum::BF16);
}

}  // namespace emu

const char *emu_tensor_map(void *map, int dtype, unsigned rank, void *address, const unsigned long long *size,
                           const unsigned long long *strides, const unsigned *box, const unsigned *steps,
                           int interleave, int swizzle, int promotion, int fill) {
  using namespace emu;
  if (!map || !aligned(map, alignof(TensorMap))) return "the map is not 64-byte aligned";
  if (dtype < 0 || dtype >= DTYPES) return "no such data type";
  if (rank < 1 || rank > TensorMap::MAX_RANK) return "a tensor has 1 to 5 dimensions";
  if (!address || !aligned(address, 16)) return "the tensor's address is not 16-byte aligned";
  if (interleave) return "interleaved layouts are not modelled";
  if (swizzle < 0 || swizzle >= SWIZZLES) return "no such swizzle";
  if (promotion < 0 || promotion >= PROMOTIONS) return "no such promotion";
  if (fill < 0 || fill > 1) return "no such fill";
  if (fill && dtype < FLOAT16) return "integers have no NaN to fill with";
  TensorMap made{};
  made.mark = TensorMap::MARK;
  made.address = static_cast<unsigned char *>(address);
  for (unsigned d = 0; d < rank; ++d) {
    if (size[d] < 1 || size[d] > MAX_SIZE) return "a size is not from 1 to 2^32";
    if (d && (strides[d - 1] % 16 || strides[d - 1] >= MAX_STRIDE))
      return "a stride is not a multiple of 16 bytes below 2^40";
    if (box[d] < 1 || box[d] > MAX_BOX) return "a size of the box is not from 1 to 256";
    if (steps[d] < 1 || steps[d] > MAX_STEP) return "an element stride is not from 1 to 8";
    if (steps[d] != 1) return "element strides other than 1 are not modelled";
    made.size[d] = size[d];
    if (d) made.stride[d - 1] = strides[d - 1];
    made.box[d] = static_cast<uint16_t>(box[d]);
  }
  const uint32_t row = box[0] * ITEM_BYTES[dtype];
  if (row % 16) return "the box's rows are not whole 16 bytes";
  if (swizzle && row > SPANS[swizzle]) return "the box's rows are longer than the span of the swizzle";
  made.dtype = static_cast<uint8_t>(dtype);
  made.rank = static_cast<uint8_t>(rank);
  made.swizzle = static_cast<uint8_t>(swizzle);
  made.fill_nan = fill;
  memcpy(map, &made, sizeof made);
  return nullptr;
}
