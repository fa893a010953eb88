// Messages: a place in the sources is what the twin was given, the calls above it are what addr2line makes of the
// program counters, inlined functions included.
#include "report.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "state.h"

namespace emu {

namespace {

// The object that holds a program counter, and the offset of the call before it.
bool locate(void *counter, const char *&file, uintptr_t &offset) {
  Dl_info info;
  if (!dladdr(counter, &info) || !info.dli_fname) return false;
  file = info.dli_fname;
  offset = reinterpret_cast<uintptr_t>(counter) - reinterpret_cast<uintptr_t>(info.dli_fbase) - 1;
  return true;
}

// "file:line" of the calls in a trace that the unit made, innermost first.
std::vector<std::string> calls(const Trace &trace) {
  const char *runtime = nullptr, *unit = nullptr, *file;
  uintptr_t offset;
  locate(reinterpret_cast<void *>(&emu_launch), runtime, offset);
  locate(reinterpret_cast<void *>(machine.kernel), unit, offset);
  if (!unit || unit == runtime) return {};
  std::string command = format("addr2line -f -i -e '%s'", unit);
  for (void *counter : trace)
    if (locate(counter, file, offset) && !strcmp(file, unit)) command += format(" %#zx", static_cast<size_t>(offset));
  command += " 2>/dev/null";
  std::vector<std::string> found;
  FILE *pipe = popen(command.c_str(), "r");
  if (!pipe) return found;
  char function[4096], place[4096];
  while (fgets(function, sizeof function, pipe) && fgets(place, sizeof place, pipe)) {
    std::string line(place, strcspn(place, " \n"));  // " (discriminator 3)" follows
    if (!strcmp(function, "emu_entry\n")) break;
    if (line.find("/_emulator/") == std::string::npos && line[0] != '?') found.push_back(line);
  }
  pclose(pipe);
  return found;
}

std::string shortened(const std::string &path) {
  const size_t root = path.rfind("/cuda/");
  if (root != std::string::npos) return path.substr(root + 6);
  const size_t name = path.rfind('/');
  return name == std::string::npos ? path : path.substr(name + 1);
}

}  // namespace

std::string format(const char *text, ...) {
  va_list arguments;
  va_start(arguments, text);
  char *buffer = nullptr;
  const int length = vasprintf(&buffer, text, arguments);
  va_end(arguments);
  std::string result(buffer, length < 0 ? 0 : length);
  free(buffer);
  return result;
}

std::string place(Loc loc) { return format("%s:%d", shortened(loc.file).c_str(), loc.line); }

bool same(Loc a, Loc b) { return a.line == b.line && (a.file == b.file || !strcmp(a.file, b.file)); }

std::string subject(const Thread &thread) {
  const Index &block = thread.block->index;
  return format("block (%u,%u,%u) thread %d", block.x, block.y, block.z, thread.number);
}

Trace trace_here() {
  void *counters[64];
  const int count = backtrace(counters, 64);
  return Trace(counters, counters + count);
}

std::string Failure::message() const {
  std::string text = heading;
  for (const Note &note : notes) {
    std::vector<std::string> places;
    for (const std::string &call : calls(note.trace)) places.push_back(shortened(call));
    std::string first = note.loc.line ? place(note.loc) : "";
    // The calls begin at the place itself, unless inlining lost it.
    size_t next = 0;
    while (next < places.size() && places[next] != first) ++next;
    next = next == places.size() ? 0 : next + 1;
    if (first.empty() && !places.empty()) first = places[0], next = 1;
    if (!text.empty()) text += "\n";
    text += first.empty() ? note.text : first + " " + note.text;
    std::string last = first;
    for (; next < places.size(); ++next)
      if (places[next] != last) text += "\n    called at " + (last = places[next]);
  }
  return text;
}

void fail_with(Failure failure) {
  machine.failure = std::move(failure);
  Context abandoned;
  change(abandoned, machine.launcher);
  __builtin_unreachable();
}

void fail_for(const Thread &thread, Loc loc, const std::string &text, Trace trace) {
  fail_with({{}, {{loc, subject(thread) + ": " + text, std::move(trace)}}});
}

void fail(Loc loc, const char *text, ...) {
  va_list arguments;
  va_start(arguments, text);
  char buffer[1024];
  vsnprintf(buffer, sizeof buffer, text, arguments);
  va_end(arguments);
  fail_for(*machine.thread, loc, buffer, trace_here());
}

}  // namespace emu
