use proptest::prelude::*;

use super::{tensor, tensors};
use crate::weights::{ALIGNMENT, Dtype, Layout, LayoutError, Section, default_bucket_bytes};

#[test]
fn tensors_start_aligned_and_keep_their_order() {
    let specs = vec![tensor("b", Dtype::BF16, &[3, 5]), tensor("empty", Dtype::F32, &[4, 0]), tensor("a", Dtype::F64, &[])];
    let layout = Layout::new("model", specs, 64).unwrap();
    let places: Vec<_> = layout.entries.iter().map(|entry| (entry.tensor.name.as_str(), entry.offset, entry.bytes)).collect();
    assert_eq!(places, [("b", 0, 30), ("empty", 64, 0), ("a", 64, 8)]);
    assert_eq!(layout.total_bytes, 72);
    assert_eq!(layout.buckets().map(|bucket| (bucket.sequence, bucket.offset, bucket.bytes)).collect::<Vec<_>>(), [(0, 0, 64), (1, 64, 8)]);
}

#[test]
fn a_layout_without_bytes_has_no_bucket() {
    for specs in [vec![], vec![tensor("empty", Dtype::U8, &[0])]] {
        let layout = Layout::new("model", specs, 0).unwrap();
        assert_eq!((layout.total_bytes, layout.bucket_count(), layout.buckets().count()), (0, 0, 0));
    }
}

