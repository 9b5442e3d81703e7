use super::is_local;

#[test]
fn only_the_loopback_interface_is_local() {
    for (address, local) in [
        ("127.0.0.1:1", true),
        ("[::1]:1", true),
        ("[::ffff:127.0.0.1]:1", true),
        ("10.0.0.1:1", false),
        ("[::ffff:10.0.0.1]:1", false),
        ("0.0.0.0:1", false),
    ] {
        assert_eq!(is_local(address.parse().unwrap()), local, "{address}");
    }
}
