// Breaks one rule of the driver or of NCCL, named by the first argument; the stand-in must report it.
#include <stdio.h>
#include <string.h>

typedef unsigned long long Address;
typedef struct { char bytes[64]; } Handle;
typedef struct { char bytes[128]; } Id;
typedef struct { size_t size; unsigned magic, version; int blocking; char rest[28]; } Config;

int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *), cuCtxSynchronize(void), cuStreamCreate(void **, unsigned),
    cuStreamSynchronize(void *), cuMemAlloc_v2(Address *, size_t), cuMemFree_v2(Address), cuMemHostRegister_v2(void *, size_t, unsigned),
    cuMemsetD8Async(Address, unsigned char, size_t, void *), cuIpcGetMemHandle(Handle *, Address), cuIpcOpenMemHandle_v2(Address *, Handle, unsigned),
    cuMemcpyHtoDAsync_v2(Address, const void *, size_t, void *);
int ncclGetUniqueId(Id *), ncclCommInitRankConfig(void **, int, Id, int, Config *), ncclCommGetAsyncError(void *, int *), ncclCommAbort(void *),
    ncclBroadcast(const void *, void *, size_t, int, int, void *, void *);

static char host[8192];
static void *contexts[2], *stream, *comm;
static Address memory;

static int broadcast(size_t bytes) { return ncclBroadcast((void *)memory, (void *)memory, bytes, 0, 0, comm, stream); }

static void settle(void) {
  for (int state = 7; state == 7;) ncclCommGetAsyncError(comm, &state);
}

static void join(void) {
  Id id;
  Config config = {48, 0xcafebeef, 22203, 0, ""};
  ncclGetUniqueId(&id);
  ncclCommInitRankConfig(&comm, 1, id, 0, &config);
}

int main(int count, char **arguments) {
  const char *rule = count > 1 ? arguments[1] : "";
  int result = -1;
  if (!strcmp(rule, "before-init")) return printf("%d\n", cuMemAlloc_v2(&memory, 4096)), 0;
  cuInit(0);
  if (!strcmp(rule, "no-context")) return printf("%d\n", cuMemAlloc_v2(&memory, 4096)), 0;
  for (int device = 1; device >= 0; device--) {
    cuDevicePrimaryCtxRetain(&contexts[device], device);
    cuCtxSetCurrent(contexts[device]);
  }
  cuStreamCreate(&stream, 1);
  cuMemAlloc_v2(&memory, 4096);

  if (!strcmp(rule, "use-after-free")) {
    cuMemFree_v2(memory);
    result = cuMemsetD8Async(memory, 1, 16, stream);
  } else if (!strcmp(rule, "free-twice")) {
    cuMemFree_v2(memory);
    result = cuMemFree_v2(memory);
  } else if (!strcmp(rule, "beyond-the-end")) {
    result = cuMemsetD8Async(memory, 1, 4097, stream);
  } else if (!strcmp(rule, "host-address")) {
    result = cuMemsetD8Async((Address)host, 1, 16, stream);
  } else if (!strcmp(rule, "register-twice")) {
    cuMemHostRegister_v2(host, sizeof host, 0);
    result = cuMemHostRegister_v2(host + 4096, 4096, 0);
  } else if (!strcmp(rule, "other-device")) {
    cuCtxSetCurrent(contexts[1]);
    result = cuMemsetD8Async(memory, 1, 16, stream);
  } else if (!strcmp(rule, "own-handle")) {
    Handle handle;
    Address opened;
    cuIpcGetMemHandle(&handle, memory + 100);
    result = cuIpcOpenMemHandle_v2(&opened, handle, 1);
  } else if (!strcmp(rule, "early-broadcast")) {
    join();
    settle();
    broadcast(4096);
    result = broadcast(4096);
    settle();
  } else if (!strcmp(rule, "abort-twice")) {
    join();
    ncclCommAbort(comm);
    result = ncclCommAbort(comm);
  } else if (!strcmp(rule, "broadcast-after-abort")) {
    join();
    settle();
    ncclCommAbort(comm);
    result = broadcast(4096);
  } else if (!strcmp(rule, "none")) {
    join();
    settle();
    result = broadcast(4096);
    settle();
    cuStreamSynchronize(stream);
    ncclCommAbort(comm);
    cuMemHostRegister_v2(host, sizeof host, 0);
    cuMemcpyHtoDAsync_v2(memory, host, 4096, stream);
    cuMemFree_v2(memory);
  }
  printf("%d\n", result);
  return 0;
}
