use super::*;

const TABLE: &str = "\
Num       RefCount Protocol Flags    Type St Inode Path
ffff8: 00000002 00000000 00010000 0001 01 20001 @weightsync/7c3e
ffff9: 00000003 00000000 00000000 0001 03 20002 @weightsync/7c3e
ffffa: 00000003 00000000 00000000 0001 03 20003 @weightsync/gone
ffffb: 00000002 00000000 00010000 0001 01 20004 /run/other.sock
ffffc: 00000002 00000000 00010000 0001 01 20005
";

#[test]
fn only_listening_agent_is_found_not_connections() {
    assert_eq!(SocketName::discover(TABLE).unwrap().to_string(), "@weightsync/7c3e");
    assert!(matches!(SocketName::discover("nothing here"), Err(SocketError::NoAgent)));
}

#[test]
fn two_agents_are_named_and_not_guessed() {
    let two = format!("{TABLE}ffffd: 00000002 00000000 00010000 0001 01 20006 @weightsync/8d4f\n");
    let error = SocketName::discover(&two).unwrap_err().to_string();
    assert!(error.contains("weightsync/7c3e, weightsync/8d4f"), "{error}");
}

#[test]
fn names_pass_with_and_without_sign_and_bad_ones_fail() {
    assert_eq!("@weightsync/a".parse::<SocketName>().unwrap(), SocketName::of_pod("a").unwrap());
    assert!("".parse::<SocketName>().is_err());
    assert!("@".parse::<SocketName>().is_err());
    assert!("a\0b".parse::<SocketName>().is_err());
    assert!("x".repeat(108).parse::<SocketName>().is_err());
}

#[test]
fn a_name_serves_one_agent_and_is_free_after_it() {
    let name = SocketName::of_pod(&format!("test-{}", std::process::id())).unwrap();
    assert!(matches!(name.connect(), Err(SocketError::NoAgent)));
    let listener = name.listen().unwrap();
    assert!(matches!(name.listen(), Err(SocketError::Taken { .. })));
    name.connect().unwrap();
    drop(listener);
    name.listen().unwrap();
}
