use super::{failed_to_compute, judge};
use crate::EngineError;
use weightsync_core::protocol::CanaryPolicy;

fn canary() -> CanaryPolicy {
    CanaryPolicy { prompt: "p".into(), max_tokens: 3, least_log_prob_milli: -2500, greatest_log_prob_milli: 0 }
}

#[test]
fn each_log_prob_must_be_a_number_in_the_range() {
    for good in [&[Some(-2.5), Some(0.0)][..], &[Some(-0.1)]] {
        assert_eq!(judge(&canary(), good), Ok(()), "{good:?}");
    }
    let refused: [(&[Option<f64>], &str); 6] = [
        (&[], "without a token"),
        (&[Some(-1.0), None], "token 2 of 2 is no number"),
        (&[Some(f64::NAN)], "token 1 of 1 is no number"),
        (&[Some(f64::NEG_INFINITY)], "is no number"),
        (&[Some(-1.0), Some(-2.501)], "token 2 of 2 is -2.501; expected is -2.5 to 0"),
        (&[Some(0.001)], "is 0.001"),
    ];
    for (log_probs, says) in refused {
        let measured = judge(&canary(), log_probs).unwrap_err();
        assert!(measured.contains(says), "{measured}");
    }
}

#[test]
fn engine_error_is_about_weights_and_silence_is_not() {
    let url = || "http://a".to_owned();
    let about = [
        EngineError::Status { url: url(), status: 500, body: "CUDA error".into() },
        EngineError::BadReply { url: url(), what: "it is not JSON".into() },
    ];
    assert!(about.iter().all(|error| failed_to_compute(error).is_some()));
    let not = [
        EngineError::Timeout { url: url(), deadline: std::time::Duration::from_secs(1) },
        EngineError::NotSuccess { url: url(), body: "aborted".into() },
        EngineError::Unsupported { what: "no log-probs".into(), next_step: "start it so".into() },
        EngineError::Restarted,
    ];
    assert!(not.iter().all(|error| failed_to_compute(error).is_none()));
}
