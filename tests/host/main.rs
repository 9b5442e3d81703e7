//! Tests on one host: processes, loopback sockets, real files. One binary, because every test binary costs a link.

mod arrows;
