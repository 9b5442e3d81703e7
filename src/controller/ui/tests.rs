use axum::http::HeaderMap;

use super::refusal;

#[test]
fn the_page_is_for_loopback_peers_that_ask_for_localhost() {
    let asked = |from: &str, host: &str| {
        let headers: HeaderMap = [("host".parse().unwrap(), host.parse().unwrap())].into_iter().collect();
        refusal(from.parse().unwrap(), &headers).is_none()
    };
    for host in ["localhost:8080", "localhost", "127.0.0.1:9", "[::1]:8080"] {
        assert!(asked("127.0.0.1:5", host), "{host}");
    }
    for host in ["evil.example:8080", "10.0.0.7:8080", "", "localhost.evil.example"] {
        assert!(!asked("127.0.0.1:5", host), "{host}");
    }
    assert!(!asked("10.0.0.7:5", "localhost:8080"));
    assert!(!asked("127.0.0.6:5", "localhost:8080"), "a mesh passes on what came from elsewhere");
    assert!(refusal("127.0.0.1:5".parse().unwrap(), &HeaderMap::new()).is_some());
}
