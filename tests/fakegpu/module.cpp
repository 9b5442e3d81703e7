// Kernels: those that the worker brings, known by name and computed on the processor. What is in a module is not looked at.
#include <algorithm>
#include <cstring>
#include <map>

#include "fake.h"

using namespace fake;

namespace {

struct Part {
  uint64_t offset, bytes, first_word;
};

// sum over 8-byte words d[i] of (lo * hi + x), x = d[i] ^ (first_word + i + 1) * P; zeros follow a last word that is shorter.
uint64_t gsum64(const char *bytes, uint64_t length, uint64_t first_word) {
  const uint64_t P = 0x9E3779B97F4A7C15ull;
  uint64_t sum = 0;
  for (uint64_t at = 0, i = 0; at < length; at += 8, i++) {
    uint64_t word = 0;
    memcpy(&word, bytes + at, std::min<uint64_t>(8, length - at));
    uint64_t x = word ^ ((first_word + i + 1) * P);
    sum += (x & 0xffffffffu) * (x >> 32) + x;
  }
  return sum;
}

// gsum64(const u8 *base, const Part *parts, u64 *sums): gives `sums[p]`, one part for each row of the grid. A wrong address is met when
// the kernel runs, not when it is launched; the context is lost then.
void run_gsum64(Device *device, uint64_t base, uint64_t parts, uint64_t sums, unsigned rows) {
  Span list, out;
  bool good = span_at(parts, rows * sizeof(Part), "gsum64", &list) && span_at(sums, rows * 8, "gsum64", &out);
  for (unsigned row = 0; good && row < rows; row++) {
    Part part;
    memcpy(&part, list.bytes + row * sizeof part, sizeof part);
    Span bytes;
    good = span_at(base + part.offset, part.bytes, "gsum64", &bytes);
    if ((base + part.offset) % 8) violation("gsum64: a part does not start at a word"), good = false;
    if (!good) break;
    uint64_t sum = gsum64(bytes.bytes, part.bytes, part.first_word);
    memcpy(out.bytes + row * 8, &sum, 8);
  }
  if (!good) device->broken = ILLEGAL_ADDRESS;
}

void launch_gsum64(Stream *stream, Device *device, void **arguments, unsigned rows) {
  uint64_t given[3];
  for (int i = 0; i < 3; i++) memcpy(&given[i], arguments[i], 8);
  stream->push({"gsum64", [=] { run_gsum64(device, given[0], given[1], given[2], rows); }});
}

using Launch = void (*)(Stream *, Device *, void **, unsigned rows);
const std::map<std::string, Launch> *kernels() {
  static auto *all = new std::map<std::string, Launch>{{"gsum64", launch_gsum64}};
  return all;
}

int module_of_all;

}  // namespace

FAKE_API int cuModuleLoadData(void **out, const void *image) {
  WITH_CONTEXT(cuModuleLoadData);
  if (!image) return INVALID_VALUE;
  *out = &module_of_all;
  return SUCCESS;
}

FAKE_API int cuModuleUnload(void *module) {
  WITH_CONTEXT(cuModuleUnload);
  return module == &module_of_all ? SUCCESS : INVALID_HANDLE;
}

FAKE_API int cuModuleGetFunction(void **out, void *module, const char *name) {
  WITH_CONTEXT(cuModuleGetFunction);
  if (module != &module_of_all) return INVALID_HANDLE;
  auto kernel = kernels()->find(name);
  if (kernel == kernels()->end()) return NOT_FOUND;
  *out = const_cast<std::string *>(&kernel->first);
  return SUCCESS;
}

FAKE_API int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                            unsigned block_z, unsigned, void *stream, void **arguments, void **) {
  WITH_CONTEXT(cuLaunchKernel);
  Stream *on = stream_of(stream, device, "cuLaunchKernel");
  if (!on || !function) return INVALID_HANDLE;
  if (!grid_x || !grid_y || !grid_z || !block_x || !block_y || !block_z || block_x * block_y * block_z > 1024) return INVALID_VALUE;
  kernels()->at(*static_cast<std::string *>(function))(on, device, arguments, grid_y);
  return SUCCESS;
}
