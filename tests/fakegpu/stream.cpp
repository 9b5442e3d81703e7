// Streams and events. A stream is a thread, so work really is behind the call, and a missing wait really shows.
#include <chrono>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "fake.h"

using namespace fake;

namespace fake {

Stream::Stream(fake::Device *device) : device(device) {
  std::thread([this] { work(); }).detach();
}

void Stream::push(Operation operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(operation));
  changed_.notify_all();
}

void Stream::work() {
  std::minstd_rand random(std::random_device{}());
  const long jitter = setting("FAKEGPU_JITTER_US", 0);
  for (;;) {
    Operation next;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      busy_ = false;
      changed_.notify_all();
      changed_.wait(lock, [&] { return ended_ || !queue_.empty(); });
      if (queue_.empty()) break;
      next = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
    }
    if (jitter > 0) nap(long(random() % (unsigned long)jitter));
    next.run();
  }
  delete this;
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !busy_;
}

void Stream::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return queue_.empty() && !busy_; });
}

// What is queued still runs; the thread then ends and frees the stream.
void Stream::end() {
  std::lock_guard<std::mutex> lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

struct Handles {
  std::mutex mutex;
  uint64_t next = 0x57000000;
  std::map<void *, Stream *> streams;
  std::map<Device *, Stream *> defaults;
  std::map<void *, std::shared_ptr<Event>> events;
  // Never an address: a handle that is used after its end is distinguished from a newer one.
  void *fresh() { return reinterpret_cast<void *>(next += 16); }
};
static Handles &handles() {
  static auto *all = new Handles;
  return *all;
}

static Stream *default_stream(Device *device) {
  std::lock_guard<std::mutex> lock(handles().mutex);
  Stream *&stream = handles().defaults[device];
  if (!stream) stream = new Stream(device);
  return stream;
}

Stream *stream_of(void *handle, Device *device, const char *by) {
  if (!handle) return default_stream(device);
  std::lock_guard<std::mutex> lock(handles().mutex);
  auto found = handles().streams.find(handle);
  if (found == handles().streams.end()) return violation("%s: no such stream", by), nullptr;
  if (found->second->device != device) return violation("%s: the stream is of another device", by), nullptr;
  return found->second;
}

void drain(Device *device) {
  std::vector<Stream *> streams;
  {
    std::lock_guard<std::mutex> lock(handles().mutex);
    for (auto &[handle, stream] : handles().streams)
      if (stream->device == device) streams.push_back(stream);
    if (handles().defaults.count(device)) streams.push_back(handles().defaults[device]);
  }
  for (Stream *stream : streams) stream->wait();
}

void *add_event(Event event) {
  std::lock_guard<std::mutex> lock(handles().mutex);
  void *handle = handles().fresh();
  handles().events[handle] = std::make_shared<Event>(std::move(event));
  return handle;
}

std::shared_ptr<Event> event_of(void *handle, const char *by) {
  std::lock_guard<std::mutex> lock(handles().mutex);
  auto found = handles().events.find(handle);
  if (found == handles().events.end()) return violation("%s: no such event", by), nullptr;
  return found->second;
}

static uint64_t now() { return uint64_t(std::chrono::steady_clock::now().time_since_epoch().count()); }

static void advance(std::atomic<uint64_t> &to, uint64_t value) {
  for (uint64_t seen = to; seen < value && !to.compare_exchange_weak(seen, value);) {
  }
}

}  // namespace fake

static int create(void **out, Device *device) {
  auto *stream = new Stream(device);
  std::lock_guard<std::mutex> lock(handles().mutex);
  *out = handles().fresh();
  handles().streams[*out] = stream;
  return SUCCESS;
}

FAKE_API int cuStreamCreate(void **out, unsigned) {
  WITH_CONTEXT(cuStreamCreate);
  return create(out, device);
}

FAKE_API int cuStreamCreateWithPriority(void **out, unsigned, int) {
  WITH_CONTEXT(cuStreamCreateWithPriority);
  return create(out, device);
}

