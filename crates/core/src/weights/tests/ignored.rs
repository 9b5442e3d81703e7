//! Patterns of names.

use proptest::prelude::*;

use crate::weights::{IgnoredTensors, is_pattern};

fn matches(pattern: &str, name: &str) -> bool {
    IgnoredTensors::new(vec![pattern.into()]).matches(name)
}

#[test]
fn pattern_matches_whole_name_with_any_run_for_a_star() {
    for (pattern, name, wanted) in [
        ("lm_head.weight", "lm_head.weight", true),
        ("lm_head.weight", "model.lm_head.weight", false),
        ("*.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq", true),
        ("*.inv_freq", "inv_freq", false),
        ("*inv_freq", "inv_freq", true),
        ("model.layers.61.*", "model.layers.61.eh_proj.weight", true),
        ("model.layers.61.*", "model.layers.6.mlp.weight", false),
        ("*.experts.*.bias", "model.experts.7.up.bias", true),
        ("*.experts.*.bias", "model.experts.7.up.weight", false),
        ("a*b*c", "aXbXbc", true),
        ("a**b", "ab", true),
        ("a.b", "a-b", false),
        ("[a-z]", "b", false),
    ] {
        assert_eq!(matches(pattern, name), wanted, "{pattern} {name}");
    }
}

#[test]
fn pattern_without_letter_or_too_long_matches_nothing() {
    for pattern in ["", "*", "*.*", "a b", "é", &"a".repeat(257), "a\n"] {
        assert!(!is_pattern(pattern), "{pattern:?}");
        assert!(!matches(pattern, pattern), "{pattern:?}");
    }
    assert!(is_pattern("*.inv_freq") && is_pattern(&"a".repeat(256)));
    let many: Vec<String> = (0..65).map(|number| format!("t{number}")).collect();
    let many = IgnoredTensors::new(many);
    assert!(many.matches("t63") && !many.matches("t64"));
}

proptest! {
    /// The same answers as by trying every length of every run.
    #[test]
    fn any_pattern_matches_as_all_runs_tried_would(pattern in "[ab*]{1,8}", name in "[ab]{0,8}") {
        fn tried(pattern: &[u8], name: &[u8]) -> bool {
            match pattern.split_first() {
                None => name.is_empty(),
                Some((b'*', rest)) => (0..=name.len()).any(|taken| tried(rest, &name[taken..])),
                Some((byte, rest)) => name.split_first().is_some_and(|(first, more)| first == byte && tried(rest, more)),
            }
        }
        prop_assume!(is_pattern(&pattern));
        prop_assert_eq!(matches(&pattern, &name), tried(pattern.as_bytes(), name.as_bytes()));
    }
}
