//! Reads what [`weightsync_torch::pickle`] writes, for simulated engines alone: into plain values, by the opcodes that it uses and no others.
//!
//! Nothing is imported, called or made: a global is a name, a call is a value that holds its arguments. The product never reads a pickle;
//! the engines that are simulated here do.

use weightsync_torch::pickle::Value;

enum Item {
    Mark,
    Value(Value),
}

/// The value of a pickle; none for anything that our writer would not have written. Names of globals are those that it knows.
pub(super) fn read(pickle: &[u8]) -> Option<Value> {
    let mut rest = pickle.strip_prefix(&[0x80, 3])?;
    let mut stack: Vec<Item> = Vec::new();
    loop {
        let code = take(&mut rest, 1)?.first().copied()?;
        let value = match code {
            b'.' => return (rest.is_empty() && stack.len() == 1).then(|| pop(&mut stack)).flatten(),
            b'(' => {
                stack.push(Item::Mark);
                continue;
            }
            b'N' => Value::None,
            0x88 => Value::Bool(true),
            0x89 => Value::Bool(false),
            b'K' => Value::Int(number(&mut rest, 1)?),
            b'M' => Value::Int(number(&mut rest, 2)?),
            b'J' => Value::Int(number(&mut rest, 4)?),
            0x8a => {
                let length = usize::try_from(number(&mut rest, 1)?).ok()?;
                Value::Int(number(&mut rest, length)?)
            }
            b'C' => Value::Bytes(sized(&mut rest, 1)?.to_vec()),
            b'B' => Value::Bytes(sized(&mut rest, 4)?.to_vec()),
            b'X' => Value::Text(String::from_utf8(sized(&mut rest, 4)?.to_vec()).ok()?),
            b'c' => Value::Global(known(line(&mut rest)?)?, known(line(&mut rest)?)?),
            b')' => Value::Tuple(Vec::new()),
            b']' => Value::List(Vec::new()),
            b'}' => Value::Dict(Vec::new()),
            b't' => Value::Tuple(marked(&mut stack)?),
            b'e' => {
                let items = marked(&mut stack)?;
                let Value::List(mut list) = pop(&mut stack)? else { return None };
                list.extend(items);
                Value::List(list)
            }
            b'u' => {
                let items = marked(&mut stack)?;
                let Value::Dict(mut dict) = pop(&mut stack)? else { return None };
                let mut items = items.into_iter();
                while let Some(key) = items.next() {
                    dict.push((key, items.next()?));
                }
                Value::Dict(dict)
            }
            b'R' => {
                let Value::Tuple(arguments) = pop(&mut stack)? else { return None };
                Value::Call(Box::new(pop(&mut stack)?), arguments)
            }
            0x81 => {
                let arguments = pop(&mut stack)?;
                (arguments == Value::Tuple(Vec::new())).then_some(())?;
                Value::Instance(Box::new(pop(&mut stack)?), Vec::new())
            }
            b'b' => {
                let Value::Dict(state) = pop(&mut stack)? else { return None };
                let Value::Instance(class, _) = pop(&mut stack)? else { return None };
                let named = |(key, value)| if let Value::Text(key) = key { Some((known(&key)?, value)) } else { None };
                Value::Instance(class, state.into_iter().map(named).collect::<Option<_>>()?)
            }
            _ => return None,
        };
        stack.push(Item::Value(value));
    }
}

/// The names that the writer writes as constants.
fn known(name: &str) -> Option<&'static str> {
    const NAMES: [&str; 41] = [
        "torch",
        "torch.storage",
        "torch.multiprocessing.reductions",
        "lmdeploy.utils",
        "sglang.srt.weight_sync.tensor_bucket",
        "builtins",
        "Tensor",
        "Size",
        "TypedStorage",
        "rebuild_cuda_tensor",
        "FlattenedTensorMetadata",
        "RuntimeError",
        "name",
        "shape",
        "dtype",
        "start_idx",
        "end_idx",
        "numel",
        "bool",
        "uint8",
        "int8",
        "float8_e5m2",
        "float8_e4m3fn",
        "float8_e8m0fnu",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "int16",
        "uint16",
        "float16",
        "bfloat16",
        "int32",
        "uint32",
        "float32",
        "complex64",
        "float64",
        "int64",
        "uint64",
        "metadata",
        "offset",
        "flattened_tensor",
        "require_clone",
    ];
    NAMES.into_iter().find(|known| *known == name)
}

fn take<'a>(rest: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, later) = rest.split_at_checked(length)?;
    *rest = later;
    Some(taken)
}

/// A little-endian number that is not negative.
fn number(rest: &mut &[u8], length: usize) -> Option<u64> {
    let bytes = take(rest, length)?;
    bytes.iter().rev().try_fold(0_u64, |number, byte| Some(number.checked_mul(256)? + u64::from(*byte)))
}

fn sized<'a>(rest: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let length = usize::try_from(number(rest, length)?).ok()?;
    take(rest, length)
}

fn line<'a>(rest: &mut &'a [u8]) -> Option<&'a str> {
    let end = rest.iter().position(|byte| *byte == b'\n')?;
    let line = take(rest, end)?;
    take(rest, 1)?;
    std::str::from_utf8(line).ok()
}

fn pop(stack: &mut Vec<Item>) -> Option<Value> {
    match stack.pop()? {
        Item::Value(value) => Some(value),
        Item::Mark => None,
    }
}

fn marked(stack: &mut Vec<Item>) -> Option<Vec<Value>> {
    let mut items = Vec::new();
    loop {
        match stack.pop()? {
            Item::Mark => break,
            Item::Value(value) => items.push(value),
        }
    }
    items.reverse();
    Some(items)
}
