// libnccl.so.2 on the streams and the memory of the stand-in's driver. Keeps the rules that bite: non-blocking calls are through only when
// the communicator's state says so, a collective waits for all ranks for ever, and an aborted communicator is gone.
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include <strings.h>
#include <unistd.h>

#include "links.h"

using namespace fake;

namespace {

struct UniqueId {
  char bytes[128];
};

// ncclConfig_t as of 2.17; later ones are longer.
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};

// One broadcast on its way: `from` is what root sends, another one's bytes when two are to be swapped.
struct Broadcast {
  Span span, from;
  int root;
  DataFault fault;
  std::atomic<bool> ready{true};
};

struct Comm {
  Comm(std::string name, int world, int rank, bool blocking, Device *device)
      : group(std::move(name), world, rank, int(setting("FAKEGPU_NCCL_VERSION", 22809)), device), blocking(blocking), device(device) {}
  Group group;
  const bool blocking;
  Device *const device;
  std::atomic<int> state{NCCL_IN_PROGRESS};
  std::atomic<bool> stop{false}, revoked{false}, connected{false};
  std::atomic<int> busy{0};  // threads and operations that use it
  std::set<void *> registered;
  std::mutex mutex;
  std::shared_ptr<Broadcast> swap;  // waits for the next one to be swapped with
  int shrunk = 0;
};

struct Comms {
  std::mutex mutex;
  std::map<void *, std::shared_ptr<Comm>> live;
  std::set<void *> gone;
  uint64_t next = 0xcc000000;
};
Comms &comms() {
  static auto *all = new Comms;
  return *all;
}

thread_local std::string last_error;

int failed(int code, const char *text) {
  last_error = text;
  return code;
}

std::shared_ptr<Comm> comm_of(void *handle, const char *by) {
  std::lock_guard<std::mutex> lock(comms().mutex);
  auto found = comms().live.find(handle);
  if (found != comms().live.end()) return found->second;
  // The real library has freed it: what would follow is not defined.
  fatal("%s: %s", by, comms().gone.count(handle) ? "the communicator was aborted before" : "no communicator");
}

void *add(std::shared_ptr<Comm> comm) {
  std::lock_guard<std::mutex> lock(comms().mutex);
  void *handle = reinterpret_cast<void *>(comms().next += 16);
  comms().live[handle] = std::move(comm);
  return handle;
}

void remove(void *handle) {
  std::lock_guard<std::mutex> lock(comms().mutex);
  comms().live.erase(handle);
  comms().gone.insert(handle);
}

// Runs next to the caller; aborting waits for it.
void aside(std::shared_ptr<Comm> comm, std::function<void()> work) {
  comm->busy++;
  std::thread([comm, work = std::move(work)] {
    work();
    comm->busy--;
  }).detach();
}

// Puts an operation on its stream: at once, or next to a caller who is informed that it is in progress.
int put(std::shared_ptr<Comm> comm, std::function<void()> enqueue) {
  if (comm->blocking) return enqueue(), NCCL_SUCCESS;
  // Nothing is on the stream yet when the call returns: an event that is recorded too early fires too early.
  comm->state = NCCL_IN_PROGRESS;
  aside(comm, [comm, enqueue] {
    nap(300);
    enqueue();
    int pending = NCCL_IN_PROGRESS;
    comm->state.compare_exchange_strong(pending, NCCL_SUCCESS);
  });
  return NCCL_IN_PROGRESS;
}

// Writes a line of information as the real library does, where it was asked for: into libc's buffer.
void info(const char *format, ...) __attribute__((format(printf, 1, 2)));
void info(const char *format, ...) {
  const char *level = getenv("NCCL_DEBUG");
  if (!level || (strcasecmp(level, "INFO") && strcasecmp(level, "TRACE"))) return;
  static std::mutex one;
  std::lock_guard<std::mutex> lock(one);
  va_list values;
  va_start(values, format);
  printf("fake-host:%d:%d [0] NCCL INFO ", int(getpid()), int(getpid()));
  vprintf(format, values);
  printf("\n");
  va_end(values);
}

// The network that FAKEGPU_NCCL_NET names, as the library finds it once.
void find_network() {
  static std::once_flag once;
  std::call_once(once, [] {
    const char *network = getenv("FAKEGPU_NCCL_NET");
    if (!network) return;
    if (strcmp(network, "IB")) info("NET/IB : No device found.");
    info("NET/%s : Using [0]fake0:1/RoCE [RO]; OOB lo:127.0.0.1<0>", network);
    info("Using network %s", network);
  });
}

