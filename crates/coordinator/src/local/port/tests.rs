use super::{ephemeral, free_port};

#[test]
fn ports_differ_and_connections_do_not_get_them() {
    let ports: Vec<u16> = (0..50).map(|_| free_port().unwrap()).collect();
    let different: std::collections::BTreeSet<&u16> = ports.iter().collect();
    assert_eq!(different.len(), 50);
    assert!(ports.iter().all(|port| *port < ephemeral().unwrap()));
}
