// What a wgmma reads of shared memory: where its matrices lie, and that nobody writes there while it is in flight.
#include <algorithm>

#include "descriptor.h"
#include "warpgroup.h"

namespace emu {

namespace {

constexpr int WARPS = 4;

std::vector<MatrixLayout::Run> runs_of(std::vector<uint32_t> chunks) {
  std::sort(chunks.begin(), chunks.end());
  std::vector<MatrixLayout::Run> runs;
  for (uint32_t address : chunks) {
    if (runs.empty() || runs.back().address + runs.back().bytes < address) runs.push_back({address, 0});
    runs.back().bytes = address + Descriptor::CHUNK - runs.back().address;
  }
  return runs;
}

// f(runs, name) for what a warp reads: its own sixteen rows of A, and all of B.
template <class F>
void each_matrix(const WgmmaProduct &product, int warp, F f) {
  if (product.a) f(product.a->rows_of_a[warp], "A of wgmma");
  f(product.b->runs, "B of wgmma");
}

// f(address) for each 16 bytes.
template <class F>
void each_chunk(const std::vector<MatrixLayout::Run> &runs, F f) {
  for (const auto &[address, bytes] : runs)
    for (uint32_t at = address; at < address + bytes; at += Descriptor::CHUNK) f(at);
}

// A warp has read what no other of its products in flight reads.
void end_reads(const std::vector<uint16_t> &readers, const std::vector<MatrixLayout::Run> &runs, const Access &access) {
  for (const auto &run : runs) {
    uint32_t begin = run.address;
    const auto end = [&](uint32_t at) {
      if (at > begin) end_proxy_read(begin, at - begin, access);
    };
    for (uint32_t at = begin; at < run.address + run.bytes; at += Descriptor::CHUNK) {
      if (!readers[at / Descriptor::CHUNK]) continue;
      end(at);
      begin = at + Descriptor::CHUNK;
    }
    end(run.address + run.bytes);
  }
}

}  // namespace

const MatrixLayout &Warpgroup::layout(uint64_t bits, bool mn_major, uint32_t lines, uint32_t chunks, const char *matrix,
                                      Loc loc) {
  const auto [entry, is_new] = layouts.try_emplace({bits, mn_major, lines, chunks});
  MatrixLayout &layout = entry->second;
  if (!is_new) return layout;
  const Descriptor descriptor(bits);
  const auto refuse = [&](const std::string &why) {
    fail(loc, "the descriptor of wgmma's %s, %#llx, %s", matrix, static_cast<unsigned long long>(bits), why.c_str());
  };
  if (descriptor.reserved)
    refuse(format("has reserved bits %#llx", static_cast<unsigned long long>(descriptor.reserved)));
  if (descriptor.base_offset) refuse("has a base offset, which is not emulated");
  if (!descriptor.begins_in_first_line())
    refuse(format("begins at shared memory %+ld, not in the first row of a swizzle atom of %u bytes",
                  static_cast<long>(descriptor.start) - Shared::BASE, Descriptor::LINES * descriptor.width));
  const size_t shared_bytes = machine.block->shared.memory.bytes();
  for (uint32_t line = 0; line < lines; ++line)
    for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
      const uint32_t address = descriptor.at(mn_major, line, chunk);
      if (address < Shared::BASE || address - Shared::BASE + Descriptor::CHUNK > shared_bytes)
        refuse(
            format("reaches shared memory %+ld of %zu bytes", static_cast<long>(address) - Shared::BASE, shared_bytes));
      layout.chunks.push_back(address);
    }
  layout.runs = runs_of(layout.chunks);
  std::vector<uint32_t> rows[WARPS];
  for (uint32_t i = 0; i < layout.chunks.size(); ++i)
    rows[mn_major ? i % chunks * WARPS / chunks : i / chunks * WARPS / lines].push_back(layout.chunks[i]);
  for (int warp = 0; warp < WARPS; ++warp) layout.rows_of_a[warp] = runs_of(rows[warp]);
  return layout;
}

void count_reads(Warpgroup &group, const WgmmaProduct &product) {
  for (int warp = 0; warp < WARPS; ++warp)
    each_matrix(product, warp, [&](const auto &runs, const char *) {
      each_chunk(runs, [&](uint32_t address) { ++group.readers[warp][address / Descriptor::CHUNK]; });
    });
}

// The first warp looks at the bytes of B, each at the order of their writes and its own reads; at its rows of A too.
void begin_reads(WgmmaProduct &product, Loc loc) {
  const Thread &self = *machine.thread;
  const bool first = !product.reading_warps;
  const int warp = self.number / 32 % WARPS, bit = 1 << warp;
  if (product.reading_warps & bit) return;
  product.reading_warps |= bit;
  each_matrix(product, warp, [&](const auto &runs, const char *name) {
    const Access access{self, name, loc, true, true};
    for (const auto &[address, bytes] : runs) {
      if (first || &runs != &product.b->runs) {
        begin_proxy_read(address, bytes, Descriptor::CHUNK, access);
      } else {
        machine.block->shadow.begin_read(address - Shared::BASE, bytes, access);
      }
    }
  });
}

void end_reads(Warpgroup &group, const WgmmaProduct &product) {
  for (int warp = 0; warp < WARPS; ++warp) {
    std::vector<uint16_t> &readers = group.readers[warp];
    each_matrix(product, warp, [&](const auto &runs, const char *) {
      each_chunk(runs, [&](uint32_t address) { --readers[address / Descriptor::CHUNK]; });
    });
    const Thread &thread = group.thread(warp * 32);
    each_matrix(product, warp, [&](const auto &runs, const char *name) {
      each_chunk(runs, [&](uint32_t address) {
        const uint32_t offset = address - Shared::BASE;
        if (machine.block->proxy.changed(offset) > product.issued_at)
          fail_for(thread, product.loc,
                   format("%s, in flight, reads shared memory %+ld, which was overwritten since its issue", name,
                          static_cast<long>(offset)));
      });
      end_reads(readers, runs, {thread, name, product.loc, true, true});
    });
  }
}

}  // namespace emu
