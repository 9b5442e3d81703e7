# docker build -t weightsync .
#
# Built on Debian 11, whose glibc is older than that of any engine's image: the binary is copied into those as well.
FROM rust:1-bullseye AS build
WORKDIR /src
COPY . .
RUN cargo build --profile dist --locked --package weightsync --bin weightsync

FROM gcr.io/distroless/cc-debian12
COPY --from=build /src/target/dist/weightsync /weightsync
USER 65532:65532
ENTRYPOINT ["/weightsync"]