FAKE_API int cuStreamDestroy_v2(void *handle) {
  WITH_CONTEXT(cuStreamDestroy_v2);
  Stream *stream = handle ? stream_of(handle, device, "cuStreamDestroy") : nullptr;
  if (!stream) return INVALID_HANDLE;
  {
    std::lock_guard<std::mutex> lock(handles().mutex);
    handles().streams.erase(handle);
  }
  stream->end();
  return SUCCESS;
}

FAKE_API int cuStreamQuery(void *handle) {
  WITH_CONTEXT(cuStreamQuery);
  Stream *stream = stream_of(handle, device, "cuStreamQuery");
  if (!stream) return INVALID_HANDLE;
  return stream->idle() ? SUCCESS : NOT_READY;
}

FAKE_API int cuStreamSynchronize(void *handle) {
  WITH_CONTEXT(cuStreamSynchronize);
  Stream *stream = stream_of(handle, device, "cuStreamSynchronize");
  if (!stream) return INVALID_HANDLE;
  stream->wait();
  return device->broken;
}

FAKE_API int cuEventRecord(void *handle, void *stream) {
  WITH_CONTEXT(cuEventRecord);
  auto event = event_of(handle, "cuEventRecord");
  Stream *on = stream_of(stream, device, "cuEventRecord");
  if (!event || !on) return INVALID_HANDLE;
  if (event->device != device) {
    violation("cuEventRecord: the event is of another device");
    return INVALID_HANDLE;
  }
  uint64_t record = ++event->state->recorded;
  on->push({"cuEventRecord", [state = event->state, record] {
    state->nanoseconds = now();
    advance(state->done, record);
  }});
  return SUCCESS;
}

FAKE_API int cuEventQuery(void *handle) {
  WITH_CONTEXT(cuEventQuery);
  auto event = event_of(handle, "cuEventQuery");
  if (!event) return INVALID_HANDLE;
  return event->state->done >= event->state->recorded ? SUCCESS : NOT_READY;
}

FAKE_API int cuEventSynchronize(void *handle) {
  WITH_CONTEXT(cuEventSynchronize);
  auto event = event_of(handle, "cuEventSynchronize");
  if (!event) return INVALID_HANDLE;
  for (uint64_t until = event->state->recorded; event->state->done < until;) nap(50);
  return device->broken;
}

FAKE_API int cuStreamWaitEvent(void *stream, void *handle, unsigned) {
  WITH_CONTEXT(cuStreamWaitEvent);
  auto event = event_of(handle, "cuStreamWaitEvent");
  Stream *on = stream_of(stream, device, "cuStreamWaitEvent");
  if (!event || !on) return INVALID_HANDLE;
  on->push({"cuStreamWaitEvent", [state = event->state, until = event->state->recorded.load()] {
    while (state->done < until) nap(50);
  }});
  return SUCCESS;
}

FAKE_API int cuEventElapsedTime(float *milliseconds, void *start, void *end) {
  WITH_CONTEXT(cuEventElapsedTime);
  auto first = event_of(start, "cuEventElapsedTime"), last = event_of(end, "cuEventElapsedTime");
  const unsigned no_timing = 2;
  if (!first || !last || ((first->flags | last->flags) & no_timing) || !first->state->recorded || !last->state->recorded) return INVALID_HANDLE;
  if (first->state->done < first->state->recorded || last->state->done < last->state->recorded) return NOT_READY;
  *milliseconds = float(double(last->state->nanoseconds - first->state->nanoseconds) / 1e6);
  return SUCCESS;
}

FAKE_API int cuEventDestroy_v2(void *handle) {
  WITH_CONTEXT(cuEventDestroy_v2);
  if (!event_of(handle, "cuEventDestroy")) return INVALID_HANDLE;
  std::lock_guard<std::mutex> lock(handles().mutex);
  handles().events.erase(handle);
  return SUCCESS;
}