// The library connects when an operation needs it.
void connect_ranks(const std::shared_ptr<Comm> &comm) {
  if (comm->connected.exchange(true)) return;
  const char *network = getenv("FAKEGPU_NCCL_NET");
  int next = (comm->group.rank + 1) % comm->group.world;
  if (network) info("Channel 00/0 : %d[0] -> %d[0] [send] via NET/%s/0", comm->group.rank, next, network);
  else info("Channel 00/0 : %d[0] -> %d[0] via P2P/IPC", comm->group.rank, next);
}

void start(std::shared_ptr<Comm> comm) {
  aside(comm, [comm] {
    int result = comm->group.join(comm->stop);
    if (result != NCCL_IN_PROGRESS) comm->state = result;
  });
}

// A non-blocking communicator answers "in progress"; a blocking one when it is through.
int answer(const std::shared_ptr<Comm> &comm) {
  if (!comm->blocking) return NCCL_IN_PROGRESS;
  while (comm->state == NCCL_IN_PROGRESS && !comm->stop) nap(100);
  return comm->state;
}

int check_config(const Config *config, bool *blocking) {
  *blocking = true;
  if (!config) return NCCL_SUCCESS;
  if (config->magic != 0xcafebeef || config->size < sizeof(Config)) return failed(NCCL_INVALID_ARGUMENT, "ncclConfig_t argument not initialized");
  *blocking = config->blocking != 0;
  return NCCL_SUCCESS;
}

int make(void **out, int world, UniqueId id, int rank, const Config *config) {
  Device *device = current();
  if (!device) return violation("a communicator without a current context"), failed(1, "no CUDA context");
  // init.cc asks the runtime for the device first.
  if (setting("FAKEGPU_NCCL_CUDA", 12) > setting("FAKEGPU_DRIVER_VERSION", 13000) / 1000)
    return failed(1, "Cuda failure 'CUDA driver version is insufficient for CUDA runtime version'");
  bool blocking;
  if (int wrong = check_config(config, &blocking)) return wrong;
  if (world < 1 || world > MAX_RANKS || rank < 0 || rank >= world) return failed(NCCL_INVALID_ARGUMENT, "Invalid rank requested");
  auto comm = std::make_shared<Comm>(std::string(id.bytes, strnlen(id.bytes, sizeof id.bytes)), world, rank, blocking, device);
  *out = add(comm);
  find_network();
  start(comm);
  return answer(comm);
}

void stop_work(const std::shared_ptr<Comm> &comm) {
  comm->stop = true;
  while (comm->busy) nap(200);
}

}  // namespace

FAKE_API int ncclGetVersion(int *version) {
  ENTER(ncclGetVersion);
  *version = int(setting("FAKEGPU_NCCL_VERSION", 22809));
  return NCCL_SUCCESS;
}

FAKE_API int ncclGetUniqueId(UniqueId *out) {
  ENTER(ncclGetUniqueId);
  std::string name = Group::create();
  if (name.empty()) return failed(NCCL_SYSTEM_ERROR, "the group's file cannot be made");
  memset(out, 0, sizeof *out);
  memcpy(out->bytes, name.c_str(), name.size());
  return NCCL_SUCCESS;
}

FAKE_API int ncclCommInitRankConfig(void **out, int world, UniqueId id, int rank, const Config *config) {
  ENTER(ncclCommInitRankConfig);
  return make(out, world, id, rank, config);
}

FAKE_API int ncclCommInitRank(void **out, int world, UniqueId id, int rank) {
  ENTER(ncclCommInitRank);
  return make(out, world, id, rank, nullptr);
}

FAKE_API int ncclCommGetAsyncError(void *handle, int *state) {
  ENTER(ncclCommGetAsyncError);
  *state = comm_of(handle, "ncclCommGetAsyncError")->state;
  return NCCL_SUCCESS;
}

FAKE_API int ncclCommCount(void *handle, int *count) {
  ENTER(ncclCommCount);
  *count = comm_of(handle, "ncclCommCount")->group.world;
  return NCCL_SUCCESS;
}

FAKE_API int ncclCommUserRank(void *handle, int *rank) {
  ENTER(ncclCommUserRank);
  *rank = comm_of(handle, "ncclCommUserRank")->group.rank;
  return NCCL_SUCCESS;
}