#[test]
fn what_cannot_be_laid_out_is_named() {
    let cases = [
        (vec![tensor("w", Dtype::U8, &[1]), tensor("w", Dtype::U8, &[2])], "tensor w appears twice"),
        (vec![tensor("w", Dtype::F32, &[u64::MAX, 2])], "tensor w: its size does not fit 64 bits"),
        (
            [0, 1, 2, 3, 4].map(|number| tensor(&format!("w{number}"), Dtype::U8, &[1 << 60])).to_vec(),
            "tensor w4: its size does not fit 64 bits",
        ),
        (vec![tensor("w", Dtype::F4, &[3])], "tensor w: 12 bits do not fill whole bytes"),
        (vec![tensor("", Dtype::U8, &[])], "tensor name \"\" cannot be used: it is empty"),
        (vec![tensor("__metadata__", Dtype::U8, &[])], "the safetensors format keeps it for itself"),
    ];
    for (specs, wanted) in cases {
        let error = Layout::new("model", specs, 64).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
    assert_eq!(Layout::new("model", vec![], 63), Err(LayoutError::BucketTooSmall { bytes: 63 }));
    let huge = Layout::new("model", vec![tensor("w", Dtype::U8, &[1 << 60])], 64);
    assert_eq!(huge, Err(LayoutError::TooManyBuckets { buckets: 1 << 54 }));
}

#[test]
fn a_layout_that_lies_is_refused() {
    let good = Layout::new("model", vec![tensor("a", Dtype::F32, &[8]), tensor("b", Dtype::F32, &[40])], 64).unwrap();
    good.validate().unwrap();
    let lies: [fn(&mut Layout); 7] = [
        |layout| layout.entries[1].offset = 32,
        |layout| layout.entries[0].bytes = 31,
        |layout| layout.total_bytes += 1,
        |layout| layout.bucket_bytes = 0,
        |layout| layout.bucket_bytes = 65,
        |layout| layout.entries[1].tensor.name = "a".into(),
        |layout| layout.entries[0].tensor.shape = vec![u64::MAX, u64::MAX],
    ];
    for (number, lie) in lies.iter().enumerate() {
        let mut layout = good.clone();
        lie(&mut layout);
        assert!(layout.validate().is_err(), "lie {number} was believed");
        // Use before the check must not panic.
        let _ = (layout.bucket_count(), layout.buckets().take(5).count(), layout.parts(0, u64::MAX).count());
    }
}

#[test]
fn a_control_character_in_a_name_does_not_reach_an_error() {
    let specs = vec![tensor("a\n\u{1b}[31m", Dtype::U8, &[1]); 2];
    let error = Layout::new("model", specs, 64).unwrap_err().to_string();
    assert!(!error.contains(['\n', '\u{1b}']), "{error:?}");
}

#[test]
fn default_buckets_are_aligned_and_bounded() {
    for total in [0, 1, 1 << 20, 300_000_001, 1 << 40] {
        let bytes = default_bucket_bytes(total);
        assert!(bytes.is_multiple_of(ALIGNMENT) && (1 << 20..=32 << 20).contains(&bytes), "{bytes} for {total}");
    }
}

proptest! {
    #[test]
    fn buckets_cover_the_stream_once_in_order(specs in tensors(), bucket_bytes in 64u64..700) {
        let layout = Layout::new("model", specs, bucket_bytes).unwrap();
        layout.validate().unwrap();
        let mut end = 0;
        for (number, bucket) in layout.buckets().enumerate() {
            prop_assert_eq!((bucket.sequence as usize, bucket.offset), (number, end));
            prop_assert!(bucket.bytes >= 1 && bucket.bytes <= layout.bucket_bytes);
            prop_assert_eq!(layout.bucket(bucket.sequence), Some(bucket));
            end += bucket.bytes;
        }
        prop_assert_eq!(end, layout.total_bytes);
        prop_assert_eq!(layout.buckets().count(), layout.bucket_count() as usize);
        prop_assert_eq!(layout.bucket(layout.bucket_count()), None);
    }

    #[test]
    fn parts_of_any_cut_give_every_byte_of_every_tensor_once(specs in tensors(), step in 1u64..200) {
        let layout = Layout::new("model", specs, 64).unwrap();
        let mut seen = vec![0u64; layout.entries.len()];
        let mut offset = 0;
        while offset < layout.total_bytes {
            for part in layout.parts(offset, step) {
                prop_assert!(part.bytes > 0 && part.in_range + part.bytes <= step);
                prop_assert_eq!(part.in_tensor, seen[part.index]);
                prop_assert_eq!(part.entry.offset + part.in_tensor, offset + part.in_range);
                seen[part.index] += part.bytes;
            }
            offset += step;
        }
        let whole: Vec<_> = layout.entries.iter().map(|entry| entry.bytes).collect();
        prop_assert_eq!(seen, whole);
    }

    #[test]
    fn a_layout_survives_json_and_its_digest_with_it(specs in tensors()) {
        let layout = Layout::new("model", specs, 128).unwrap();
        let back: Layout = serde_json::from_str(&serde_json::to_string(&layout).unwrap()).unwrap();
        prop_assert_eq!(back.digest(), layout.digest());
        prop_assert_eq!(back, layout);
    }
}

#[test]
fn bucket_by_number_is_the_one_of_that_order() {
    let specs = (0..500).map(|number| tensor(&format!("w{number}"), Dtype::U8, &[number % 7 * 16])).collect();
    let even = Layout::new("model", specs, 128).unwrap();
    for layout in [even.clone(), even.cut_between_tensors()] {
        let all: Vec<_> = layout.buckets().collect();
        assert_eq!(all.len(), layout.bucket_count() as usize);
        assert_eq!((0..layout.bucket_count()).map(|number| layout.bucket(number).unwrap()).collect::<Vec<_>>(), all);
        assert_eq!((all[0].offset, all.last().map(|last| last.offset + last.bytes)), (0, Some(layout.total_bytes)));
        assert_eq!(layout.bucket(layout.bucket_count()), None);
    }
}

#[test]
fn cut_between_tensors_every_bucket_holds_whole_tensors() {
    let specs = vec![
        tensor("a", Dtype::U8, &[60]),
        tensor("b", Dtype::U8, &[64]),
        tensor("large", Dtype::U8, &[300]),
        tensor("c", Dtype::U8, &[1]),
        tensor("empty", Dtype::U8, &[0]),
    ];
    let layout = Layout::new("model", specs, 128).unwrap().cut_between_tensors();
    layout.validate().unwrap();
    let buckets: Vec<_> = layout.buckets().map(|bucket| (bucket.sequence, bucket.offset, bucket.bytes)).collect();
    assert_eq!(buckets, [(0, 0, 128), (1, 128, 320), (2, 448, 64)]);
    assert_eq!((layout.bucket_count(), layout.largest_bucket()), (3, 320));
    assert_eq!(layout.bucket(1).unwrap().bytes, 320);
    assert_eq!(layout.bucket(3), None);
    let json = serde_json::to_value(&layout).unwrap();
    assert_eq!(json["cuts"], "betweenTensors");
    assert_eq!(serde_json::from_value::<Layout>(json).unwrap(), layout);
}

#[test]
fn a_load_unit_stays_in_one_bucket_where_it_fits() {
    let of = |name: &str, unit: Option<&str>| {
        let mut tensor = tensor(name, Dtype::U8, &[64]);
        tensor.load_unit = unit.map(str::to_owned);
        tensor
    };
    let specs = vec![of("o", None), of("q", Some("qkv")), of("k", Some("qkv")), of("v", Some("qkv")), of("n", None)];
    let cut =
        |bytes| Layout::new("model", specs.clone(), bytes).unwrap().cut_between_tensors().buckets().map(|b| b.bytes).collect::<Vec<_>>();
    assert_eq!(cut(192), [64, 192, 64], "the unit is not torn to fill the first bucket");
    assert_eq!(cut(128), [128, 128, 64], "a unit longer than a bucket is torn between its tensors");
}

#[test]
fn the_cut_is_part_of_what_a_layout_is() {
    let even = Layout::new("model", vec![tensor("a", Dtype::U8, &[64])], 64).unwrap();
    assert_ne!(even.digest(), even.clone().cut_between_tensors().digest());
    assert!(serde_json::to_value(&even).unwrap().get("cuts").is_none(), "what older agents read");
}

proptest! {
    #[test]
    fn buckets_cover_the_stream_and_tear_no_tensor(
        sizes in proptest::collection::vec(0_u64..500, 0..40), units in proptest::collection::vec(0_u8..6, 40), bucket in 1_u64..8,
        draft in 1_usize..60
    ) {
        let specs = sizes.iter().zip(&units).enumerate().map(|(number, (size, unit))| {
            let mut tensor = tensor(&format!("t{number}"), Dtype::U8, &[*size]);
            tensor.load_unit = (*unit < 3).then(|| unit.to_string());
            tensor.section = if number < draft { Section::Model } else { Section::Draft };
            tensor
        });
        let layout = Layout::new("model", specs.collect(), bucket * ALIGNMENT).unwrap().cut_between_tensors();
        let mut end = 0;
        for (number, bucket) in layout.buckets().enumerate() {
            prop_assert_eq!((bucket.sequence as usize, bucket.offset), (number, end));
            prop_assert!(bucket.bytes > 0);
            end += bucket.bytes;
            for part in layout.parts(bucket.offset, bucket.bytes) {
                prop_assert_eq!((part.in_tensor, part.bytes), (0, part.entry.bytes), "{} is torn", part.entry.tensor.name);
                prop_assert_eq!(part.entry.tensor.section, layout.section(&bucket), "a bucket is loaded into one model");
            }
            let several = layout.parts(bucket.offset, bucket.bytes).count() > 1;
            prop_assert!(!several || bucket.bytes <= layout.bucket_bytes.next_multiple_of(ALIGNMENT));
        }
        prop_assert_eq!(end, layout.total_bytes);
        prop_assert_eq!(layout.bucket_count() as usize, layout.buckets().count());
    }
}
