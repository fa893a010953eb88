// When the chunks of a bulk copy move. A load's destination is NaN from its issue until it lands, any time later. A
// store takes its source at the issue and compares it at the wait: nobody may have written there in between.
#include "transfer.h"

#include <algorithm>
#include <cstring>

#include "formats.h"
#include "state.h"

namespace emu {

namespace {

constexpr unsigned char UNKNOWN[Chunk::BYTES] = {NAN_BYTE, NAN_BYTE, NAN_BYTE, NAN_BYTE, NAN_BYTE, NAN_BYTE,
                                                 NAN_BYTE, NAN_BYTE, NAN_BYTE, NAN_BYTE, NAN_BYTE, NAN_BYTE,
                                                 NAN_BYTE, NAN_BYTE, NAN_BYTE, NAN_BYTE};

uint32_t bytes_in_global(const Transfer &transfer) {
  uint32_t bytes = 0;
  for (const Chunk &chunk : transfer.chunks) bytes += chunk.count();
  return bytes;
}

template <class T, class Add>
void add_to(unsigned char *place, const unsigned char *from, uint32_t bytes, Add add) {
  for (uint32_t i = 0; i < bytes; i += sizeof(T)) {
    T there, more;
    memcpy(&there, place + i, sizeof(T));
    memcpy(&more, from + i, sizeof(T));
    there = add(there, more);
    memcpy(place + i, &there, sizeof(T));
  }
}

void write_chunk(const Chunk &chunk, const unsigned char *from, Sum sum) {
  unsigned char *place = chunk.place();
  from += chunk.first;
  switch (sum) {
    case Sum::NONE:
      memcpy(place, from, chunk.count());
      break;
    case Sum::F32:
      add_to<float>(place, from, chunk.count(), [](float x, float y) { return x + y; });
      break;
    case Sum::F16:
      add_to<uint16_t>(place, from, chunk.count(),
                       [](uint16_t x, uint16_t y) { return f16_of(from_f16(x) + from_f16(y)); });
      break;
    case Sum::BF16:
      add_to<uint16_t>(place, from, chunk.count(),
                       [](uint16_t x, uint16_t y) { return bf16_of(from_bf16(x) + from_bf16(y)); });
      break;
  }
}

Access access_of(const Thread &thread, const Transfer &transfer) {
  return {thread, transfer.name, transfer.loc, false, true};
}

}  // namespace

void issue_load(Transfer transfer, uint32_t address) {
  begin_proxy_access_of_global(transfer.name, transfer.loc);
  Block &block = *machine.block;
  const Thread &self = *machine.thread;
  MBarrier &barrier = find_barrier(address, transfer.name, transfer.loc);
  if (!barrier.fenced)
    fail(transfer.loc, "%s: no fence.mbarrier_init of the thread that made %s came before", transfer.name,
         barrier.name().c_str());
  unsigned char *memory = block.shared.memory.begin();
  for (const Chunk &chunk : transfer.chunks) {
    block.shadow.begin_copy(chunk.offset, Chunk::BYTES, access_of(self, transfer));
    memcpy(memory + chunk.offset, UNKNOWN, Chunk::BYTES);
    block.proxy.change(chunk.offset, UNKNOWN, Chunk::BYTES);
  }
  machine.stats.tiles_loaded_bytes += transfer.chunks.size() * Chunk::BYTES;
  machine.stats.global_read_bytes += bytes_in_global(transfer);
  Load &load = block.loads.emplace_back(self, barrier, std::move(transfer));
  load.self = std::prev(block.loads.end());
  submit(load);
}

void Load::run() {
  Block &block = *machine.block;
  unsigned char *memory = block.shared.memory.begin();
  for (const Chunk &chunk : transfer.chunks) {
    unsigned char *to = memory + chunk.offset;
    if (memcmp(to, UNKNOWN, Chunk::BYTES))
      fail_for(thread, transfer.loc,
               format("%s: shared memory %+ld was written while this copy into it was in flight", transfer.name,
                      static_cast<long>(chunk.offset)));
    memset(to, transfer.fill, Chunk::BYTES);
    if (chunk.count()) memcpy(to + chunk.first, chunk.place(), chunk.count());
    block.proxy.change(chunk.offset, to, Chunk::BYTES);
    block.shadow.end_copy(chunk.offset, Chunk::BYTES, barrier.number, barrier.ended + 1);
  }
  complete_tx(barrier, static_cast<uint32_t>(transfer.chunks.size()) * Chunk::BYTES);
  block.loads.erase(self);
}

void issue_store(Transfer transfer, Sum sum) {
  begin_proxy_access_of_global(transfer.name, transfer.loc);
  Thread &self = *machine.thread;
  auto &chunks = transfer.chunks;
  chunks.erase(std::remove_if(chunks.begin(), chunks.end(), [](const Chunk &chunk) { return !chunk.count(); }),
               chunks.end());
  machine.stats.global_written_bytes += bytes_in_global(transfer);
  Store store{std::move(transfer), sum, self.stores.committed, {}};
  for (const Chunk &chunk : store.transfer.chunks) {
    const unsigned char *from =
        begin_proxy_read(Shared::BASE + chunk.offset, Chunk::BYTES, Chunk::BYTES, access_of(self, store.transfer));
    store.source.insert(store.source.end(), from, from + Chunk::BYTES);
  }
  if (machine.pace == Pace::EAGER || (machine.pace == Pace::RANDOM && machine.random.below(2))) store.write();
  self.stores.in_flight.push_back(std::move(store));
}

void Store::write() {
  const unsigned char *from = source.data();
  for (const Chunk &chunk : transfer.chunks) {
    write_chunk(chunk, from, sum);
    from += Chunk::BYTES;
  }
  written = true;
}

void Stores::finish(Store &store) const {
  const Transfer &transfer = store.transfer;
  if (!store.read) {
    const unsigned char *memory = machine.block->shared.memory.begin(), *from = store.source.data();
    for (const Chunk &chunk : transfer.chunks) {
      if (memcmp(memory + chunk.offset, from, Chunk::BYTES))
        fail_for(*thread, transfer.loc,
                 format("%s: shared memory %+ld was written before this copy from it was waited for", transfer.name,
                        static_cast<long>(chunk.offset)));
      end_proxy_read(Shared::BASE + chunk.offset, Chunk::BYTES, access_of(*thread, transfer));
      from += Chunk::BYTES;
    }
    store.read = true;
  }
  if (until_written && !store.written) store.write();
}

// In any order.
void Stores::run() {
  std::vector<Store *> left;
  for (Store &store : in_flight)
    if (!done(store)) left.push_back(&store);
  while (!left.empty()) {
    std::swap(left[machine.random.below(left.size())], left.back());
    finish(*left.back());
    left.pop_back();
  }
  wake(*this);
}

std::string Stores::state() const {
  return format("cp.async.bulk, %zu copies from shared memory in flight, %d groups committed", in_flight.size(),
                committed);
}

void bulk_commit() { ++machine.thread->stores.committed; }

void bulk_wait(int pending, bool until_written, Loc loc) {
  Stores &stores = machine.thread->stores;
  stores.awaited = stores.committed - pending;
  stores.until_written = until_written;
  auto &flight = stores.in_flight;
  if (std::all_of(flight.begin(), flight.end(), [&](const Store &store) { return stores.done(store); })) return;
  if (machine.pace == Pace::EAGER) {
    stores.run();
  } else {
    submit(stores);
    wait_for(stores, loc);
  }
  flight.erase(
      std::remove_if(flight.begin(), flight.end(), [](const Store &store) { return store.read && store.written; }),
      flight.end());
}

void leave_stores() {
  Stores &stores = machine.thread->stores;
  for (Store &store : stores.in_flight) {
    if (!store.read)
      fail(store.transfer.loc, "exited before %s had read its shared memory, for which it did not wait",
           store.transfer.name);
    if (!store.written) store.write();
  }
  stores.in_flight.clear();
}

void leave_loads() {
  const Block &block = *machine.block;
  if (!block.loads.empty()) {
    const Load &load = block.loads.front();
    fail_for(load.thread, load.transfer.loc,
             format("%s is in flight at the exit of the block's last thread", load.transfer.name));
  }
  for (const auto &[offset, barrier] : block.mbarriers.made) {
    if (barrier.tx)
      fail(barrier.made_at, "the block exits, and %s has %s", barrier.name().c_str(), barrier.counts().c_str());
    if (barrier.copied > barrier.known)
      fail(barrier.made_at, "the block exits, and copies arrived at %s in phase %u, which nobody waited for",
           barrier.name().c_str(), barrier.copied - 1);
  }
}

}  // namespace emu
