// Four warps that multiply matrices together: their products in flight, and the registers that these own. Internal to
// the runtime.
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "state.h"
#include "wgmma.h"

namespace emu {

// The bytes of a matrix in shared memory, by shared address.
struct MatrixLayout {
  struct Run {
    uint32_t address, bytes;
  };
  std::vector<uint32_t> chunks;   // of 16 bytes, line after line of the descriptor's
  std::vector<Run> runs;          // the same bytes in ascending order
  std::vector<Run> rows_of_a[4];  // by warp, which reads only its own sixteen
};

// A D of the warpgroup.
struct Accumulator {
  int columns;
  std::vector<float> values;   // [64][columns]: what the registers hold, or are going to
  float *registers[128] = {};  // of each thread that has used it
  int in_flight[128] = {};     // products, by thread
  bool known[128] = {};        // `values` are what the registers were given by the last wait

  size_t index(int thread, int i) const {
    return static_cast<size_t>(thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8) * columns + i / 4 * 8 +
           thread % 4 * 2 + i % 2;
  }
  bool overlaps(int thread, const float *d, int count) const {
    const float *mine = registers[thread];
    return mine && d < mine + columns / 2 && mine < d + count;
  }
};

// A product in flight. The first thread to issue it says what it is.
struct WgmmaProduct {
  WgmmaShape shape;
  WgmmaOperands operands;
  Loc loc;
  int thread;  // the first, in the block
  int group;   // of those that commits close
  Accumulator *accumulator = nullptr;
  const MatrixLayout *a = nullptr, *b = nullptr;  // `a` is null where A is in registers
  uint64_t issued_at = 0;                         // by the proxy's time
  int reading_warps = 0;                          // a bit each
  const uint32_t *a_registers[128] = {};
  uint32_t a_values[128][4] = {};
};

struct Warpgroup : Object, Operation {
  struct Member {
    size_t issued = 0;  // products
    int committed = 0;  // groups
    bool fenced = false;
  };

  int number;
  Member members[128];
  std::deque<WgmmaProduct> products;  // in flight, in the order of issue
  size_t retired = 0;                 // before them
  std::vector<std::unique_ptr<Accumulator>> accumulators;
  std::vector<uint16_t> readers[4];  // by warp and chunk of shared memory: its products in flight that read it
  std::map<std::tuple<uint64_t, bool, uint32_t, uint32_t>, MatrixLayout> layouts;
  int exited = 0;  // threads
  // The wait that threads have come to.
  int arrived = 0;
  int pending = 0, committed = 0;  // groups
  Loc wait_loc;

  Warpgroup(int number, size_t shared_bytes) : number(number) {
    for (auto &chunks : readers) chunks.resize((Shared::BASE + shared_bytes + 15) / 16);
  }

  size_t issued() const { return retired + products.size(); }
  Thread &thread(int t) const { return *machine.block->threads[number * 128 + t]; }
  const MatrixLayout &layout(uint64_t descriptor, bool mn_major, uint32_t lines, uint32_t chunks, const char *matrix,
                             Loc loc);
  void reset();  // for the next block
  void run() override;
  std::string state() const override;
};

// The warps are going to read what a product does of shared memory; that of the running thread begins; all have read.
void count_reads(Warpgroup &group, const WgmmaProduct &product);
void begin_reads(WgmmaProduct &product, Loc loc);
void end_reads(Warpgroup &group, const WgmmaProduct &product);

// D of a product whose operands are still as they were at its issue.
void multiply(const WgmmaProduct &product);

}  // namespace emu