FAKE_API int ncclCommCuDevice(void *handle, int *ordinal) {
  ENTER(ncclCommCuDevice);
  *ordinal = comm_of(handle, "ncclCommCuDevice")->device->ordinal;
  return NCCL_SUCCESS;
}

FAKE_API int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, void *handle, void *stream) {
  DataFault fault;
  if (int ordered = enter("ncclBroadcast", &fault)) return ordered;
  static const int SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  auto comm = comm_of(handle, "ncclBroadcast");
  if (comm->state == NCCL_IN_PROGRESS) return failed(NCCL_INVALID_ARGUMENT, "Attempt to use communicator before the previous operation returned ncclSuccess");
  if (comm->state || comm->revoked) return failed(NCCL_INVALID_USAGE, "the communicator cannot be used any more");
  if (type < 0 || type > 9 || root < 0 || root >= comm->group.world) return failed(NCCL_INVALID_ARGUMENT, "bad datatype or root");
  if (current() != comm->device) return violation("ncclBroadcast in the context of another device"), failed(NCCL_INVALID_USAGE, "wrong device");
  Stream *on = stream_of(stream, comm->device, "ncclBroadcast");
  bool is_root = root == comm->group.rank;
  auto broadcast = std::make_shared<Broadcast>();
  size_t bytes = count * size_t(SIZES[type]);
  if (!on || !span_at(reinterpret_cast<DevicePtr>(to), bytes, "ncclBroadcast", &broadcast->span)) return failed(NCCL_INVALID_ARGUMENT, "bad buffer or stream");
  if (!broadcast->span.memory->on_device() || (is_root && from != to)) return violation("ncclBroadcast: not in place, or not on a device"), NCCL_INVALID_ARGUMENT;
  broadcast->from = broadcast->span;
  broadcast->root = root;
  broadcast->fault = fault;
  {
    std::lock_guard<std::mutex> lock(comm->mutex);
    if (auto first = std::move(comm->swap)) {
      comm->swap = nullptr;
      if (first->span.size != bytes) fatal("two broadcasts of %zu and %zu bytes cannot be swapped", first->span.size, bytes);
      std::swap(first->from, broadcast->from);
      first->ready = true;
    }
    if (fault.kind == DataFault::SwapNext) {
      if (!is_root) fatal("only the rank that sends can swap two broadcasts");
      broadcast->ready = false;
      comm->swap = broadcast;
    }
  }
  connect_ranks(comm);
  auto enqueue = [comm, broadcast, on, is_root] {
    comm->busy++;
    on->push({"ncclBroadcast", [comm, broadcast, is_root] {
      while (!broadcast->ready && !comm->stop) nap(200);
      const Span &span = is_root ? broadcast->from : broadcast->span;
      if (!broadcast->span.usable("ncclBroadcast")) comm->device->broken = ILLEGAL_ADDRESS;
      else if (!comm->stop) comm->group.broadcast(span, broadcast->root, broadcast->fault, comm->stop);
      comm->busy--;
    }});
  };
  return put(comm, enqueue);
}

FAKE_API int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, void *handle, void *stream) {
  ENTER(ncclAllReduce);
  const int float32 = 7, sum = 0;
  auto comm = comm_of(handle, "ncclAllReduce");
  if (comm->state == NCCL_IN_PROGRESS) return failed(NCCL_INVALID_ARGUMENT, "Attempt to use communicator before the previous operation returned ncclSuccess");
  if (comm->state || comm->revoked) return failed(NCCL_INVALID_USAGE, "the communicator cannot be used any more");
  if (type != float32 || op != sum || from != to) return failed(NCCL_INVALID_ARGUMENT, "only sums of floats in place are known here");
  if (current() != comm->device) return violation("ncclAllReduce in the context of another device"), failed(NCCL_INVALID_USAGE, "wrong device");
  Stream *on = stream_of(stream, comm->device, "ncclAllReduce");
  auto span = std::make_shared<Span>();
  if (!on || !span_at(reinterpret_cast<DevicePtr>(to), count * 4, "ncclAllReduce", span.get())) return failed(NCCL_INVALID_ARGUMENT, "bad buffer or stream");
  auto enqueue = [comm, span, on] {
    comm->busy++;
    on->push({"ncclAllReduce", [comm, span] {
      if (!span->usable("ncclAllReduce")) comm->device->broken = ILLEGAL_ADDRESS;
      else if (!comm->stop) comm->group.sum(*span, comm->stop);
      comm->busy--;
    }});
  };
  return put(comm, enqueue);
}

