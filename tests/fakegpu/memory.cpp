// Device, pinned and registered memory, and copies. A device address is never one that the processor can follow.
#include <cstring>
#include <map>
#include <string>

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fake.h"

using namespace fake;

namespace fake {

// Not canonical on x86-64 and aarch64: a program that reads device memory as its own dies, as it would with a real device.
static const uint64_t FAR = 1ull << 56;

struct Table {
  std::mutex mutex;
  std::map<uint64_t, Memory> memory, freed;
};
static Table &table() {
  static auto *all = new Table;
  return *all;
}

static Memory within(const std::map<uint64_t, Memory> &all, uint64_t pointer) {
  auto next = all.upper_bound(pointer);
  if (next == all.begin()) return nullptr;
  const Memory &memory = std::prev(next)->second;
  return pointer < memory->base + memory->size ? memory : nullptr;
}

Memory memory_at(DevicePtr pointer) {
  std::lock_guard<std::mutex> lock(table().mutex);
  return within(table().memory, pointer);
}

void remember(Memory memory) {
  std::lock_guard<std::mutex> lock(table().mutex);
  table().memory[memory->base] = memory;
}

void forget(const Memory &memory) {
  memory->live = false;
  std::lock_guard<std::mutex> lock(table().mutex);
  table().memory.erase(memory->base);
  if (!memory->on_device()) return;
  table().freed[memory->base] = memory;
  // The addresses stay taken, so that a use after free is distinguished from a use of something newer.
  mmap(memory->bytes, memory->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
}

bool span_at(DevicePtr pointer, size_t size, const char *by, Span *out) {
  Memory memory = memory_at(pointer), freed;
  if (!memory) {
    std::lock_guard<std::mutex> lock(table().mutex);
    freed = within(table().freed, pointer);
  }
  if (!memory) {
    violation("%s: %#llx is %s", by, pointer, freed ? "freed memory" : "not device memory");
    return false;
  }
  uint64_t offset = pointer - memory->base;
  if (offset + size > memory->asked) {
    violation("%s: %zu bytes at offset %llu of an allocation of %zu", by, size, (unsigned long long)offset, memory->asked);
    return false;
  }
  *out = {memory, memory->bytes + offset, size};
  return true;
}

bool Span::usable(const char *by) const {
  if (!memory || memory->live) return true;
  violation("%s: the memory was freed before the operation ran", by);
  return false;
}

Span host_span(const void *pointer, size_t size) {
  Memory memory = memory_at(reinterpret_cast<uint64_t>(pointer));
  return {memory, static_cast<char *>(const_cast<void *>(pointer)), size};
}

static size_t whole_pages(size_t bytes) { return (bytes + 4095) & ~size_t(4095); }

char *map_shared(const std::string &path, size_t bytes, bool create) {
  int file = open(path.c_str(), O_RDWR | O_CLOEXEC | (create ? O_CREAT | O_EXCL : 0), 0600);
  if (file < 0) return nullptr;
  void *at = MAP_FAILED;
  if (!create || ftruncate(file, off_t(bytes)) == 0) at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return at == MAP_FAILED ? nullptr : static_cast<char *>(at);
}

int map_file(const std::string &file, size_t bytes, Memory *out) {
  auto memory = std::make_shared<Allocation>();
  memory->kind = Allocation::Imported;
  memory->file = file;
  memory->asked = bytes;
  memory->size = whole_pages(bytes);
  memory->bytes = map_shared(folder() + "/memory/" + file, memory->size, false);
  // The maker freed it, or lives in another world.
  if (!memory->bytes) return INVALID_VALUE;
  memory->base = FAR + reinterpret_cast<uint64_t>(memory->bytes);
  *out = memory;
  return SUCCESS;
}

// Bytes in use on a device by all processes; what dead ones left is given back, as the driver does.
static size_t used_bytes(const Device *device) {
  std::string path = folder() + "/memory";
  std::string prefix = "gpu" + std::to_string(device->number) + "-";
  size_t used = 0;
  DIR *listing = opendir(path.c_str());
  if (!listing) return 0;
  while (dirent *entry = readdir(listing)) {
    std::string name = entry->d_name, file = path + "/" + name;
    struct stat about = {};
    if (name.rfind(prefix, 0) != 0 || name.find(".open") != std::string::npos) continue;
    if (!alive(atoi(name.c_str() + prefix.size()))) unlink(file.c_str());
    else if (stat(file.c_str(), &about) == 0) used += size_t(about.st_size);
  }
  closedir(listing);
  return used;
}

// Copies of one process to the host go one after the other, whatever streams they are in: there is one engine for them.
static void wait_for_engine(size_t bytes) {
  static const long speed = setting("FAKEGPU_TO_HOST_MBPS", 0);
  static auto *engine = new std::mutex;
  if (!speed) return;
  std::lock_guard<std::mutex> lock(*engine);
  nap(long(bytes) / speed);
}

static void copy(const char *name, Stream *stream, Device *device, Span to, Span from, bool wait) {
  struct Done {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  auto done = std::make_shared<Done>();
  const bool to_host = !to.memory || !to.memory->on_device();
  stream->push({name, [=] {
    if (to_host) wait_for_engine(to.size);
    if (!to.usable(name) || !from.usable(name)) device->broken = ILLEGAL_ADDRESS;
    else if (!device->broken) memmove(to.bytes, from.bytes, to.size);
    std::lock_guard<std::mutex> lock(done->mutex);
    done->done = true;
    done->changed.notify_all();
  }});
  if (!wait) return;
  std::unique_lock<std::mutex> lock(done->mutex);
  done->changed.wait(lock, [&] { return done->done; });
}

enum Side { HOST, DEVICE };

static int copy_between(const char *name, Side to_side, uint64_t to, Side from_side, uint64_t from, size_t bytes, void *stream,
                        bool wait, Device *device) {
  Stream *on = stream_of(stream, device, name);
  if (!on) return INVALID_HANDLE;
  Span target, source;
  auto find = [&](Side side, uint64_t at, Span *out) {
    if (side == DEVICE) return span_at(at, bytes, name, out);
    *out = host_span(reinterpret_cast<void *>(at), bytes);
    return true;
  };
  if (!find(to_side, to, &target) || !find(from_side, from, &source)) return INVALID_VALUE;
  // The driver cannot copy memory of the host asynchronously unless it is pinned: the call returns when the bytes are copied.
  copy(name, on, device, target, source, wait || !target.memory || !source.memory);
  return device->broken;
}

}  // namespace fake

FAKE_API int cuMemGetInfo_v2(size_t *free, size_t *total) {
  WITH_CONTEXT(cuMemGetInfo_v2);
  *total = memory_bytes();
  size_t used = used_bytes(device);
  *free = used < *total ? *total - used : 0;
  return SUCCESS;
}

FAKE_API int cuMemAlloc_v2(DevicePtr *out, size_t bytes) {
  WITH_CONTEXT(cuMemAlloc_v2);
  static std::atomic<int> serial{0};
  if (!bytes) return INVALID_VALUE;
  if (used_bytes(device) + whole_pages(bytes) > memory_bytes()) return OUT_OF_MEMORY;
  auto memory = std::make_shared<Allocation>();
  memory->asked = bytes;
  memory->size = whole_pages(bytes);
  memory->device = device;
  memory->file = "gpu" + std::to_string(device->number) + "-" + std::to_string(getpid()) + "-" + std::to_string(++serial);
  memory->bytes = map_shared(folder() + "/memory/" + memory->file, memory->size, true);
  if (!memory->bytes) return OUT_OF_MEMORY;
  memory->base = FAR + reinterpret_cast<uint64_t>(memory->bytes);
  remember(memory);
  *out = memory->base;
  return SUCCESS;
}

FAKE_API int cuMemFree_v2(DevicePtr pointer) {
  WITH_CONTEXT(cuMemFree_v2);
  Span span;
  if (!span_at(pointer, 0, "cuMemFree", &span)) return INVALID_VALUE;
  if (span.memory->kind != Allocation::Own || span.memory->base != pointer || span.memory->device != device) {
    violation("cuMemFree of something that cuMemAlloc did not give to this device");
    return INVALID_VALUE;
  }
  drain(device);
  // Freed while another process has it open: undefined, by the manual.
  std::string path = folder() + "/memory", prefix = span.memory->file + ".open-";
  if (DIR *listing = opendir(path.c_str())) {
    while (dirent *entry = readdir(listing)) {
      std::string name = entry->d_name;
      if (name.rfind(prefix, 0) != 0) continue;
      int pid = atoi(name.c_str() + prefix.size());
      if (alive(pid)) violation("cuMemFree of memory that process %d has open", pid);
      else unlink((path + "/" + name).c_str());
    }
    closedir(listing);
  }
  unlink((path + "/" + span.memory->file).c_str());
  forget(span.memory);
  return SUCCESS;
}

FAKE_API int cuMemHostAlloc(void **out, size_t bytes, unsigned) {
  WITH_CONTEXT(cuMemHostAlloc);
  if (!bytes) return INVALID_VALUE;
  auto memory = std::make_shared<Allocation>();
  memory->kind = Allocation::Pinned;
  memory->asked = bytes;
  memory->size = whole_pages(bytes);
  memory->device = device;
  void *at = mmap(nullptr, memory->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return OUT_OF_MEMORY;
  memory->bytes = static_cast<char *>(at);
  memory->base = reinterpret_cast<uint64_t>(at);
  remember(memory);
  *out = at;
  return SUCCESS;
}

FAKE_API int cuMemFreeHost(void *pointer) {
  WITH_CONTEXT(cuMemFreeHost);
  Memory memory = memory_at(reinterpret_cast<uint64_t>(pointer));
  if (!memory || memory->kind != Allocation::Pinned || memory->bytes != pointer) {
    violation("cuMemFreeHost of something that cuMemHostAlloc did not give");
    return INVALID_VALUE;
  }
  drain(device);
  forget(memory);
  munmap(memory->bytes, memory->size);
  return SUCCESS;
}

FAKE_API int cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned) {
  WITH_CONTEXT(cuMemHostRegister_v2);
  if (!pointer || !bytes) return INVALID_VALUE;
  uint64_t base = reinterpret_cast<uint64_t>(pointer);
  if (memory_at(base) || memory_at(base + bytes - 1)) {
    violation("cuMemHostRegister of memory that is registered already");
    return HOST_MEMORY_ALREADY_REGISTERED;
  }
  auto memory = std::make_shared<Allocation>();
  memory->kind = Allocation::Registered;
  memory->asked = memory->size = bytes;
  memory->device = device;
  memory->bytes = static_cast<char *>(pointer);
  memory->base = base;
  remember(memory);
  return SUCCESS;
}

FAKE_API int cuMemHostUnregister(void *pointer) {
  WITH_CONTEXT(cuMemHostUnregister);
  Memory memory = memory_at(reinterpret_cast<uint64_t>(pointer));
  if (!memory || memory->kind != Allocation::Registered || memory->bytes != pointer) {
    violation("cuMemHostUnregister of memory that is not registered");
    return HOST_MEMORY_NOT_REGISTERED;
  }
  drain(device);
  forget(memory);
  return SUCCESS;
}

FAKE_API int cuMemHostGetDevicePointer_v2(DevicePtr *out, void *pointer, unsigned) {
  WITH_CONTEXT(cuMemHostGetDevicePointer_v2);
  if (!memory_at(reinterpret_cast<uint64_t>(pointer))) return INVALID_VALUE;
  *out = reinterpret_cast<uint64_t>(pointer);
  return SUCCESS;
}

FAKE_API int cuMemGetAddressRange_v2(DevicePtr *base, size_t *size, DevicePtr pointer) {
  WITH_CONTEXT(cuMemGetAddressRange_v2);
  Memory memory = memory_at(pointer);
  if (!memory || !memory->on_device()) return NOT_FOUND;
  if (base) *base = memory->base;
  if (size) *size = memory->asked;
  return SUCCESS;
}

FAKE_API int cuPointerGetAttribute(void *out, int attribute, DevicePtr pointer) {
  WITH_CONTEXT(cuPointerGetAttribute);
  Memory memory = memory_at(pointer);
  if (!memory) return INVALID_VALUE;
  switch (attribute) {
    case 2: *static_cast<unsigned *>(out) = memory->on_device() ? 2 : 1; return SUCCESS;  // device, host
    case 9: *static_cast<int *>(out) = memory->device->ordinal; return SUCCESS;
    case 11: *static_cast<uint64_t *>(out) = memory->base; return SUCCESS;
    case 12: *static_cast<size_t *>(out) = memory->asked; return SUCCESS;
    case 13: *static_cast<unsigned *>(out) = memory->kind == Allocation::Own; return SUCCESS;  // can be shared by cuIpc*
    default: return INVALID_VALUE;
  }
}

FAKE_API int cuMemcpyHtoDAsync_v2(DevicePtr to, const void *from, size_t bytes, void *stream) {
  WITH_CONTEXT(cuMemcpyHtoDAsync_v2);
  return copy_between("cuMemcpyHtoDAsync", DEVICE, to, HOST, reinterpret_cast<uint64_t>(from), bytes, stream, false, device);
}

FAKE_API int cuMemcpyDtoHAsync_v2(void *to, DevicePtr from, size_t bytes, void *stream) {
  WITH_CONTEXT(cuMemcpyDtoHAsync_v2);
  if (long most = setting("FAKEGPU_MOST_TO_HOST", 0); most && bytes > size_t(most)) violation("cuMemcpyDtoHAsync of %zu bytes", bytes);
  return copy_between("cuMemcpyDtoHAsync", HOST, reinterpret_cast<uint64_t>(to), DEVICE, from, bytes, stream, false, device);
}

FAKE_API int cuMemcpyDtoDAsync_v2(DevicePtr to, DevicePtr from, size_t bytes, void *stream) {
  WITH_CONTEXT(cuMemcpyDtoDAsync_v2);
  return copy_between("cuMemcpyDtoDAsync", DEVICE, to, DEVICE, from, bytes, stream, false, device);
}

// Addresses of any kind, as with unified addressing.
FAKE_API int cuMemcpyAsync(DevicePtr to, DevicePtr from, size_t bytes, void *stream) {
  WITH_CONTEXT(cuMemcpyAsync);
  return copy_between("cuMemcpyAsync", to < FAR ? HOST : DEVICE, to, from < FAR ? HOST : DEVICE, from, bytes, stream, false, device);
}

FAKE_API int cuMemcpyHtoD_v2(DevicePtr to, const void *from, size_t bytes) {
  WITH_CONTEXT(cuMemcpyHtoD_v2);
  return copy_between("cuMemcpyHtoD", DEVICE, to, HOST, reinterpret_cast<uint64_t>(from), bytes, nullptr, true, device);
}

FAKE_API int cuMemcpyDtoH_v2(void *to, DevicePtr from, size_t bytes) {
  WITH_CONTEXT(cuMemcpyDtoH_v2);
  return copy_between("cuMemcpyDtoH", HOST, reinterpret_cast<uint64_t>(to), DEVICE, from, bytes, nullptr, true, device);
}

template <typename Word>
static int fill(const char *name, DevicePtr to, Word word, size_t count, void *stream, Device *device) {
  Stream *on = stream_of(stream, device, name);
  if (!on) return INVALID_HANDLE;
  Span span;
  if (to % sizeof(Word) || !span_at(to, count * sizeof(Word), name, &span)) return INVALID_VALUE;
  on->push({name, [=] {
    if (!span.usable(name)) device->broken = ILLEGAL_ADDRESS;
    else for (size_t i = 0; i < count; i++) reinterpret_cast<Word *>(span.bytes)[i] = word;
  }});
  return SUCCESS;
}

FAKE_API int cuMemsetD8Async(DevicePtr to, unsigned char value, size_t count, void *stream) {
  WITH_CONTEXT(cuMemsetD8Async);
  return fill<uint8_t>("cuMemsetD8Async", to, value, count, stream, device);
}

FAKE_API int cuMemsetD32Async(DevicePtr to, unsigned value, size_t count, void *stream) {
  WITH_CONTEXT(cuMemsetD32Async);
  return fill<uint32_t>("cuMemsetD32Async", to, value, count, stream, device);
}
