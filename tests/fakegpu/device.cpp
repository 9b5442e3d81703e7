// Devices, contexts and what the driver says about them.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <vector>

#include <unistd.h>

#include "fake.h"

using namespace fake;

namespace fake {

static int initialized_by = 0;
static thread_local Device *context = nullptr;

static Device *make_device(int number) {
  auto *device = new Device;
  device->number = number;
  const unsigned char uuid[16] = {0xfa, 0x4e, 0, 0, 0, 0, 0x40, 0, 0x80, 0, 0, 0, 0, 0, 0, (unsigned char)number};
  memcpy(device->uuid, uuid, 16);
  char text[64];
  snprintf(text, sizeof text, "GPU-fa4e0000-0000-4000-8000-%012x", number);
  device->uuid_text = text;
  device->name = setting("FAKEGPU_MIG", 0) ? "Fake GPU MIG 1g.18gb" : "Fake GPU";
  return device;
}

// Those that a list names, by indices or UUIDs (or their beginnings), up to the first that is none.
static std::vector<Device *> named(const std::vector<Device *> &all, const char *by) {
  std::vector<Device *> seen;
  std::istringstream list(by);
  for (std::string one; std::getline(list, one, ',');) {
    Device *found = nullptr;
    for (size_t index = 0; index < all.size(); index++)
      if (one == std::to_string(index) || (one.size() > 4 && all[index]->uuid_text.rfind(one, 0) == 0)) found = all[index];
    if (!found) break;
    seen.push_back(found);
  }
  return seen;
}

// NVIDIA_VISIBLE_DEVICES says what the container runtime let in, CUDA_VISIBLE_DEVICES what of that the driver shows.
static std::vector<Device *> make_devices() {
  std::vector<Device *> seen;
  for (int number = 0; number < setting("FAKEGPU_COUNT", 4); number++) seen.push_back(make_device(number));
  const char *let_in = getenv("NVIDIA_VISIBLE_DEVICES"), *shown = getenv("CUDA_VISIBLE_DEVICES");
  if (let_in && strcmp(let_in, "all")) seen = named(seen, let_in);
  if (shown) seen = named(seen, shown);
  for (size_t ordinal = 0; ordinal < seen.size(); ordinal++) seen[ordinal]->ordinal = int(ordinal);
  return seen;
}

static const std::vector<Device *> &devices() {
  static auto *all = new std::vector<Device *>(make_devices());
  return *all;
}

Device *device_of(int ordinal) { return ordinal >= 0 && size_t(ordinal) < devices().size() ? devices()[ordinal] : nullptr; }

Device *current() { return context; }

int initialized() {
  if (!initialized_by) return NOT_INITIALIZED;
  // A context does not survive a fork.
  if (initialized_by != getpid()) {
    violation("the driver is used in a child of the process that started it (%d)", initialized_by);
    return NOT_INITIALIZED;
  }
  return SUCCESS;
}

size_t memory_bytes() { return size_t(setting("FAKEGPU_MEMORY_MIB", 4096)) << 20; }

}  // namespace fake

#define WITH_DEVICE(function, ordinal)                     \
  ENTER(function);                                         \
  if (int missing = initialized()) return missing;         \
  Device *device = device_of(ordinal);                     \
  if (!device) return INVALID_DEVICE

FAKE_API int cuInit(unsigned flags) {
  ENTER(cuInit);
  if (flags) return INVALID_VALUE;
  if (long error = setting("FAKEGPU_INIT_ERROR", 0)) return int(error);
  if (devices().empty()) return NO_DEVICE;
  if (!initialized_by) initialized_by = getpid();
  return initialized();
}

FAKE_API int cuDriverGetVersion(int *version) {
  ENTER(cuDriverGetVersion);
  *version = int(setting("FAKEGPU_DRIVER_VERSION", 13000));
  return SUCCESS;
}

FAKE_API int cuDeviceGetCount(int *count) {
  ENTER(cuDeviceGetCount);
  if (int missing = initialized()) return missing;
  *count = int(devices().size());
  return SUCCESS;
}

FAKE_API int cuDeviceGet(int *out, int ordinal) {
  WITH_DEVICE(cuDeviceGet, ordinal);
  *out = device->ordinal;
  return SUCCESS;
}

FAKE_API int cuDeviceGetName(char *name, int size, int ordinal) {
  WITH_DEVICE(cuDeviceGetName, ordinal);
  snprintf(name, size_t(size), "%s", device->name.c_str());
  return SUCCESS;
}

FAKE_API int cuDeviceGetUuid(char *uuid, int ordinal) {
  WITH_DEVICE(cuDeviceGetUuid, ordinal);
  memcpy(uuid, device->uuid, 16);
  return SUCCESS;
}

