# docker build -t weightsync .
# docker build --target gdr -t weightsync:TAG-gdr .     with NIXL and rdma-core (docs/gpu.md); --build-arg CUDA=13 for NIXL of that CUDA
#
# Built on Debian 11, whose glibc is older than that of any engine's image: the binary is copied into those as well. The compiler is the oldest
# one that Cargo.toml allows.
FROM rust:1.91-bullseye AS build
WORKDIR /src
COPY . .
RUN cargo build --profile dist --locked --package weightsync --bin weightsync

FROM debian:12 AS gdr-files
ARG CUDA=12
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3-pip ibverbs-providers libibverbs1 libnl-route-3-200
COPY deploy/gdr-files.sh /
RUN pip download --no-deps --only-binary=:all: --python-version 3.11 --platform "manylinux_2_28_$(uname -m)" --dest /wheel "nixl-cu$CUDA==1.5.1" \
    && python3 -m zipfile -e /wheel/*.whl /unpacked \
    && /gdr-files.sh /unpacked / /root-files

FROM gcr.io/distroless/cc-debian12:nonroot AS gdr
ARG CUDA=12
COPY --from=gdr-files /root-files /
COPY --from=build /src/target/dist/weightsync /weightsync
ENV WEIGHTSYNC_NIXL=/opt/nixl/.nixl_cu${CUDA}.mesonpy.libs/libnixl_capi.so
USER 65532:65532
ENTRYPOINT ["/weightsync"]

FROM gcr.io/distroless/cc-debian12:nonroot
COPY --from=build /src/target/dist/weightsync /weightsync
USER 65532:65532
ENTRYPOINT ["/weightsync"]
