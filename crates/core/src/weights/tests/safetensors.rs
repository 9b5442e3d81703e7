use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use proptest::prelude::*;

use super::{pattern, tensor, tensors};
use crate::weights::safetensors::{Checkpoint, INDEX_FILE, SINGLE_FILE, SafetensorsPlan};
use crate::weights::{Dtype, Layout};

/// Writes the stream of a layout to planned files, in parts in any order.
fn write(directory: &Path, layout: &Layout, plan: &SafetensorsPlan, stream: &[u8], part: usize, backwards: bool) {
    let files: Vec<_> = plan.files.iter().map(|file| fs::File::create(directory.join(&file.name)).unwrap()).collect();
    for (file, planned) in files.iter().zip(&plan.files) {
        file.write_all_at(&planned.header, 0).unwrap();
        file.set_len(planned.bytes).unwrap();
    }
    let mut offsets: Vec<usize> = (0..stream.len()).step_by(part).collect();
    if backwards {
        offsets.reverse();
    }
    for offset in offsets {
        let bytes = &stream[offset..(offset + part).min(stream.len())];
        for segment in plan.segments(layout, offset as u64, bytes.len() as u64) {
            let (start, end) = (segment.in_part as usize, (segment.in_part + segment.bytes) as usize);
            files[segment.file].write_all_at(&bytes[start..end], segment.file_offset).unwrap();
        }
    }
    if let Some((name, json)) = &plan.index {
        fs::write(directory.join(name), json).unwrap();
    }
}

fn zero_gaps(layout: &Layout, stream: &mut [u8]) {
    let mut end = 0;
    for entry in &layout.entries {
        stream[end..entry.offset as usize].fill(0);
        end = entry.end() as usize;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn what_was_written_in_any_order_is_read_back(
        specs in tensors(), shard in prop::option::of(1u64..400), part in 1usize..500, backwards: bool,
    ) {
        let layout = Layout::new("model", specs, 64).unwrap();
        let mut stream = pattern(layout.total_bytes as usize);
        zero_gaps(&layout, &mut stream);
        let plan = SafetensorsPlan::new(&layout, shard).unwrap();
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), &layout, &plan, &stream, part, backwards);
        let on_disk: u64 = fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
        prop_assert_eq!(plan.total_bytes(), on_disk);

        let checkpoint = Checkpoint::open(directory.path()).unwrap();
        prop_assert_eq!(checkpoint.metadata().get("format").map(String::as_str), Some("pt"));
        prop_assert_eq!(checkpoint.tensors().len(), layout.entries.len());
        for (index, found) in checkpoint.tensors().iter().enumerate() {
            let entry = layout.entries.iter().find(|entry| entry.tensor.name == found.spec.name).unwrap();
            prop_assert_eq!((&found.spec.shape, found.spec.dtype, found.bytes), (&entry.tensor.shape, entry.tensor.dtype, entry.bytes));
            let mut bytes = vec![0; found.bytes as usize];
            checkpoint.read_tensor(index, 0, &mut bytes).unwrap();
            prop_assert_eq!(&bytes[..], &stream[entry.offset as usize..entry.end() as usize]);
        }
        // A new layout of the checkpoint reads the same bytes, in parts of any length.
        let again = Layout::new("model", checkpoint.specs(), 64).unwrap();
        let mut whole = vec![1; again.total_bytes as usize];
        checkpoint.read_stream(&again, 0, &mut whole).unwrap();
        let mut parts = Vec::new();
        while parts.len() < whole.len() {
            let mut next = vec![1; part.min(whole.len() - parts.len())];
            checkpoint.read_stream(&again, parts.len() as u64, &mut next).unwrap();
            parts.extend(next);
        }
        prop_assert_eq!(parts, whole);
        checkpoint.check_unchanged().unwrap();
    }

    #[test]
    fn tensors_are_aligned_in_the_file(specs in tensors()) {
        let layout = Layout::new("model", specs, 64).unwrap();
        let plan = SafetensorsPlan::new(&layout, None).unwrap();
        for entry in layout.entries.iter().filter(|entry| entry.bytes > 0) {
            let place = plan.segments(&layout, entry.offset, entry.bytes).next().unwrap().file_offset;
            prop_assert!(place.is_multiple_of((entry.tensor.dtype.bits() / 8).max(1)), "{} at {place}", entry.tensor.name);
        }
    }
}

#[test]
fn shards_are_cut_by_bytes_and_named_by_the_index() {
    let specs = (0..4).map(|number| tensor(&format!("w{number}"), Dtype::U8, &[if number == 1 { 500 } else { 40 }])).collect();
    let layout = Layout::new("model", specs, 64).unwrap();
    let plan = SafetensorsPlan::new(&layout, Some(100)).unwrap();
    let names: Vec<_> = plan.files.iter().map(|file| file.name.as_str()).collect();
    assert_eq!(names, ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"]);
    let (name, json) = plan.index.unwrap();
    assert_eq!(name, INDEX_FILE);
    let index: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(index["metadata"]["total_size"], 620);
    assert_eq!(index["weight_map"]["w1"], names[1]);
    assert_eq!(index["weight_map"]["w3"], names[2]);
}

#[test]
fn file_written_while_it_is_read_is_reported() {
    let directory = tempfile::tempdir().unwrap();
    let layout = Layout::new("model", vec![tensor("w", Dtype::U8, &[100])], 64).unwrap();
    let plan = SafetensorsPlan::new(&layout, None).unwrap();
    write(directory.path(), &layout, &plan, &pattern(100), 100, false);
    let path = directory.path().join(SINGLE_FILE);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(150).unwrap();
    let error = checkpoint.check_unchanged().unwrap_err().to_string();
    assert!(error.contains("model.safetensors: was written to"), "{error}");
    file.set_len(100).unwrap();
    let error = checkpoint.read_tensor(0, 0, &mut [0; 100]).unwrap_err().to_string();
    assert!(error.starts_with("model.safetensors: tensor w cannot be read"), "{error}");
    let error = checkpoint.read_tensor(0, 90, &mut [0; 11]).unwrap_err().to_string();
    assert!(error.contains("11 bytes from 90 on were asked for, it has 100"), "{error}");
}

#[test]
fn a_replaced_directory_does_not_mix_two_checkpoints() {
    let directory = tempfile::tempdir().unwrap();
    let layout = Layout::new("model", vec![tensor("w", Dtype::U8, &[100])], 64).unwrap();
    let plan = SafetensorsPlan::new(&layout, None).unwrap();
    write(directory.path(), &layout, &plan, &pattern(100), 100, false);
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    fs::remove_file(directory.path().join(SINGLE_FILE)).unwrap();
    write(directory.path(), &layout, &plan, &[9; 100], 100, false);
    let mut bytes = vec![0; 100];
    checkpoint.read_tensor(0, 0, &mut bytes).unwrap();
    assert_eq!(bytes, pattern(100));
}
