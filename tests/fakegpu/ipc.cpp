// Memory and events that other processes open: files, named in the 64 bytes of a handle.
#include <cstdio>
#include <cstring>
#include <map>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fake.h"

using namespace fake;

namespace {

struct Handle {
  char text[64];
};

// Handles are not text to anybody else; a mark of its own tells one of this stand-in from bytes made up.
const char MARK[] = "fakegpu:";

void write_handle(Handle *out, const std::string &kind, const std::string &file, size_t bytes) {
  memset(out, 0, sizeof *out);
  snprintf(out->text, sizeof out->text, "%s%s:%s:%zu", MARK, kind.c_str(), file.c_str(), bytes);
}

bool read_handle(const Handle &handle, const std::string &kind, std::string *file, size_t *bytes) {
  std::string text(handle.text, strnlen(handle.text, sizeof handle.text)), head = MARK + kind + ":";
  size_t colon = text.rfind(':');
  if (text.rfind(head, 0) != 0 || colon < head.size()) return false;
  *file = text.substr(head.size(), colon - head.size());
  *bytes = strtoull(text.c_str() + colon + 1, nullptr, 10);
  return true;
}

// Files are named KIND-PID-SERIAL.
int maker_of(const std::string &file) { return atoi(file.c_str() + file.find('-') + 1); }

std::string mark_of(const std::string &file) { return folder() + "/memory/" + file + ".open-" + std::to_string(getpid()); }

std::mutex &opening() {
  static auto *mutex = new std::mutex;
  return *mutex;
}

std::map<std::string, Memory> &opened() {
  static auto *all = new std::map<std::string, Memory>;
  return *all;
}

}  // namespace

FAKE_API int cuIpcGetMemHandle(Handle *out, DevicePtr pointer) {
  WITH_CONTEXT(cuIpcGetMemHandle);
  Span span;
  if (!span_at(pointer, 0, "cuIpcGetMemHandle", &span)) return INVALID_VALUE;
  if (span.memory->kind != Allocation::Own) return INVALID_VALUE;
  // Whatever part of an allocation is named, the handle is of the whole.
  write_handle(out, "memory", span.memory->file, span.memory->asked);
  return SUCCESS;
}

FAKE_API int cuIpcOpenMemHandle_v2(DevicePtr *out, Handle handle, unsigned flags) {
  WITH_CONTEXT(cuIpcOpenMemHandle_v2);
  std::string file;
  size_t bytes;
  const unsigned lazy_peer_access = 1;
  if (flags != lazy_peer_access || !read_handle(handle, "memory", &file, &bytes)) return INVALID_VALUE;
  if (maker_of(file) == getpid()) return INVALID_CONTEXT;
  bool other_device = atoi(file.c_str() + strlen("gpu")) != device->number;
  if (other_device && !setting("FAKEGPU_PEER", 1)) return PEER_ACCESS_UNSUPPORTED;
  std::lock_guard<std::mutex> lock(opening());
  if (auto known = opened().find(file); known != opened().end()) {
    known->second->opens++;
    *out = known->second->base;
    return SUCCESS;
  }
  if (!alive(maker_of(file))) return INVALID_VALUE;
  Memory memory;
  if (int error = map_file(file, bytes, &memory)) return error;
  memory->device = device;
  memory->opens = 1;
  close(open(mark_of(file).c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  opened()[file] = memory;
  remember(memory);
  *out = memory->base;
  return SUCCESS;
}

FAKE_API int cuIpcCloseMemHandle(DevicePtr pointer) {
  WITH_CONTEXT(cuIpcCloseMemHandle);
  Memory memory = memory_at(pointer);
  if (!memory || memory->kind != Allocation::Imported || memory->base != pointer) {
    violation("cuIpcCloseMemHandle of memory that is not open");
    return INVALID_VALUE;
  }
  std::lock_guard<std::mutex> lock(opening());
  if (--memory->opens) return SUCCESS;
  drain(device);
  opened().erase(memory->file);
  unlink(mark_of(memory->file).c_str());
  forget(memory);
  return SUCCESS;
}

static std::shared_ptr<EventState> share(EventState *state) {
  return {state, [](EventState *old) { munmap(old, sizeof *old); }};
}

FAKE_API int cuEventCreate(void **out, unsigned flags) {
  WITH_CONTEXT(cuEventCreate);
  static std::atomic<int> serial{0};
  const unsigned no_timing = 2, interprocess = 4;
  Event event{nullptr, device, flags, ""};
  if (!(flags & interprocess)) {
    event.state = std::make_shared<EventState>();
  } else {
    if (!(flags & no_timing)) return INVALID_VALUE;
    event.file = "event-" + std::to_string(getpid()) + "-" + std::to_string(++serial);
    char *at = map_shared(folder() + "/events/" + event.file, sizeof(EventState), true);
    if (!at) return OUT_OF_MEMORY;
    event.state = share(reinterpret_cast<EventState *>(at));
  }
  *out = add_event(event);
  return SUCCESS;
}

FAKE_API int cuIpcGetEventHandle(Handle *out, void *handle) {
  WITH_CONTEXT(cuIpcGetEventHandle);
  auto event = event_of(handle, "cuIpcGetEventHandle");
  if (!event) return INVALID_HANDLE;
  if (event->file.empty()) return INVALID_VALUE;
  write_handle(out, "event", event->file, sizeof(EventState));
  return SUCCESS;
}

FAKE_API int cuIpcOpenEventHandle(void **out, Handle handle) {
  WITH_CONTEXT(cuIpcOpenEventHandle);
  std::string file;
  size_t bytes;
  if (!read_handle(handle, "event", &file, &bytes)) return INVALID_VALUE;
  if (maker_of(file) == getpid()) return INVALID_CONTEXT;
  char *at = alive(maker_of(file)) ? map_shared(folder() + "/events/" + file, sizeof(EventState), false) : nullptr;
  if (!at) return INVALID_VALUE;
  *out = add_event({share(reinterpret_cast<EventState *>(at)), device, 2 | 4, file});
  return SUCCESS;
}
