use super::*;

fn said(values: &[(&str, char)]) -> Checksums {
    let by_name = values.iter().map(|(name, digit)| ((*name).to_owned(), digit.to_string().repeat(64))).collect();
    Checksums { version: "0.32.0".into(), by_name }
}

fn of(values: &[(&str, char)]) -> EngineChecksum {
    summarise("vllm", &said(values), Duration::from_millis(7)).unwrap()
}

#[test]
fn equal_weights_have_one_digest_and_others_another() {
    let one = of(&[("tp0:norm.weight", 'a'), ("tp1:norm.weight", 'b')]);
    assert_eq!(one, of(&[("tp1:norm.weight", 'b'), ("tp0:norm.weight", 'a')]));
    let other = of(&[("tp0:norm.weight", 'a'), ("tp1:norm.weight", 'c')]);
    assert_eq!((other.of == one.of, other.digest == one.digest), (true, false));
    let swapped = of(&[("tp0:norm.weight", 'b'), ("tp1:norm.weight", 'a')]);
    assert_ne!(swapped.digest, one.digest);
}

#[test]
fn engines_with_other_names_are_not_comparable() {
    let one = of(&[("norm.weight", 'a')]);
    assert_ne!(one.of, of(&[("norm.weight", 'a'), ("head.bias", 'a')]).of);
    assert_ne!(one.of, of(&[("head.weight", 'a')]).of);
    let newer = Checksums { version: "0.33.0".into(), ..said(&[("norm.weight", 'a')]) };
    assert_ne!(one.of, summarise("vllm", &newer, Duration::ZERO).unwrap().of);
}

#[test]
fn buffers_are_not_compared() {
    assert_eq!(of(&[("norm.weight", 'a'), ("attn.k_scale", 'b')]), of(&[("norm.weight", 'a'), ("attn.k_scale", 'c')]));
}

#[test]
fn checksums_of_nothing_prove_nothing() {
    let empty = |value: &str| {
        let mut said = said(&[("norm.weight", 'a')]);
        said.by_name.insert("qkv.weight".to_owned(), value.to_owned());
        summarise("vllm", &said, Duration::ZERO).unwrap_err()
    };
    assert_eq!(empty(OF_NOTHING), "its checksum of qkv.weight is that of no bytes");
    assert_eq!(empty(&OF_NOTHING[..16]), "its checksum of qkv.weight is that of no bytes");
    assert_eq!(empty(""), "its checksum of qkv.weight has 0 digits");
    assert!(summarise("vllm", &said(&[("attn.k_scale", 'b')]), Duration::ZERO).is_err());
}
