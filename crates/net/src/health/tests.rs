use super::{alongside, is_local};

#[test]
fn only_the_loopback_interface_is_local() {
    for (address, local) in [
        ("127.0.0.1:1", true),
        ("[::1]:1", true),
        ("[::ffff:127.0.0.1]:1", true),
        // A mesh's proxy forwards requests of other pods from there.
        ("127.0.0.6:1", false),
        ("10.0.0.1:1", false),
        ("[::ffff:10.0.0.1]:1", false),
        ("0.0.0.0:1", false),
    ] {
        assert_eq!(is_local(address.parse().unwrap()), local, "{address}");
    }
}

#[test]
fn probes_are_on_the_port_after_the_pages() {
    for (status, probes) in [("0.0.0.0:8472", "0.0.0.0:8473"), ("127.0.0.1:0", "127.0.0.1:0"), ("[::]:65535", "[::]:0")] {
        assert_eq!(alongside(status.parse().unwrap()), probes.parse().unwrap(), "{status}");
    }
}
