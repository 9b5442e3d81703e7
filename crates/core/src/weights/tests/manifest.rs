use super::tensor;
use crate::weights::{DigestAlgorithm, Dtype, Layout, Manifest, ManifestError, Section};

fn manifest() -> Manifest {
    let layout = Layout::new("model", vec![tensor("a", Dtype::F32, &[8]), tensor("b", Dtype::U8, &[3])], 64).unwrap();
    Manifest::new(7, layout, DigestAlgorithm::Xxh3_128, &[1, 2]).unwrap()
}

#[test]
fn every_fact_of_a_manifest_changes_its_digest() {
    let changes: [fn(&mut Manifest); 11] = [
        |manifest| manifest.version = 8,
        |manifest| manifest.layout.artifact = "adapter".into(),
        |manifest| manifest.layout.bucket_bytes = 128,
        |manifest| manifest.layout.entries[0].tensor.name = "c".into(),
        |manifest| manifest.layout.entries[0].tensor.dtype = Dtype::I32,
        |manifest| manifest.layout.entries[0].tensor.shape = vec![2, 4],
        |manifest| manifest.layout.entries[0].tensor.load_unit = Some("u".into()),
        |manifest| manifest.layout.entries[0].tensor.load_unit = Some(String::new()),
        |manifest| manifest.layout.entries[1].tensor.section = Section::Draft,
        |manifest| manifest.layout.entries.swap(0, 1),
        |manifest| manifest.tensor_digests.swap(0, 1),
    ];
    let mut digests = std::collections::HashSet::from([manifest().digest()]);
    for (number, change) in changes.iter().enumerate() {
        let mut other = manifest();
        change(&mut other);
        assert!(digests.insert(other.digest()), "change {number} left the digest as it was");
    }
}

#[test]
fn digest_of_a_layout_is_stable_between_releases() {
    assert_eq!(manifest().layout.digest(), "c4ecb38570a32ffa5008e8138f354b0ca75f47bd1dfcb09459888c1f6564c178");
    assert_eq!(manifest().digest(), "158492b18df331fdcd01dd559a052c8c0f178c65e10dfe3c2ca352d9f4c43961");
}

#[test]
fn a_tensor_that_differs_is_named() {
    let manifest = manifest();
    manifest.validate().unwrap();
    manifest.compare(&[1, 2]).unwrap();
    let differs = |tensor: &str, tensors| Err(ManifestError::Differs { tensor: tensor.into(), tensors, total: 2 });
    assert_eq!(manifest.compare(&[1, 3]), differs("b", 1));
    assert_eq!(manifest.compare(&[2, 1]), differs("a", 2));
    assert_eq!(manifest.compare(&[1]), Err(ManifestError::Count { digests: 1, tensors: 2 }));
}

#[test]
fn a_manifest_with_a_bad_digest_is_refused() {
    let mut bad = manifest();
    bad.tensor_digests[1] = "xyz".into();
    assert_eq!(bad.validate(), Err(ManifestError::NotADigest { tensor: "b".into() }));
    bad.tensor_digests.pop();
    assert_eq!(bad.validate(), Err(ManifestError::Count { digests: 1, tensors: 2 }));
    bad.tensor_digests.clear();
    assert!(bad.compare(&[]).is_err(), "a manifest without digests proves nothing");
}
