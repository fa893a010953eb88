// From the bytes of a wgmma's operands to its D: elements become doubles, whose products are exact.
#include <algorithm>
#include <array>
#include <cstring>

#include "descriptor.h"
#include "formats.h"
#include "precise.h"
#include "warpgroup.h"
#include "wide_products.h"

namespace emu {

namespace {

WideMatrices matrices;

template <float (*FROM)(uint8_t)>
const double *table() {
  static const auto values = [] {
    std::array<double, 256> all;
    for (int i = 0; i < 256; ++i) all[i] = FROM(static_cast<uint8_t>(i));
    return all;
  }();
  return values.data();
}

// The elements of 16 bytes, of which `stride` is the distance in `to`.
void convert(Element element, const unsigned char *chunk, double *to, int stride) {
  switch (element) {
    case Element::BF16:
    case Element::F16:
      uint16_t bits[8];
      memcpy(bits, chunk, sizeof bits);
      for (int i = 0; i < 8; ++i) to[i * stride] = element == Element::BF16 ? from_bf16(bits[i]) : from_f16(bits[i]);
      return;
    case Element::E4M3:
    case Element::E5M2:
      const double *values = element == Element::E4M3 ? table<from_e4m3>() : table<from_e5m2>();
      for (int i = 0; i < 16; ++i) to[i * stride] = values[chunk[i]];
      return;
  }
}

int bytes_of(Element element) { return element == Element::BF16 || element == Element::F16 ? 2 : 1; }

// A matrix whose element (line, i of the line) is to[line * line_stride + i * stride].
void load(const MatrixLayout &layout, Element element, int lines, double *to, int line_stride, int stride) {
  const int elements = 16 / bytes_of(element), chunks = static_cast<int>(layout.chunks.size()) / lines;
  const Proxy &proxy = machine.block->proxy;
  auto address = layout.chunks.begin();
  for (int line = 0; line < lines; ++line)
    for (int chunk = 0; chunk < chunks; ++chunk)
      convert(element, proxy.bytes(*address++ - Shared::BASE), to + line * line_stride + chunk * elements * stride,
              stride);
}

// A register holds 4 bytes of one row, of which a thread has rows g and g + 8 of its warp's 16.
void load_registers(const WgmmaProduct &product) {
  const Element element = product.shape.a_element;
  const int elements = 4 / bytes_of(element);
  for (int t = 0; t < 128; ++t) {
    unsigned char chunk[16];
    memcpy(chunk, product.a_values[t], sizeof chunk);
    double values[16];
    convert(element, chunk, values, 1);
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < elements; ++j)
        matrices.a[t / 32 * 16 + t % 32 / 4 + i % 2 * 8][t % 4 * elements + i / 2 * 4 * elements + j] =
            values[i * elements + j];
  }
}

}  // namespace

void multiply(const WgmmaProduct &product) {
  const PreciseFloats precise;
  const WgmmaShape &shape = product.shape;
  matrices.columns = shape.columns;
  matrices.depth = 32 / bytes_of(shape.a_element);
  matrices.keep = product.operands.keep;
  matrices.d = product.accumulator->values.data();
  constexpr int A_ROW = WideMatrices::MAX_DEPTH, B_ROW = WideMatrices::MAX_COLUMNS;
  double *a = matrices.a[0], *b = matrices.b[0];
  if (shape.a_in_registers) {
    load_registers(product);
  } else if (shape.a_transposed) {
    load(*product.a, shape.a_element, matrices.depth, a, 1, A_ROW);
  } else {
    load(*product.a, shape.a_element, WideMatrices::ROWS, a, A_ROW, 1);
  }
  if (shape.b_transposed) {
    load(*product.b, shape.b_element, matrices.depth, b, B_ROW, 1);
  } else {
    load(*product.b, shape.b_element, shape.columns, b, 1, B_ROW);
  }
  accumulate(matrices);
}

}  // namespace emu
