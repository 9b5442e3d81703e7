// gsum64 of parts of GPU memory: for part p, the sum over its 8-byte little-endian words d[i] of (lo32(x) * hi32(x) + x) mod 2^64 with
// x = d[i] xor (first_word + i + 1) * 0x9E3779B97F4A7C15; a last word of fewer than 8 bytes counts as if zeros followed. Order-free, so
// any number of threads may share it, and sums of parts add up. The twin on the CPU is crates/core/src/weights/gsum.rs.
// One thread block a part. The parts are read from pinned host memory and the sums are written there, by the kernel itself: a copy of a few
// sums to the host waited for the bucket that another stream was copying there, 20 ms, because both go through the same copy engine.
// gsum64.ptx is made from this file; see the first lines there.
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned char u8;
#define P 0x9E3779B97F4A7C15ull

struct Part { u64 offset, bytes, first_word; };

__device__ __forceinline__ u64 mix(u64 d, u64 k) {
    u64 x = d ^ k;
    return (u64)(u32)x * (u32)(x >> 32) + x;
}

extern "C" __global__ void gsum64(const u8* __restrict__ base, const Part* __restrict__ parts, u64* __restrict__ sums) {
    __shared__ Part part;
    __shared__ u64 of_warp[32];
    if (threadIdx.x == 0) part = parts[blockIdx.y];
    __syncthreads();
    const u8* start = base + part.offset;
    u64 words = part.bytes >> 3;
    u64 step = blockDim.x;
    u64 thread = threadIdx.x;
    u64 a = 0, b = 0;
    // 16-byte loads need 16-byte addresses: one word may stand before the first pair.
    u64 head = (((u64)start >> 3) & 1) & (words > 0);
    u64 pairs = (words - head) >> 1;
    const ulonglong2* p = (const ulonglong2*)(start + head * 8);
    u64 i = thread;
    // Four loads under way at once: few thread blocks read fast enough then, and leave the multiprocessors to broadcasts.
    for (; i + 3 * step < pairs; i += 4 * step) {
        ulonglong2 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = p[i + j * step];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u64 k = (part.first_word + head + 2 * (i + j * step) + 1) * P;
            a += mix(v[j].x, k);
            b += mix(v[j].y, k + P);
        }
    }
    for (; i < pairs; i += step) {
        ulonglong2 v = p[i];
        u64 k = (part.first_word + head + 2 * i + 1) * P;
        a += mix(v.x, k);
        b += mix(v.y, k + P);
    }
    if (thread == 0) {
        const u64* w = (const u64*)start;
        if (head) a += mix(w[0], (part.first_word + 1) * P);
        if ((words - head) & 1) a += mix(w[words - 1], (part.first_word + words) * P);
        u64 left = part.bytes & 7;
        if (left) {
            u64 d = 0;
            for (u64 i = 0; i < left; i++) d |= (u64)start[words * 8 + i] << (8 * i);
            a += mix(d, (part.first_word + words + 1) * P);
        }
    }
    a += b;
    for (int o = 16; o; o >>= 1) a += __shfl_down_sync(0xffffffffu, a, o);
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (lane == 0) of_warp[warp] = a;
    __syncthreads();
    if (warp == 0) {
        a = lane < (blockDim.x + 31) / 32 ? of_warp[lane] : 0;
        for (int o = 16; o; o >>= 1) a += __shfl_down_sync(0xffffffffu, a, o);
        if (lane == 0) sums[blockIdx.y] = a;
    }
}
