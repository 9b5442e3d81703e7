//! The store by its bytes, by its answers, and over real sockets. The real torch is asked in `tests/engine/store.rs`.

mod server;
mod table;
mod wire;

use super::wire::Request;

/// A request as it travels.
fn bytes(request: &Request<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    request.write(&mut bytes);
    bytes
}
