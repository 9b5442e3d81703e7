//! Writes pickles: the few forms that torch and inference engines read out of a message.
//!
//! Decides opcodes only (protocol 3, which every Python 3 reads). There is no reader here and there never will be one: reading a pickle
//! runs whatever its sender wrote into it.

/// A Python value to be written.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum Value {
    None,
    Bool(bool),
    /// An `int` that is not negative.
    Int(u64),
    Bytes(Vec<u8>),
    Text(String),
    Tuple(Vec<Value>),
    List(Vec<Value>),
    /// `dict`, in this order.
    Dict(Vec<(Value, Value)>),
    /// A name of a module: a class, a function, or a constant like `torch.bfloat16`. Both must be ASCII identifiers with dots.
    Global(&'static str, &'static str),
    /// A call of a global with a tuple of arguments; its result is the value.
    Call(Box<Value>, Vec<Value>),
    /// An instance made by `cls.__new__(cls)` whose `__dict__` is then filled.
    Instance(Box<Value>, Vec<(&'static str, Value)>),
}

impl Value {
    /// A text.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    /// `{"key": value, ...}`.
    pub(crate) fn dict<const N: usize>(items: [(&'static str, Value); N]) -> Self {
        Self::Dict(items.into_iter().map(|(key, value)| (Self::text(key), value)).collect())
    }

    /// The whole pickle.
    pub fn pickle(&self) -> Vec<u8> {
        let mut out = vec![PROTO, 3];
        self.write(&mut out);
        out.push(STOP);
        out
    }

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::None => out.push(b'N'),
            Self::Bool(true) => out.push(NEWTRUE),
            Self::Bool(false) => out.push(NEWFALSE),
            Self::Int(number) => write_int(*number, out),
            Self::Bytes(bytes) => write_sized(b'C', b'B', bytes, out),
            Self::Text(text) => write_sized(b'X', b'X', text.as_bytes(), out),
            Self::Tuple(items) => write_tuple(items, out),
            Self::List(items) => {
                out.push(b']');
                if !items.is_empty() {
                    out.push(b'(');
                    for item in items {
                        item.write(out);
                    }
                    out.push(b'e');
                }
            }
            Self::Dict(items) => {
                out.push(b'}');
                write_items(items.iter().map(|(key, value)| (key.clone(), value)), out);
            }
            Self::Global(module, name) => {
                out.push(b'c');
                out.extend_from_slice(format!("{module}\n{name}\n").as_bytes());
            }
            Self::Call(function, arguments) => {
                function.write(out);
                write_tuple(arguments, out);
                out.push(b'R');
            }
            Self::Instance(class, state) => {
                class.write(out);
                // cls.__new__(cls), then the state into its __dict__.
                out.extend_from_slice(&[b')', NEWOBJ, b'}']);
                write_items(state.iter().map(|(key, value)| (Self::text(*key), value)), out);
                out.push(b'b');
            }
        }
    }
}

const PROTO: u8 = 0x80;
const NEWOBJ: u8 = 0x81;
const NEWTRUE: u8 = 0x88;
const NEWFALSE: u8 = 0x89;
const LONG1: u8 = 0x8a;
const STOP: u8 = b'.';

/// `K`, `M`, `J` for what fits them, else a long of as few bytes as hold it and its sign.
fn write_int(number: u64, out: &mut Vec<u8>) {
    let bytes = number.to_le_bytes();
    match number {
        0..=0xff => out.extend(b"K".iter().chain(bytes.iter().take(1))),
        0x100..=0xffff => out.extend(b"M".iter().chain(bytes.iter().take(2))),
        0x1_0000..=0x7fff_ffff => out.extend(b"J".iter().chain(bytes.iter().take(4))),
        _ => {
            let used = u8::try_from((u64::BITS - number.leading_zeros()) / 8).unwrap_or(8) + 1;
            out.extend([LONG1, used]);
            out.extend(bytes.iter().chain([&0]).take(usize::from(used)));
        }
    }
}

/// A length (one byte where the short opcode allows it, else four) and the bytes. Longer than 4 GiB cannot happen: no message is.
fn write_sized(short: u8, long: u8, bytes: &[u8], out: &mut Vec<u8>) {
    match u8::try_from(bytes.len()) {
        Ok(length) if short != long => out.extend([short, length]),
        _ => {
            out.push(long);
            out.extend(u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes());
        }
    }
    out.extend_from_slice(bytes);
}

fn write_tuple(items: &[Value], out: &mut Vec<u8>) {
    if items.is_empty() {
        out.push(b')');
        return;
    }
    out.push(b'(');
    for item in items {
        item.write(out);
    }
    out.push(b't');
}

fn write_items<'a>(items: impl Iterator<Item = (Value, &'a Value)>, out: &mut Vec<u8>) {
    let mut items = items.peekable();
    if items.peek().is_none() {
        return;
    }
    out.push(b'(');
    for (key, value) in items {
        key.write(out);
        value.write(out);
    }
    out.push(b'u');
}
