// What the parts of the stand-in share. README.md says what it keeps of the real libraries and how faults are ordered.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#define FAKE_API extern "C" __attribute__((visibility("default")))
// For libnccl.so.2, which lives on the streams and the memory of libcuda.so.1.
#define FAKE_SHARED __attribute__((visibility("default")))

namespace fake {

using DevicePtr = unsigned long long;

// Results of the driver that the stand-in gives (cuda.h, CUresult).
enum : int {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  STUB_LIBRARY = 34,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  PEER_ACCESS_UNSUPPORTED = 217,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  HOST_MEMORY_ALREADY_REGISTERED = 712,
  HOST_MEMORY_NOT_REGISTERED = 713,
  NOT_PERMITTED = 800,
};

// --- settings, reports, faults (report.cpp) ---

FAKE_SHARED const std::string &folder();
FAKE_SHARED long setting(const char *name, long otherwise);
FAKE_SHARED bool alive(int pid);
FAKE_SHARED void nap(long microseconds);
// A broken rule: to standard error and to FOLDER/violations, for tests to read.
FAKE_SHARED void violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
// A use of something that the real library has freed: reported, then the process ends as it well might.
[[noreturn]] FAKE_SHARED void fatal(const char *format, ...) __attribute__((format(printf, 1, 2)));

// A fault in the bytes that a collective moves; the others are carried out by `enter` itself.
struct DataFault {
  enum Kind { None, Flip, Drop, Vanish, SwapRanges, SwapNext } kind = None;
  size_t first = 0, second = 0, bytes = 0;
};
// Called first by every function: counts the call and carries out the faults ordered for it. Returns the error to give, or 0.
FAKE_SHARED int enter(const char *function, DataFault *data = nullptr);

#define ENTER(function)                                    \
  do {                                                     \
    if (int ordered = fake::enter(#function)) return ordered; \
  } while (0)

// --- devices and contexts (device.cpp) ---

struct Device {
  int ordinal = 0;  // what this process calls it
  int number = 0;   // which of the machine's it is
  char uuid[16] = {};
  std::string uuid_text, name;
  std::atomic<int> retained{0};
  std::atomic<int> broken{0};  // an error that stays, as after an illegal address
};
// The device of the calling thread's context, or null.
FAKE_SHARED Device *current();
Device *device_of(int ordinal);
int initialized();
size_t memory_bytes();

// For functions that need a context: `device` is its device.
#define WITH_CONTEXT(function)                                 \
  ENTER(function);                                             \
  if (int missing = fake::initialized()) return missing;       \
  fake::Device *device = fake::current();                      \
  if (!device) {                                               \
    fake::violation("%s without a current context", #function); \
    return fake::INVALID_CONTEXT;                              \
  }                                                            \
  if (int broken = device->broken) return broken

// --- memory (memory.cpp) ---

struct Allocation {
  enum Kind { Own, Imported, Pinned, Registered } kind = Own;
  uint64_t base = 0;     // what the program sees
  char *bytes = nullptr; // where they are in this process
  size_t size = 0, asked = 0;
  fake::Device *device = nullptr;
  std::string file;      // name under FOLDER/memory, for device memory
  int opens = 0;         // of imported memory
  std::atomic<bool> live{true};
  bool on_device() const { return kind == Own || kind == Imported; }
};
using Memory = std::shared_ptr<Allocation>;

// A part of an allocation; `memory` is null for ordinary host memory.
struct Span {
  Memory memory;
  char *bytes = nullptr;
  size_t size = 0;
  // Whether it may still be used now; a violation if it was freed meanwhile.
  FAKE_SHARED bool usable(const char *by) const;
};
// The device (or pinned) memory at `pointer`, all `size` bytes of it; false and a violation if there is none.
FAKE_SHARED bool span_at(DevicePtr pointer, size_t size, const char *by, Span *out);
// A host address: pinned memory, or any other.
Span host_span(const void *pointer, size_t size);
Memory memory_at(DevicePtr pointer);
int map_file(const std::string &file, size_t bytes, Memory *out);
void remember(Memory memory);
void forget(const Memory &memory);
FAKE_SHARED char *map_shared(const std::string &path, size_t bytes, bool create);

// --- streams and events (stream.cpp) ---

struct Operation {
  const char *name;
  std::function<void()> run;
};
// Runs what it is given in order, on a thread of its own.
class Stream {
 public:
  explicit Stream(fake::Device *device);
  FAKE_SHARED void push(Operation operation);
  void wait();
  bool idle();
  void end();
  fake::Device *const device;

 private:
  void work();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Operation> queue_;
  bool busy_ = false, ended_ = false;
};
// The stream of a handle (null: the default stream of the device); null and a violation if it is none or belongs to another device.
FAKE_SHARED Stream *stream_of(void *handle, Device *device, const char *by);
// Waits for all streams of a device, as freeing memory does.
void drain(Device *device);

// What events of two processes share.
struct EventState {
  std::atomic<uint64_t> recorded, done, nanoseconds;
};
struct Event {
  std::shared_ptr<EventState> state;
  Device *device;
  unsigned flags;
  std::string file;
};
void *add_event(Event event);
std::shared_ptr<Event> event_of(void *handle, const char *by);

}  // namespace fake