FAKE_API int ncclCommAbort(void *handle) {
  ENTER(ncclCommAbort);
  auto comm = comm_of(handle, "ncclCommAbort");
  remove(handle);
  stop_work(comm);
  comm->group.leave();
  nap(setting("FAKEGPU_NCCL_ABORT_MS", 0) * 1000);
  return NCCL_SUCCESS;
}

// A rendezvous: it comes back when all ranks are here, which is why no one should call it.
FAKE_API int ncclCommDestroy(void *handle) {
  ENTER(ncclCommDestroy);
  auto comm = comm_of(handle, "ncclCommDestroy");
  while (comm->busy) nap(200);
  remove(handle);
  comm->group.leave();
  return NCCL_SUCCESS;
}

FAKE_API int ncclCommFinalize(void *handle) {
  ENTER(ncclCommFinalize);
  auto comm = comm_of(handle, "ncclCommFinalize");
  while (comm->busy) nap(200);
  return NCCL_SUCCESS;
}

FAKE_API int ncclCommRevoke(void *handle, int) {
  ENTER(ncclCommRevoke);
  auto comm = comm_of(handle, "ncclCommRevoke");
  comm->revoked = true;
  comm->state = NCCL_IN_PROGRESS;
  comm->stop = true;
  std::thread([comm] {
    while (comm->busy) nap(200);
    comm->state = NCCL_SUCCESS;
  }).detach();
  return answer(comm);
}

FAKE_API int ncclCommShrink(void *handle, int *excluded, int count, void **out, const Config *config, int flags) {
  ENTER(ncclCommShrink);
  const int shrink_abort = 1;
  auto parent = comm_of(handle, "ncclCommShrink");
  bool blocking;
  if (int wrong = check_config(config, &blocking)) return wrong;
  if (is_meeting(parent->group.name)) return failed(NCCL_INVALID_USAGE, "a group of several hosts cannot shrink here");
  std::set<int> without(excluded, excluded + count);
  if (without.count(parent->group.rank)) return failed(NCCL_INVALID_ARGUMENT, "a rank excludes itself");
  int rank = 0;
  std::string name = parent->group.name + "-" + std::to_string(++parent->shrunk);
  for (int other : without) {
    if (other < 0 || other >= parent->group.world) return failed(NCCL_INVALID_ARGUMENT, "no such rank");
    name += "x" + std::to_string(other);
  }
  for (int other = 0; other < parent->group.rank; other++) rank += !without.count(other);
  int world = parent->group.world - int(without.size());
  Group::create_named(name);
  *out = nullptr;
  parent->state = NCCL_IN_PROGRESS;
  // The new handle appears later, from a thread of its own: the caller's memory for it must outlive the call.
  std::thread([=] {
    if (flags & shrink_abort) parent->stop = true;
    while (parent->busy) nap(200);
    auto child = std::make_shared<Comm>(name, world, rank, blocking, parent->device);
    start(child);
    *out = add(child);
    parent->state = NCCL_SUCCESS;
  }).detach();
  return answer(parent);
}

FAKE_API int ncclCommRegister(void *handle, void *buffer, size_t bytes, void **out) {
  ENTER(ncclCommRegister);
  auto comm = comm_of(handle, "ncclCommRegister");
  Span span;
  if (!span_at(reinterpret_cast<DevicePtr>(buffer), bytes, "ncclCommRegister", &span)) return failed(NCCL_INVALID_ARGUMENT, "bad buffer");
  if (!comm->registered.insert(buffer).second) violation("ncclCommRegister: the buffer is registered already");
  *out = buffer;
  return NCCL_SUCCESS;
}

FAKE_API int ncclCommDeregister(void *handle, void *registration) {
  ENTER(ncclCommDeregister);
  auto comm = comm_of(handle, "ncclCommDeregister");
  if (comm->registered.erase(registration)) return NCCL_SUCCESS;
  violation("ncclCommDeregister of a buffer that is not registered");
  return failed(NCCL_INVALID_ARGUMENT, "not registered");
}

FAKE_API const char *ncclGetErrorString(int code) {
  static const char *TEXTS[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument",
                                "invalid usage", "remote process exited or there was a network error", "NCCL operation in progress"};
  return code >= 0 && code <= NCCL_IN_PROGRESS ? TEXTS[code] : "unknown result code";
}

FAKE_API const char *ncclGetLastError(void *) { return last_error.c_str(); }
