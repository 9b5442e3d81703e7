//! Every WeightSync of `docs/examples` is one that the API server would take as it stands.

use std::fs;
use std::path::Path;

use kube::core::cel::Validator;
use serde_json::Value;

use crate::api::{WeightSync, schema, unknown_fields, validate};

#[test]
fn every_example_is_valid_and_has_no_unknown_field() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/examples");
    let schema = schema().unwrap();
    let files = fs::read_dir(&folder).unwrap().chain(fs::read_dir(folder.join("quickstart")).unwrap());
    let paths = files.map(|entry| entry.unwrap().path()).filter(|path| path.is_file() && !path.ends_with("quickstart/pods.yaml"));
    let mut seen = 0;
    for path in paths {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let documents: Vec<Value> = serde_saphyr::from_multiple(&fs::read_to_string(&path).unwrap()).unwrap();
        let objects: Vec<&Value> = documents.iter().filter(|document| document["kind"] == "WeightSync").collect();
        assert_eq!(objects.len(), 1, "{name}: an example shows one WeightSync");
        for object in objects {
            assert_eq!(unknown_fields(&schema, object), Vec::<String>::new(), "{name}");
            let typed: WeightSync = serde_json::from_value(object.clone()).unwrap();
            assert_eq!(validate(&typed.spec), Vec::new(), "{name}");
            Validator::new().validate(&schema, object, None).unwrap_or_else(|errors| panic!("{name}: {errors:?}"));
            seen += 1;
        }
    }
    assert!(seen >= 6, "{seen} examples");
}
