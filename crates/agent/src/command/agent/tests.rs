use clap::Parser;

use super::{AgentArgs, controller_address, url_of};

#[derive(Parser)]
struct Program {
    #[command(flatten)]
    agent: AgentArgs,
}

#[test]
fn agent_listens_on_both_families_by_default() {
    let words = ["agent", "--role", "rollout", "--pod", "a", "--pod-uid", "u", "--ip", "fd00::7", "--controller", "c:1"];
    let words = words.into_iter().chain(["--controller-ca", "/ca"]);
    let agent = Program::try_parse_from(words).unwrap().agent;
    assert_eq!(agent.status_address.to_string(), "[::]:8472");
}

#[test]
fn ipv6_address_in_a_url_stands_in_brackets() {
    for (host, url) in [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("[fd00::7]", "http://[fd00::7]:8000"),
        ("localhost", "http://localhost:8000"),
    ] {
        assert_eq!(url_of(host, 8000), url);
    }
}

#[test]
fn controller_at_an_ipv6_address_needs_brackets() {
    for (text, address) in [
        ("https://weightsync.ns.svc:8443", Some("weightsync.ns.svc:8443")),
        ("weightsync.ns.svc", Some("weightsync.ns.svc:443")),
        ("https://[fd00::7]:8443/", Some("[fd00::7]:8443")),
        ("[fd00::7]", Some("[fd00::7]:443")),
        ("fd00::7:8443", None),
        ("[fd00::7", None),
        ("[weightsync]:8443", None),
        ("http://a:1", None),
        ("", None),
    ] {
        assert_eq!(controller_address(text).ok().as_deref(), address, "{text}");
    }
}
