//! Headers, indexes and directories with false contents: each must cause an error with the file and the tensor.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use crate::weights::safetensors::{Checkpoint, INDEX_FILE, header_length, parse_header, parse_index};

fn file(json: &str, data: &[u8]) -> Vec<u8> {
    [&(json.len() as u64).to_le_bytes(), json.as_bytes(), data].concat()
}

fn refused(json: &str, data_bytes: u64) -> String {
    parse_header("f", json.as_bytes(), data_bytes).unwrap_err().to_string()
}

#[test]
fn lies_in_a_header_are_named() {
    let one = |dtype: &str, shape: &str, begin: &str, end: &str| {
        format!(r#"{{"w":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{begin},{end}]}}}}"#)
    };
    let two = |begin: u64, end: u64| {
        format!(
            r#"{{"a":{{"dtype":"U8","shape":[10],"data_offsets":[0,10]}},"w":{{"dtype":"U8","shape":[{}],"data_offsets":[{begin},{end}]}}}}"#,
            end - begin
        )
    };
    let cases = [
        (one("F32", "2", "0", "7"), 7, "f: tensor w: its place holds 7 bytes, its type and shape need 8"),
        (one("F32", "2", "8", "0"), 8, "f: tensor w: it ends at 0, before it begins at 8"),
        (one("F32", "2", "0", "8"), 4, "f: tensor w: it ends at 8, the file holds 4 bytes"),
        (one("F32", "18446744073709551615,2", "0", "8"), 8, "f: tensor w: its size does not fit 64 bits"),
        (one("F32", "18446744073709551616", "0", "8"), 8, "f: tensor w: dtype, shape and data_offsets"),
        (one("F32", "-1", "0", "8"), 8, "f: tensor w: dtype, shape and data_offsets"),
        (one("F32", "2", "0", "18446744073709551615"), 8, "f: tensor w: its place holds"),
        (one("F4", "3", "0", "2"), 2, "f: tensor w: 12 bits do not fill whole bytes"),
        (one("F31", "2", "0", "8"), 8, "f: tensor w: its type F31 is unknown"),
        (two(9, 20), 20, "f: tensor w: it begins at 9, inside another tensor"),
        (two(0, 10), 10, "f: tensor w: it begins at 0, inside another tensor"),
        (two(11, 20), 20, "f: tensor w: it begins at 11, 1 bytes before it belong to no tensor"),
        (two(10, 20), 21, "f: 1 bytes after the last tensor belong to none"),
        (
            r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#.into(),
            2,
            "f: tensor w: appears twice",
        ),
        (r#"{"__metadata__":{},"__metadata__":{}}"#.into(), 0, "f: __metadata__ appears twice"),
        (r#"{"__metadata__":{"a":1}}"#.into(), 0, "f: the header is not the JSON object"),
        (r#"{"w":{"dtype":"U8","shape":[1]}}"#.into(), 1, "f: tensor w: dtype, shape and data_offsets"),
        (r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}}"#.into(), 1, "f: tensor w: dtype, shape and data_offsets"),
        (r#"{"w":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#.into(), 1, "f: tensor w: dtype, shape and data_offsets"),
        (r#"{"w":"#.into(), 1, "f: tensor w: dtype, shape and data_offsets"),
        ("{".into(), 0, "f: the header is not the JSON object"),
        ("{} {}".into(), 0, "f: the header is not the JSON object"),
        ("[]".into(), 0, "f: not safetensors: the header does not start with"),
        (String::new(), 0, "f: not safetensors: the header does not start with"),
        (format!(r#"{{"w":{}"#, "[".repeat(100_000)), 0, "f: tensor w: dtype, shape and data_offsets"),
    ];
    for (json, data_bytes, wanted) in cases {
        let error = refused(&json, data_bytes);
        assert!(error.contains(wanted), "{error}\nwanted: {wanted}");
    }
}

#[test]
fn an_error_never_quotes_the_file() {
    for json in [r#"{"w":"hunter2"}"#, r#"{"w":{"dtype":5,"shape":"hunter2"}}"#, r#"{"__metadata__":{"key":["hunter2"]}}"#] {
        let error = refused(json, 0);
        assert!(!error.contains("hunter2"), "{error}");
    }
}

#[test]
fn scalars_empty_tensors_and_padding_are_fine() {
    let json = r#"{"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"e":{"dtype":"F32","shape":[3,0],"data_offsets":[4,4]},"e0":{"dtype":"I64","shape":[0],"data_offsets":[0,0]}}   "#;
    let header = parse_header("f", json.as_bytes(), 4).unwrap();
    assert_eq!(header.tensors.iter().map(|tensor| tensor.name.as_str()).collect::<Vec<_>>(), ["e0", "s", "e"]);
    assert_eq!(parse_header("f", b"{}", 0).unwrap().tensors, []);
}

#[test]
fn length_beyond_the_file_is_refused_before_allocation() {
    for (length, file_bytes) in [(u64::MAX, 1000), (100_000_001, u64::MAX), (993, 1000), (1, 8), (0, 7)] {
        assert!(header_length("f", length.to_le_bytes(), file_bytes).is_err(), "{length} in {file_bytes}");
    }
    assert_eq!(header_length("f", 992u64.to_le_bytes(), 1000).unwrap(), 992);
}

fn open(files: &[(&str, Vec<u8>)]) -> Result<Checkpoint, String> {
    let directory = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(directory.path().join(name), bytes).unwrap();
    }
    Checkpoint::open(directory.path()).map_err(|error| error.to_string())
}

fn with(name: &str) -> Vec<u8> {
    file(&format!(r#"{{"{name}":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#), &[7])
}

#[test]
fn a_directory_that_is_no_checkpoint_says_what_is_wrong() {
    let index = |map: &str| (INDEX_FILE, format!(r#"{{"metadata":{{}},"weight_map":{{{map}}}}}"#).into_bytes());
    let (a, b) = ("a.safetensors", "b.safetensors");
    let cases = [
        (vec![("pytorch_model.bin", vec![1])], "holds no safetensors file (pickle is never read)"),
        (vec![(a, with("x")), (b, with("y"))], "holds several safetensors files and no model.safetensors.index.json"),
        (vec![(a, vec![1, 2, 3])], "a.safetensors: cut short"),
        (vec![(a, with("x")), index(r#""x":"a.safetensors","y":"a.safetensors""#)], "index.json: tensor y: is not in a.safetensors"),
        (vec![(a, with("x")), (b, with("y")), index(r#""x":"b.safetensors","y":"b.safetensors""#)], "tensor x: is not in b.safetensors"),
        (
            vec![(a, with("x")), (b, with("x")), index(r#""x":"a.safetensors","y":"b.safetensors""#)],
            "b.safetensors: tensor x: is also in a.safetensors",
        ),
        (vec![(a, with("x")), index(r#""x":"c.safetensors""#)], "c.safetensors: No such file"),
        (vec![index(r#""x":"../a.safetensors""#)], "tensor x: its file ../a.safetensors is not a plain"),
        (vec![index(r#""x":"a.bin""#)], "tensor x: its file a.bin is not a plain"),
        (vec![index(r#""x":"a.safetensors","x":"b.safetensors""#)], "tensor x: appears twice"),
        (vec![(INDEX_FILE, b"[]".to_vec())], "index.json: not an index"),
        (vec![("model.safetensors", with("x")), (a, with("y")), index(r#""y":"a.safetensors""#)], "holds both model.safetensors and"),
    ];
    for (files, wanted) in cases {
        let error = open(&files).unwrap_err();
        assert!(error.contains(wanted), "{error}\nwanted: {wanted}");
    }
    assert_eq!(open(&[(a, with("x"))]).unwrap().tensors().len(), 1);
    assert_eq!(open(&[(b, with("y")), (a, with("x")), index(r#""y":"b.safetensors","x":"a.safetensors""#)]).unwrap().specs()[0].name, "x");
}

/// `python/tests/test_loaded_files.py` asks vLLM for the same table.
#[test]
fn engine_loads_all_tensors_of_the_files_that_count() {
    let table: Vec<Value> = serde_json::from_str(include_str!("loaded_files.json")).unwrap();
    assert!(table.len() > 10);
    for case in table {
        let directory = tempfile::tempdir().unwrap();
        for (name, tensors) in case["files"].as_object().unwrap() {
            let tensors = tensors.as_array().unwrap();
            let place = |at: usize| json!({"dtype": "U8", "shape": [1], "data_offsets": [at, at + 1]});
            let header: Map<String, Value> =
                tensors.iter().enumerate().map(|(at, tensor)| (tensor.as_str().unwrap().to_owned(), place(at))).collect();
            fs::write(directory.path().join(name), file(&Value::Object(header).to_string(), &vec![7; tensors.len()])).unwrap();
        }
        if case["index"].is_object() {
            fs::write(directory.path().join(INDEX_FILE), json!({"weight_map": case["index"]}).to_string()).unwrap();
        }
        let opened = Checkpoint::open_as_engines_do(directory.path());
        let mut loads: Option<Vec<String>> = opened.ok().map(|opened| opened.specs().into_iter().map(|spec| spec.name).collect());
        if let Some(loads) = &mut loads {
            loads.sort();
        }
        assert_eq!(json!(loads), case["loads"], "{}", case["what"]);
    }
}

#[test]
fn engine_files_that_cannot_be_read_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let error = || Checkpoint::open_as_engines_do(directory.path()).unwrap_err().to_string();
    fs::write(directory.path().join("pytorch_model.bin"), [1]).unwrap();
    assert!(error().contains("holds no safetensors file (pickle is never read)"), "{}", error());
    fs::write(directory.path().join("a.safetensors"), [1, 2, 3]).unwrap();
    assert!(error().contains("a.safetensors: cut short"), "{}", error());
    fs::write(directory.path().join(INDEX_FILE), r#"{"weight_map":{"x":"../b.safetensors"}}"#).unwrap();
    assert!(error().contains("is not a plain"), "{}", error());
}

#[test]
fn a_pipe_or_a_missing_path_does_not_wait() {
    let directory = tempfile::tempdir().unwrap();
    let pipe = directory.path().join("model.safetensors");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR, 0).unwrap();
    let error = Checkpoint::open(directory.path()).unwrap_err().to_string();
    assert!(error.contains("model.safetensors: is not a regular file"), "{error}");
    let error = Checkpoint::open(Path::new("/does/not/exist")).unwrap_err().to_string();
    assert!(error.contains("/does/not/exist: No such file"), "{error}");
}

proptest! {
    #[test]
    fn no_header_makes_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), data_bytes: u64) {
        let _ = parse_header("f", &bytes, data_bytes);
        let _ = parse_index("f", &bytes);
    }

    #[test]
    fn no_flipped_byte_makes_it_panic(place in 0usize..200, byte: u8, data_bytes in 0u64..40) {
        let mut json = br#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}}"#.to_vec();
        let place = place % json.len();
        json[place] = byte;
        if let Ok(header) = parse_header("f", &json, data_bytes) {
            let held: u64 = header.tensors.iter().map(|tensor| tensor.end - tensor.begin).sum();
            prop_assert_eq!(held, data_bytes);
        }
    }
}
