//! The pickles as Python reads them: by the real torch of `WEIGHTSYNC_VENV` (`make engine-test`), and by Python's own reader with stand-ins for
//! the classes that are named.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use proptest::prelude::*;
use serde_json::{Value as Json, json};

use super::paddle;
use super::pickle::Value;
use super::{Device, Piece, SharedTensor, TorchError, checkpoint_engine_bucket, dtype, lmdeploy_bucket, lmdeploy_nothing, sglang_bucket};
use weightsync_core::weights::Dtype;

/// Who reads the pickles.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reader {
    /// Python without torch.
    Python,
    Torch,
}

impl Reader {
    fn command(self) -> Command {
        if self == Self::Python {
            return Command::new("python3");
        }
        let venv = std::env::var_os("WEIGHTSYNC_VENV").expect("WEIGHTSYNC_VENV has torch: WEIGHTSYNC_VENV=$(tests/cluster/vllm-venv.sh)");
        Command::new(PathBuf::from(venv).join("bin/python"))
    }
}

/// What Python finds in each pickle, in a plain form (tests/engine/read_pickle.py).
fn read(by: Reader, values: &[Value]) -> Vec<Json> {
    use std::io::Write;
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/engine/read_pickle.py");
    let mut command = by.command();
    command.arg(script).args((by == Reader::Torch).then_some("--torch"));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let hex = |value: &Value| value.pickle().iter().fold(String::new(), |hex, byte| hex + &format!("{byte:02x}"));
    let lines: String = values.iter().map(|value| hex(value) + "\n").collect();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn tensor() -> SharedTensor {
    let mut handle = [0; 64];
    handle.iter_mut().zip(0..).for_each(|(to, number)| *to = number);
    SharedTensor {
        handle,
        storage_offset: 1 << 32,
        storage_bytes: 5 << 30,
        elements: 1 << 31,
        dtype: Dtype::BF16,
        device: Device::Uuid("GPU-1234".into()),
        counter: Some(super::counter::Counter { name: "/weightsync-7".into(), slot: 300 }),
    }
}

/// Each with Python's own reader, and with torch.
macro_rules! readers {
    ($($test:ident),* $(,)?) => {
        mod by_python {
            $(#[test]
            fn $test() {
                super::$test(super::Reader::Python);
            })*
        }
        mod by_torch {
            $(#[test]
            #[ignore = "needs torch: make engine-test"]
            fn $test() {
                super::$test(super::Reader::Torch);
            })*
        }
    };
}

readers!(
    python_reads_back_every_kind_of_value,
    a_shared_tensor_has_the_fifteen_arguments_of_torch,
    buckets_are_read_as_each_engine_names_their_parts,
    paddle_buffer_has_latin_1_handle_and_readers_device,
    every_element_type_of_safetensors_is_one_of_torch_or_refused,
);

const PIECES: [Piece<'static>; 2] = [
    Piece { name: "model.embed.weight", dtype: Dtype::BF16, shape: &[16, 32], offset: 0, bytes: 1024 },
    Piece { name: "model.norm.weight", dtype: Dtype::BF16, shape: &[3], offset: 1088, bytes: 6 },
];

fn python_reads_back_every_kind_of_value(by: Reader) {
    let numbers = [0, 1, 255, 256, 65_535, 65_536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 39, (1 << 47) + 5, 1 << 63, u64::MAX];
    let found = read(
        by,
        &[
            Value::Tuple(numbers.map(Value::Int).to_vec()),
            Value::List(vec![
                Value::None,
                Value::Bool(true),
                Value::Bool(false),
                Value::List(vec![]),
                Value::Dict(vec![]),
                Value::Tuple(vec![]),
            ]),
            Value::dict([("é\n'", Value::text("ß".repeat(300))), ("b", Value::Bytes(vec![7; 300])), ("c", Value::Bytes(vec![]))]),
        ],
    );
    assert_eq!(found[0]["tuple"], json!(numbers));
    assert_eq!(found[1], json!([null, true, false, [], {"dict": {}}, {"tuple": []}]));
    assert_eq!(found[2]["dict"], json!({"é\n'": "ß".repeat(300), "b": {"bytes": "07".repeat(300)}, "c": {"bytes": ""}}));
}

fn a_shared_tensor_has_the_fifteen_arguments_of_torch(by: Reader) {
    let found = read(by, &[tensor().unbuilt().unwrap()]).remove(0);
    let parts = found["tuple"].as_array().unwrap();
    assert_eq!(parts[0]["global"], "torch.multiprocessing.reductions.rebuild_cuda_tensor");
    let arguments = parts[1]["tuple"].as_array().unwrap();
    assert_eq!(arguments.len(), 15);
    assert_eq!(arguments[0]["global"], "torch.Tensor");
    assert_eq!(arguments[1], json!({"size": [1_u64 << 31]}));
    assert_eq!(arguments[2], json!({"tuple": [1]}));
    assert_eq!(arguments[4]["global"], "torch.storage.TypedStorage");
    assert_eq!(arguments[5], json!({"dtype": "torch.bfloat16"}));
    assert_eq!(arguments[6], "1234");
    assert_eq!((&arguments[11], &arguments[12]), (&json!({"bytes": "2f77656967687473796e632d37"}), &json!(300)));
    assert_eq!(arguments[7]["bytes"].as_str().unwrap().len(), 128);
    assert_eq!((arguments[8].as_u64(), arguments[9].as_u64()), (Some(5 << 30), Some(1 << 32)));
    assert_eq!((&arguments[10], &arguments[13], &arguments[14]), (&json!(false), &json!({"bytes": ""}), &json!(false)));
}

fn buckets_are_read_as_each_engine_names_their_parts(by: Reader) {
    let bytes = SharedTensor { dtype: Dtype::U8, device: Device::Readers, ..tensor() };
    let found = read(
        by,
        &[
            checkpoint_engine_bucket(&PIECES, 4096).unwrap(),
            lmdeploy_bucket(&PIECES, &tensor(), Some([9; 64]), false).unwrap(),
            lmdeploy_nothing(),
        ],
    );
    let norm = json!({"dict": {"name": "model.norm.weight", "dtype": {"dtype": "torch.bfloat16"}, "shape": {"size": [3]}, "offset": 5184}});
    assert_eq!(found[0][1], norm);
    let bucket = &found[1]["dict"];
    assert_eq!(bucket["require_clone"], json!(false));
    assert_eq!(bucket["event_ipc_handle"]["bytes"].as_str().unwrap(), "09".repeat(64));
    assert_eq!(bucket["flattened_tensor"]["tuple"][0]["global"], "torch.multiprocessing.reductions.rebuild_cuda_tensor");
    let metadata = &bucket["metadata"][1];
    assert_eq!(metadata["class"], "lmdeploy.utils.FlattenedTensorMetadata");
    assert_eq!((&metadata["start_idx"], &metadata["end_idx"], &metadata["numel"]), (&json!(544), &json!(547), &json!(3)));
    assert_eq!(found[2], json!({"dict": {"metadata": []}}));
    // SGLang's reader calls the function itself, which no machine without a GPU survives: the arguments are enough here.
    let Value::Dict(bucket) = sglang_bucket(&PIECES, &bytes).unwrap() else { panic!("a dict") };
    assert!(matches!(&bucket[0].1, Value::Call(_, arguments) if arguments.len() == 15));
    let metadata = read(by, &[bucket[1].1.clone()]).remove(0);
    assert_eq!(metadata[1]["class"], "sglang.srt.weight_sync.tensor_bucket.FlattenedTensorMetadata");
    assert_eq!((&metadata[1]["start_idx"], &metadata[1]["end_idx"]), (&json!(1088), &json!(1094)));
}

fn paddle_buffer_has_latin_1_handle_and_readers_device(by: Reader) {
    let mut handle = [0; 64];
    handle.iter_mut().zip(190..).for_each(|(to, number)| *to = u8::try_from(number).unwrap());
    let buffer = paddle::SharedBuffer { handle, offset: 1 << 20, bytes: 5190, device: 3 };
    let found = read(by, &[paddle::bucket(&PIECES, &buffer).unwrap()]).remove(0);
    let bucket = &found["dict"];
    // What `encode("latin-1")` makes of it.
    let bytes: Vec<u8> = bucket["buffer_meta"][0].as_str().unwrap().chars().map(|c| u8::try_from(u32::from(c)).unwrap()).collect();
    assert_eq!(bytes, handle);
    assert_eq!(bucket["buffer_meta"].as_array().unwrap()[1..], [json!(1 << 20), json!(5190), json!(2), json!([5190]), json!([]), json!(3)]);
    assert_eq!(bucket["params"][1]["dict"], json!({"name": "model.norm.weight", "dtype": "bfloat16", "shape": [3], "offset": 1088}));
    let odd = [Piece { dtype: Dtype::F8_E8M0, ..PIECES[0] }];
    assert!(matches!(paddle::bucket(&odd, &buffer), Err(TorchError::NoDtype(Dtype::F8_E8M0))));
}

fn every_element_type_of_safetensors_is_one_of_torch_or_refused(by: Reader) {
    let named: Vec<Value> = Dtype::ALL.into_iter().filter_map(|each| dtype(each).ok()).collect();
    assert_eq!(named.len(), Dtype::ALL.len() - 3);
    for found in read(by, &named) {
        assert!(found["dtype"].as_str().unwrap().starts_with("torch."), "{found}");
    }
    assert_eq!(dtype(Dtype::F4), Err(TorchError::NoDtype(Dtype::F4)));
}

#[test]
fn what_torch_cannot_view_is_refused() {
    let odd = [Piece { offset: 3, ..PIECES[0] }];
    assert!(matches!(checkpoint_engine_bucket(&odd, 0), Err(TorchError::Unaligned { offset: 3, .. })));
    let mixed = [PIECES[0], Piece { name: "scale", dtype: Dtype::F32, shape: &[1], offset: 2048, bytes: 4 }];
    assert!(matches!(lmdeploy_bucket(&mixed, &tensor(), None, false), Err(TorchError::MixedDtypes { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]
    #[test]
    fn any_text_and_number_survives(texts in proptest::collection::vec("\\PC{0,40}", 1..50), numbers in proptest::collection::vec(any::<u64>(), 1..50)) {
        let found = read(Reader::Python, &[Value::List(texts.iter().map(Value::text).collect()), Value::List(numbers.iter().copied().map(Value::Int).collect())]);
        prop_assert_eq!(&found[0], &json!(texts));
        prop_assert_eq!(&found[1], &json!(numbers));
    }
}
