#[test]
fn digest_tells_starts_apart_by_xxhash() {
    // Python xxhash 4.1.0: xxhash.xxh3_64_hexdigest of each.
    for (text, digest) in
        [("", "2d06800538d394c2"), ("weightsync", "f149a24055f1e042"), (r#"[1.5,42,["sglang","serve"]]"#, "3e943f1ffdfdf8e0")]
    {
        assert_eq!(super::short_digest(text), digest, "{text}");
    }
}
