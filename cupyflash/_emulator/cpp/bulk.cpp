// Bulk copies of contiguous bytes.
#include "state.h"

namespace emu {

namespace {

Transfer span(const char *name, uint32_t shared, const void *global, uint32_t bytes, Loc loc) {
  if (!bytes || bytes % Chunk::BYTES) fail(loc, "%s of %u bytes: a multiple of 16", name, bytes);
  machine.block->shared.at(shared, bytes, Chunk::BYTES, name, loc);
  check_range(global, bytes, name, loc);
  const auto begin = reinterpret_cast<uintptr_t>(global);
  if (begin % Chunk::BYTES) fail(loc, "%s at %s, which is not 16-byte aligned", name, describe_address(global).c_str());
  Transfer transfer{name, loc, {}};
  for (uint32_t at = 0; at < bytes; at += Chunk::BYTES)
    transfer.chunks.push_back({shared - Shared::BASE + at, begin + at});
  ++machine.stats.bulk;
  return transfer;
}

}  // namespace

void bulk_load(uint32_t shared, const void *global, uint32_t bytes, uint32_t barrier, Loc loc) {
  issue_load(span("cp.async.bulk", shared, global, bytes, loc), barrier);
}

void bulk_store(void *global, uint32_t shared, uint32_t bytes, Loc loc) {
  issue_store(span("cp.async.bulk", shared, global, bytes, loc), Sum::NONE);
}

void bulk_reduce_add(float *global, uint32_t shared, uint32_t bytes, Loc loc) {
  issue_store(span("cp.reduce.async.bulk", shared, global, bytes, loc), Sum::F32);
}

}  // namespace emu