FAKE_API int cuDeviceGetUuid_v2(char *uuid, int ordinal) {
  WITH_DEVICE(cuDeviceGetUuid_v2, ordinal);
  memcpy(uuid, device->uuid, 16);
  return SUCCESS;
}

FAKE_API int cuDeviceGetPCIBusId(char *text, int size, int ordinal) {
  WITH_DEVICE(cuDeviceGetPCIBusId, ordinal);
  snprintf(text, size_t(size), "0000:%02x:00.0", device->number + 1);
  return SUCCESS;
}

FAKE_API int cuDeviceTotalMem_v2(size_t *bytes, int ordinal) {
  WITH_DEVICE(cuDeviceTotalMem_v2, ordinal);
  *bytes = memory_bytes();
  return SUCCESS;
}

FAKE_API int cuDeviceGetAttribute(int *value, int attribute, int ordinal) {
  WITH_DEVICE(cuDeviceGetAttribute, ordinal);
  switch (attribute) {
    case 16: *value = 132; break;                  // multiprocessors
    case 33: *value = device->number + 1; break;   // PCI bus
    case 41: *value = 1; break;                    // unified addressing
    case 75: *value = 9; break;                    // compute capability, major
    case 99: *value = 1; break;                    // host memory can be registered
    default: *value = 0;
  }
  return SUCCESS;
}

FAKE_API int cuDeviceCanAccessPeer(int *can, int ordinal, int peer) {
  WITH_DEVICE(cuDeviceCanAccessPeer, ordinal);
  if (!device_of(peer)) return INVALID_DEVICE;
  *can = device->ordinal != peer && setting("FAKEGPU_PEER", 1);
  return SUCCESS;
}

FAKE_API int cuDeviceGetP2PAttribute(int *value, int attribute, int ordinal, int peer) {
  WITH_DEVICE(cuDeviceGetP2PAttribute, ordinal);
  if (!device_of(peer)) return INVALID_DEVICE;
  if (ordinal == peer) return INVALID_VALUE;
  bool access = setting("FAKEGPU_PEER", 1), nvlink = access && setting("FAKEGPU_NVLINK", 1);
  switch (attribute) {
    case 1: *value = nvlink ? 0 : 1; break;  // performance rank: less is faster
    case 2: *value = access; break;
    case 3: *value = nvlink; break;  // native atomics, which PCIe has not
    default: *value = 0;
  }
  return SUCCESS;
}

FAKE_API int cuDevicePrimaryCtxRetain(void **out, int ordinal) {
  WITH_DEVICE(cuDevicePrimaryCtxRetain, ordinal);
  device->retained++;
  *out = device;
  return SUCCESS;
}

FAKE_API int cuDevicePrimaryCtxRelease_v2(int ordinal) {
  WITH_DEVICE(cuDevicePrimaryCtxRelease_v2, ordinal);
  if (device->retained <= 0) {
    violation("the context of device %d is released more often than retained", ordinal);
    return INVALID_CONTEXT;
  }
  if (--device->retained == 0) device->broken = 0;
  return SUCCESS;
}

FAKE_API int cuCtxSetCurrent(void *handle) {
  ENTER(cuCtxSetCurrent);
  if (int missing = initialized()) return missing;
  auto *device = static_cast<Device *>(handle);
  if (device && (device_of(device->ordinal) != device || !device->retained)) {
    violation("cuCtxSetCurrent of a context that is not retained");
    return INVALID_CONTEXT;
  }
  context = device;
  return SUCCESS;
}

FAKE_API int cuCtxGetCurrent(void **out) {
  ENTER(cuCtxGetCurrent);
  if (int missing = initialized()) return missing;
  *out = context;
  return SUCCESS;
}

FAKE_API int cuCtxGetDevice(int *out) {
  WITH_CONTEXT(cuCtxGetDevice);
  *out = device->ordinal;
  return SUCCESS;
}

FAKE_API int cuCtxEnablePeerAccess(void *peer, unsigned flags) {
  WITH_CONTEXT(cuCtxEnablePeerAccess);
  if (flags || peer == device) return INVALID_VALUE;
  return setting("FAKEGPU_PEER", 1) ? SUCCESS : PEER_ACCESS_UNSUPPORTED;
}

FAKE_API int cuCtxSynchronize() {
  WITH_CONTEXT(cuCtxSynchronize);
  drain(device);
  return device->broken;
}

static const struct { int code; const char *name, *text; } ERRORS[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {STUB_LIBRARY, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {PEER_ACCESS_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
};

FAKE_API int cuGetErrorName(int code, const char **out) {
  for (const auto &error : ERRORS)
    if (error.code == code) return *out = error.name, SUCCESS;
  *out = nullptr;
  return INVALID_VALUE;
}

FAKE_API int cuGetErrorString(int code, const char **out) {
  for (const auto &error : ERRORS)
    if (error.code == code) return *out = error.text, SUCCESS;
  *out = nullptr;
  return INVALID_VALUE;
}
