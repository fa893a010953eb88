// The C interface of the emulator's runtime, for ctypes. One launch runs at a time in a process.
#pragma once
#include <stddef.h>

extern "C" {

// What a launch did, summed over its blocks.
struct EmuStats {
  unsigned long long tiles_loaded_bytes;  // that asynchronous copies put into shared memory, zero fill included
  unsigned long long global_read_bytes;   // of allocations, by any access
  unsigned long long global_written_bytes;
  unsigned long long mma;  // warp-wide matrix products
  unsigned long long ldmatrix;
  unsigned long long cp_async;  // instructions of single threads
  unsigned long long barriers;  // block-wide, counted once for the block
  unsigned long long switches;  // from one thread to another
  unsigned long long shuffles;  // and votes, of a warp
  unsigned long long blocks;
  unsigned long long tma;    // tensor copies, either way
  unsigned long long bulk;   // copies of contiguous bytes, either way
  unsigned long long wgmma;  // matrix products of a warpgroup
};

// Memory for a kernel: its end (to 16 bytes) is flush against a page that faults, and so is a page before it. Filled
// with 0xff (NaN in every float type) or zeros. Null when there is no memory. The name is for messages.
void *emu_alloc(size_t bytes, const char *name, int fill_nan);
void emu_free(void *pointer);

// cuTensorMapEncodeTiled: the same arguments and refusals, and a map of the same 128 bytes that the emulator's copies
// read. Returns null, or why there is no such map.
const char *emu_tensor_map(void *map, int dtype, unsigned rank, void *address, const unsigned long long *size,
                           const unsigned long long *strides, const unsigned *box, const unsigned *steps,
                           int interleave, int swizzle, int promotion, int fill);

// Runs a kernel on params (copied, 64-byte aligned). The seed chooses the order of blocks and threads and when
// asynchronous operations happen: seed % 4 is random, first in first out, last in first out, or a strict order of
// warps; seed / 4 % 3 is as late as possible, at random, or at once; 3 - (seed + seed / 12) % 3 blocks run at a time.
// Returns 0, or 1 and a message:
// "file:line block (x,y,z) thread t: text", and where the line was called from.
int emu_launch(void (*kernel)(const void *params), unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block,
               unsigned shared_bytes, const void *params, size_t params_bytes, unsigned long long seed,
               struct EmuStats *stats, char *message, size_t message_bytes);
}
