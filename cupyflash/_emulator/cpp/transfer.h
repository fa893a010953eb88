// Copies between shared and global memory by the bulk copy engine, of contiguous bytes or of boxes of tensors: here
// both are lists of chunks. Internal to the runtime.
#pragma once
#include <cstdint>
#include <list>
#include <vector>

#include "object.h"
#include "runtime.h"

namespace emu {

struct MBarrier;

// 16 bytes of shared memory. Those from `first` to `end` have a place in global memory, which is at `global` + i for
// byte i.
struct Chunk {
  static constexpr uint32_t BYTES = 16;
  uint32_t offset;
  uintptr_t global;
  uint8_t first = 0, end = BYTES;

  unsigned char *place() const { return reinterpret_cast<unsigned char *>(global + first); }
  uint32_t count() const { return end - first; }
};

struct Transfer {
  const char *name;
  Loc loc;
  std::vector<Chunk> chunks;
  unsigned char fill = 0;  // of bytes that have no place
};

// Global to shared, from its issue to its landing; then it arrives at the barrier with its bytes.
struct Load : Operation {
  const Thread &thread;
  MBarrier &barrier;
  Transfer transfer;
  std::list<Load>::iterator self;

  Load(const Thread &thread, MBarrier &barrier, Transfer transfer)
      : thread(thread), barrier(barrier), transfer(std::move(transfer)) {}
  void run() override;
};

enum class Sum { NONE, F32, F16, BF16 };  // what a store does with what is there

// Shared to global. The source belongs to it until it is read.
struct Store {
  Transfer transfer;
  Sum sum;
  int group;
  std::vector<unsigned char> source;  // as it was at the issue
  bool read = false, written = false;

  void write();
};

// Of one thread: in groups below `committed`, and in the one that is open.
struct Stores : Object, Operation {
  Thread *thread = nullptr;
  std::vector<Store> in_flight;
  int committed = 0;
  int awaited = 0;             // the thread waits for groups below
  bool until_written = false;  // or only until they are read

  bool done(const Store &store) const {
    return store.group >= awaited || (store.read && (store.written || !until_written));
  }
  void finish(Store &store) const;  // what the thread waits for
  void run() override;
  std::string state() const override;
};

// Issues of the running thread. The chunks' places in global memory are known to be good.
void issue_load(Transfer transfer, uint32_t barrier);
void issue_store(Transfer transfer, Sum sum);

}  // namespace emu
