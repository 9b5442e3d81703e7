use super::*;

#[test]
fn waits_double_up_to_the_cap_and_reset_after_a_success() {
    let base = Duration::from_millis(100);
    let cap = Duration::from_secs(2);
    let mut backoff = Backoff::new(base, cap);
    for whole in [100, 200, 400, 800, 1600, 2000, 2000] {
        let wait = backoff.failed();
        assert!(wait >= Duration::from_millis(whole) / 2 && wait <= Duration::from_millis(whole), "{wait:?} for {whole}");
    }
    for _ in 0..100 {
        assert!(backoff.failed() <= cap);
    }
    backoff.succeeded();
    assert!(backoff.failed() <= base);
}
