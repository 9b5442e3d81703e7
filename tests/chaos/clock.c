// A wall clock that a test can move, for processes that are started with LD_PRELOAD: the file that WEIGHTSYNC_TEST_CLOCK names holds
// the difference to the real clock in nanoseconds, as a signed 64-bit number of this machine. The monotonic clock stays what it is, as
// on a machine whose clock is set.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long long *difference;

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("WEIGHTSYNC_TEST_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(0, sizeof *difference, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) difference = mapped;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (failed || !difference) return failed;
    if (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE && clock != CLOCK_TAI) return 0;
    long long total = (long long)now->tv_nsec + *difference % 1000000000;
    now->tv_sec += *difference / 1000000000;
    if (total < 0) { total += 1000000000; now->tv_sec -= 1; }
    if (total >= 1000000000) { total -= 1000000000; now->tv_sec += 1; }
    now->tv_nsec = total;
    return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec exact;
    int failed = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *into) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (into) *into = exact.tv_sec;
    return exact.tv_sec;
}
