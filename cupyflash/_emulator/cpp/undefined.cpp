// Undefined operations of a unit: what g++ -fsanitize=alignment,... calls, and expects never to return, in place of the
// sanitizer's library. All that is known of an operation begins with its place in the sources.
#include <cstdint>

#include "state.h"

namespace {

struct Site {
  const char *file;
  uint32_t line, column;

  emu::Loc loc() const { return {file, static_cast<int>(line)}; }
};

struct Access : Site {
  const void *type;
  uint8_t log_alignment, kind;
};

}  // namespace

extern "C" {

void __ubsan_handle_type_mismatch_v1_abort(Access *access, void *address) {
  emu::fail(access->loc(), "an access at %s, which is not %u-byte aligned", emu::describe_address(address).c_str(),
            1u << access->log_alignment);
}

void __ubsan_handle_out_of_bounds_abort(Site *site, size_t index) {
  emu::fail(site->loc(), "index %zd is not in the array", static_cast<ssize_t>(index));
}

void __ubsan_handle_shift_out_of_bounds_abort(Site *site, size_t, size_t count) {
  emu::fail(site->loc(), "a shift by %zd, or of a negative number", static_cast<ssize_t>(count));
}

void __ubsan_handle_divrem_overflow_abort(Site *site, size_t, size_t) { emu::fail(site->loc(), "a division by zero"); }
void __ubsan_handle_add_overflow_abort(Site *site, size_t, size_t) { emu::fail(site->loc(), "an overflow in +"); }
void __ubsan_handle_sub_overflow_abort(Site *site, size_t, size_t) { emu::fail(site->loc(), "an overflow in -"); }
void __ubsan_handle_mul_overflow_abort(Site *site, size_t, size_t) { emu::fail(site->loc(), "an overflow in *"); }
void __ubsan_handle_negate_overflow_abort(Site *site, size_t) { emu::fail(site->loc(), "an overflow in -"); }
}
