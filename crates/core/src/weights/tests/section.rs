use super::tensor;
use crate::weights::safetensors::{SafetensorsPlan, parse_header};
use crate::weights::{Coverage, CoverageError, DigestAlgorithm, Dtype, Layout, LayoutError, Manifest, ManifestError, Section, TensorSpec};

fn draft(name: &str) -> TensorSpec {
    TensorSpec { section: Section::Draft, ..tensor(name, Dtype::U8, &[64]) }
}

/// A model and a draft model that both have a tensor `w`.
fn both() -> Layout {
    Layout::new("model", vec![tensor("e", Dtype::U8, &[64]), tensor("w", Dtype::U8, &[64]), draft("w")], 0).unwrap()
}

#[test]
fn a_draft_model_has_names_of_its_own_and_comes_last() {
    let layout = both();
    assert!(layout.has_draft());
    assert!(!Layout::new("model", vec![tensor("w", Dtype::U8, &[64])], 0).unwrap().has_draft());
    let refused = |tensors| Layout::new("model", tensors, 0).unwrap_err();
    let model = || tensor("w", Dtype::U8, &[64]);
    assert_eq!(refused(vec![model(), draft("w"), draft("w")]), LayoutError::Duplicate { name: "draft/w".into() });
    assert_eq!(refused(vec![model(), draft("w"), tensor("v", Dtype::U8, &[64])]), LayoutError::OutOfOrder { name: "v".into() });
    assert_eq!(refused(vec![draft("w")]), LayoutError::DraftAlone);
    let confusing = vec![tensor("draft/w", Dtype::U8, &[64]), draft("w")];
    assert_eq!(refused(confusing), LayoutError::Duplicate { name: "draft/w".into() }, "one name in a file");
}

#[test]
fn older_agents_read_no_sections_and_refuse_a_draft() {
    let plain = serde_json::to_value(tensor("w", Dtype::U8, &[64])).unwrap();
    assert!(plain.get("section").is_none());
    let json = serde_json::to_value(both()).unwrap();
    assert_eq!(json["entries"][2]["section"], "draft");
    assert_eq!(serde_json::from_value::<Layout>(json).unwrap(), both());
    // A reader that does not know the field sees a tensor twice, or a layout with another digest.
    let mut unknown = both();
    unknown.entries[2].tensor.section = Section::Model;
    assert!(unknown.validate().is_err());
    unknown.entries[2].tensor.name = "v".into();
    let mut known = unknown.clone();
    known.entries[2].tensor.section = Section::Draft;
    assert_ne!(unknown.digest(), known.digest());
}

#[test]
fn a_version_counts_only_with_every_byte_of_its_draft_model() {
    let layout = both();
    let mut coverage = Coverage::new(layout.total_bytes);
    coverage.record(0, 128).unwrap();
    assert_eq!(coverage.check(&layout), Err(CoverageError::Missing { tensor: "draft/w".into(), missing: 64, total: 192 }));
    coverage.record(128, 64).unwrap();
    assert_eq!(coverage.check(&layout), Ok(()));
    let manifest = Manifest::new(1, layout, DigestAlgorithm::Xxh3_128, &[1, 2, 3]).unwrap();
    let differs = ManifestError::Differs { tensor: "draft/w".into(), tensors: 1, total: 3 };
    assert_eq!(manifest.compare(&[1, 2, 4]), Err(differs));
}

#[test]
fn one_file_holds_both_models_under_full_names() {
    let layout = both();
    let plan = SafetensorsPlan::new(&layout, None).unwrap();
    let [file] = plan.files.as_slice() else { panic!("one file, which workers can share") };
    let header = parse_header("model.safetensors", &file.header[8..], 192).unwrap();
    let names: Vec<_> = header.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["e", "w", "draft/w"]);
}

#[test]
fn empty_tensors_at_the_border_lose_no_bucket() {
    let empty = |name: &str| tensor(name, Dtype::U8, &[0]);
    let layout = Layout::new("model", vec![tensor("w", Dtype::U8, &[65]), empty("e"), draft("w"), draft("v")], 64).unwrap();
    let cut = layout.cut_between_tensors();
    let sections: Vec<_> = cut.buckets().map(|bucket| (bucket.bytes, cut.section(&bucket))).collect();
    assert_eq!(sections, [(128, Section::Model), (64, Section::Draft), (64, Section::Draft)]);
}
