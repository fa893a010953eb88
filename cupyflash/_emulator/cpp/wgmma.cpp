// wgmma: a product is issued by all threads of a warpgroup, each at its own time, and happens by the time of the wait
// that retires its group. Until then its registers belong to it: accumulators hold a NaN that traps, and whatever the
// product reads must stay as it was when the first thread issued it.
#include "wgmma.h"

#include <algorithm>
#include <cstring>

#include "descriptor.h"
#include "precise.h"
#include "warpgroup.h"

namespace emu {

namespace {

constexpr int THREADS = 128;

bool same_bits(float x, float y) { return !memcmp(&x, &y, sizeof x); }

bool holds(float x, uint32_t bits) { return !memcmp(&x, &bits, sizeof x); }

// The warpgroup of the running thread, all of which has to come.
Warpgroup &warpgroup(const char *name, Loc loc) {
  const Block &block = *machine.block;
  const auto number = static_cast<size_t>(machine.thread->number / THREADS);
  if (number >= block.warpgroups.size())
    fail(loc, "%s by a thread of no whole warpgroup: the block has %zu threads", name, block.threads.size());
  Warpgroup &group = *block.warpgroups[number];
  if (group.exited) fail(loc, "%s, while %d threads of its warpgroup have exited", name, group.exited);
  return group;
}

std::string describe(const WgmmaShape &shape, const WgmmaOperands &operands, int group) {
  return format("%s of N = %d with %sb = %#llx, keep = %d, in group %d", shape.name, shape.columns,
                shape.a_in_registers ? "" : format("a = %#llx, ", static_cast<unsigned long long>(operands.a)).c_str(),
                static_cast<unsigned long long>(operands.b), operands.keep, group);
}

void check_same(const WgmmaProduct &product, const WgmmaShape &shape, const WgmmaOperands &operands, int group,
                Loc loc) {
  if (product.shape == shape && product.operands == operands && product.group == group && same(product.loc, loc))
    return;
  fail(loc, "the threads of a warpgroup issue different wgmma: %s; and thread %d at %s: %s",
       describe(shape, operands, group).c_str(), product.thread, place(product.loc).c_str(),
       describe(product.shape, product.operands, product.group).c_str());
}

// Of the first thread to issue it.
WgmmaProduct &begin(Warpgroup &group, const WgmmaShape &shape, const WgmmaOperands &operands, Loc loc) {
  const uint32_t line = Descriptor::CHUNK, row_chunks = 32 / line;  // K is 32 bytes
  const int thread = machine.thread->number;
  WgmmaProduct product{shape, operands, loc, thread, group.members[thread % THREADS].committed};
  const auto layout = [&](uint64_t descriptor, bool mn_major, int size, const char *matrix) {
    // K-major there is a line for each of the `size` rows or columns; MN-major, of 16-bit elements, for each k.
    return mn_major ? &group.layout(descriptor, true, 16, static_cast<uint32_t>(size) * 2 / line, matrix, loc)
                    : &group.layout(descriptor, false, static_cast<uint32_t>(size), row_chunks, matrix, loc);
  };
  if (!shape.a_in_registers) product.a = layout(operands.a, shape.a_transposed, 64, "A");
  product.b = layout(operands.b, shape.b_transposed, shape.columns, "B");
  product.issued_at = machine.block->proxy.now();
  count_reads(group, product);
  ++machine.stats.wgmma;
  group.products.push_back(std::move(product));
  return group.products.back();
}

// The accumulator that the first thread's registers are; none of other products in flight may have a part of them.
Accumulator &find_accumulator(Warpgroup &group, int t, const float *d, int columns, Loc loc) {
  Accumulator *found = nullptr;
  for (const auto &accumulator : group.accumulators) {
    if (!accumulator->overlaps(t, d, columns / 2)) continue;
    if (accumulator->registers[t] == d && accumulator->columns == columns) {
      found = accumulator.get();
    } else if (accumulator->in_flight[t]) {
      fail(loc, "wgmma with accumulators of which a wgmma of another shape in flight has a part");
    }
  }
  if (found) return *found;
  std::erase_if(group.accumulators, [&](const auto &accumulator) { return accumulator->overlaps(t, d, columns / 2); });
  group.accumulators.push_back(std::make_unique<Accumulator>(Accumulator{columns, std::vector<float>(64 * columns)}));
  return *group.accumulators.back();
}

// The thread gives its registers to a product.
void give_registers(Warpgroup &group, WgmmaProduct &product, int t, float *d, const uint32_t *a, Loc loc) {
  const int columns = product.shape.columns, count = columns / 2;
  const bool fenced = group.members[t].fenced;
  if (a) {
    if (!fenced) fail(loc, "wgmma with A in registers, and no wgmma_fence since the last wait");
    product.a_registers[t] = a;
    memcpy(product.a_values[t], a, sizeof product.a_values[t]);
  }
  if (!product.accumulator) product.accumulator = &find_accumulator(group, t, d, columns, loc);
  Accumulator &accumulator = *product.accumulator;
  if (accumulator.in_flight[t]++) {
    if (accumulator.registers[t] != d) fail(loc, "the threads of a warpgroup issue wgmma with different accumulators");
    return;
  }
  bool touched = !product.operands.keep || !accumulator.known[t] || accumulator.registers[t] != d;
  for (int i = 0; i < count; ++i) {
    float &value = accumulator.values[accumulator.index(t, i)];
    touched = touched || !same_bits(value, d[i]);
    memcpy(&value, &d[i], sizeof value);
    memcpy(&d[i], &IN_FLIGHT_BITS, sizeof d[i]);
  }
  if (touched && !fenced)
    fail(loc, "wgmma with accumulators that were accessed since the last wait, and no wgmma_fence since");
  accumulator.registers[t] = d;
}

void take_back_registers(const Warpgroup &group, const WgmmaProduct &product) {
  Accumulator &accumulator = *product.accumulator;
  for (int t = 0; t < THREADS; ++t) {
    if (--accumulator.in_flight[t]) continue;
    float *d = accumulator.registers[t];
    for (int i = 0; i < accumulator.columns / 2; ++i) {
      if (!holds(d[i], IN_FLIGHT_BITS))
        fail_for(group.thread(t), product.loc, format("accumulator %d was written while this wgmma was in flight", i));
      memcpy(&d[i], &accumulator.values[accumulator.index(t, i)], sizeof d[i]);
    }
    accumulator.known[t] = true;
  }
}

void retire(Warpgroup &group, const WgmmaProduct &product) {
  if (product.shape.a_in_registers)
    for (int t = 0; t < THREADS; ++t)
      if (memcmp(product.a_registers[t], product.a_values[t], sizeof product.a_values[t]))
        fail_for(group.thread(t), product.loc, "A's registers were written while this wgmma was in flight");
  end_reads(group, product);
  multiply(product);
  take_back_registers(group, product);
}

}  // namespace

void Warpgroup::reset() {
  std::fill(std::begin(members), std::end(members), Member{});
  retired = 0;
  accumulators.clear();
  exited = 0;
}

// The awaited groups retire.
void Warpgroup::run() {
  while (!products.empty() && products.front().group < committed - pending) {
    retire(*this, products.front());
    products.pop_front();
    ++retired;
  }
  for (int t = 0; t < THREADS; ++t) {
    members[t].fenced = false;
    thread(t).traps_invalid = !products.empty();
  }
  arrived = 0;
  wake(*this);
}

std::string Warpgroup::state() const {
  return format("wgmma_wait<%d>, %d of %d threads have come, %zu products in flight, %d groups committed", pending,
                arrived, THREADS, products.size(), committed);
}

void wgmma(const WgmmaShape &shape, const WgmmaOperands &operands, float *d, const uint32_t *a, Loc loc) {
  Thread &self = *machine.thread;
  Warpgroup &group = warpgroup("wgmma", loc);
  const int t = self.number % THREADS;
  Warpgroup::Member &member = group.members[t];
  if (member.issued == group.issued()) {
    if (group.arrived)
      fail(loc, "wgmma, while %d threads of its warpgroup are at the wait of %s", group.arrived,
           place(group.wait_loc).c_str());
    begin(group, shape, operands, loc);
  }
  WgmmaProduct &product = group.products[member.issued++ - group.retired];
  check_same(product, shape, operands, member.committed, loc);
  begin_reads(product, loc);
  give_registers(group, product, t, d, a, loc);
  self.traps_invalid = true;
  trap_invalid(true);
}

void wgmma_fence_registers(Loc loc) {
  warpgroup("wgmma_fence", loc).members[machine.thread->number % THREADS].fenced = true;
}

void wgmma_commit_group(Loc loc) {
  ++warpgroup("wgmma_commit", loc).members[machine.thread->number % THREADS].committed;
}

void wgmma_wait_group(int pending, Loc loc) {
  Thread &self = *machine.thread;
  Warpgroup &group = warpgroup("wgmma_wait", loc);
  const int t = self.number % THREADS;
  const Warpgroup::Member &member = group.members[t];
  if (member.issued != group.issued())
    fail(loc, "wgmma_wait after %zu wgmma, while other threads of the warpgroup have issued %zu, the last at %s",
         member.issued, group.issued(), place(group.products.back().loc).c_str());
  if (group.arrived == 0) {
    group.pending = pending;
    group.wait_loc = loc;
    group.committed = member.committed;
  }
  if (group.pending != pending || !same(group.wait_loc, loc) || group.committed != member.committed)
    fail(loc,
         "wgmma_wait<%d> after %d groups, while other threads of the warpgroup are at wgmma_wait<%d> of %s after %d",
         pending, member.committed, group.pending, place(group.wait_loc).c_str(), group.committed);
  if (++group.arrived == THREADS) {
    if (group.products.empty() || group.products.front().group >= member.committed - pending) {
      group.arrived = 0;
      wake(group);
    } else {
      submit(group);
    }
  }
  if (group.arrived) wait_for(group, loc);
  trap_invalid(self.traps_invalid);
}

void leave_warpgroup() {
  const Thread &self = *machine.thread;
  const auto number = static_cast<size_t>(self.number / THREADS);
  if (number >= machine.block->warpgroups.size()) return;
  Warpgroup &group = *machine.block->warpgroups[number];
  if (!group.products.empty())
    fail(group.products.front().loc, "exited with %zu wgmma in flight, of which this is the first",
         group.products.size());
  if (group.arrived) fail(group.wait_loc, "exited, while other threads of its warpgroup are at this wgmma_wait");
  ++group.exited;
}

}  // namespace emu
