//! Requests of a TCPStore client as bytes. Decides what is a request, what is only a part of one, and what can never become one.
//!
//! One byte says which (`QueryType` of torch's `TCPStoreBackend.hpp`; numbers were only ever appended), integers are little-endian, a key or
//! value is a u64 length and bytes, a list a u64 count and items. Knows no socket.

use super::{MAX_KEY, MAX_LIST, MAX_REQUEST, MAX_VALUE};

/// What every client says first.
pub(super) const MAGIC: u32 = 0x3C85_F7CE;
/// `WaitResponseType`.
pub(super) const STOP_WAITING: u8 = 0;
pub(super) const WAIT_CANCELED: u8 = 1;
/// `CheckResponseType`.
pub(super) const READY: u8 = 0;
pub(super) const NOT_READY: u8 = 1;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Request<'a> {
    Validate(u32),
    Set(&'a [u8], &'a [u8]),
    /// Key, expected, desired.
    CompareSet(&'a [u8], &'a [u8], &'a [u8]),
    Get(&'a [u8]),
    Add(&'a [u8], i64),
    Check(Vec<&'a [u8]>),
    Wait(Vec<&'a [u8]>),
    CountKeys,
    Delete(&'a [u8]),
    Append(&'a [u8], &'a [u8]),
    MultiGet(Vec<&'a [u8]>),
    MultiSet(Vec<(&'a [u8], &'a [u8])>),
    CancelWait,
    Ping(u32),
    QueuePush(&'a [u8], &'a [u8]),
    QueuePop(&'a [u8]),
    QueueLength(&'a [u8]),
    ListKeys,
    /// Key and number of those that must come.
    Barrier(&'a [u8], i64),
}

/// What the front of some bytes is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Read<'a> {
    /// A request of so many bytes.
    Whole(Request<'a>, usize),
    /// A part of a request, which has at least so many bytes.
    Partly(usize),
}

/// Bytes that no client of torch sends.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Nonsense {
    #[error("no request has the number {0}")]
    Unknown(u8),
    #[error("a {what} of {length} is longer than {most}")]
    TooLong { what: &'static str, length: u64, most: usize },
}

enum Stop {
    Short(usize),
    Nonsense(Nonsense),
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], Stop> {
        let end = self.at.saturating_add(length);
        if end > MAX_REQUEST {
            return Err(Stop::Nonsense(Nonsense::TooLong { what: "request", length: end as u64, most: MAX_REQUEST }));
        }
        let taken = self.bytes.get(self.at..end).ok_or(Stop::Short(end))?;
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        let taken = self.take(N)?;
        taken.try_into().map_err(|_| Stop::Short(self.at))
    }

    fn u32(&mut self) -> Result<u32, Stop> {
        self.array().map(u32::from_le_bytes)
    }

    fn i64(&mut self) -> Result<i64, Stop> {
        self.array().map(i64::from_le_bytes)
    }

    fn length(&mut self, what: &'static str, most: usize) -> Result<usize, Stop> {
        let length = self.array().map(u64::from_le_bytes)?;
        let fits = usize::try_from(length).ok().filter(|length| *length <= most);
        fits.ok_or(Stop::Nonsense(Nonsense::TooLong { what, length, most }))
    }

    fn key(&mut self) -> Result<&'a [u8], Stop> {
        let length = self.length("key", MAX_KEY)?;
        self.take(length)
    }

    fn value(&mut self) -> Result<&'a [u8], Stop> {
        let length = self.length("value", MAX_VALUE)?;
        self.take(length)
    }

    fn list<T>(&mut self, mut item: impl FnMut(&mut Self) -> Result<T, Stop>) -> Result<Vec<T>, Stop> {
        let count = self.length("list", MAX_LIST)?;
        (0..count).map(|_| item(self)).collect()
    }

    fn request(&mut self) -> Result<Request<'a>, Stop> {
        let [code] = self.array()?;
        Ok(match code {
            0 => Request::Validate(self.u32()?),
            1 => Request::Set(self.key()?, self.value()?),
            2 => Request::CompareSet(self.key()?, self.value()?, self.value()?),
            3 => Request::Get(self.key()?),
            4 => Request::Add(self.key()?, self.i64()?),
            5 => Request::Check(self.list(Self::key)?),
            6 => Request::Wait(self.list(Self::key)?),
            7 => Request::CountKeys,
            8 => Request::Delete(self.key()?),
            9 => Request::Append(self.key()?, self.value()?),
            10 => Request::MultiGet(self.list(Self::key)?),
            11 => Request::MultiSet(self.list(|cursor| Ok((cursor.key()?, cursor.value()?)))?),
            12 => Request::CancelWait,
            13 => Request::Ping(self.u32()?),
            14 => Request::QueuePush(self.key()?, self.value()?),
            15 => Request::QueuePop(self.key()?),
            16 => Request::QueueLength(self.key()?),
            17 => Request::ListKeys,
            18 => Request::Barrier(self.key()?, self.i64()?),
            unknown => return Err(Stop::Nonsense(Nonsense::Unknown(unknown))),
        })
    }
}

pub(super) fn read(bytes: &[u8]) -> Result<Read<'_>, Nonsense> {
    let mut cursor = Cursor { bytes, at: 0 };
    match cursor.request() {
        Ok(request) => Ok(Read::Whole(request, cursor.at)),
        Err(Stop::Short(needed)) => Ok(Read::Partly(needed)),
        Err(Stop::Nonsense(nonsense)) => Err(nonsense),
    }
}

impl Request<'_> {
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let keys = |code: u8, keys: &[&[u8]], out: &mut Vec<u8>| {
            out.push(code);
            out.extend((keys.len() as u64).to_le_bytes());
            for key in keys {
                write_bytes(key, out);
            }
        };
        let blobs = |code: u8, blobs: &[&[u8]], out: &mut Vec<u8>| {
            out.push(code);
            for blob in blobs {
                write_bytes(blob, out);
            }
        };
        match self {
            Self::Validate(magic) => out.extend([0].into_iter().chain(magic.to_le_bytes())),
            Self::Set(key, value) => blobs(1, &[key, value], out),
            Self::CompareSet(key, expected, desired) => blobs(2, &[key, expected, desired], out),
            Self::Get(key) => blobs(3, &[key], out),
            Self::Add(key, delta) => {
                blobs(4, &[key], out);
                out.extend(delta.to_le_bytes());
            }
            Self::Check(list) => keys(5, list, out),
            Self::Wait(list) => keys(6, list, out),
            Self::CountKeys => out.push(7),
            Self::Delete(key) => blobs(8, &[key], out),
            Self::Append(key, value) => blobs(9, &[key, value], out),
            Self::MultiGet(list) => keys(10, list, out),
            Self::MultiSet(items) => {
                out.push(11);
                out.extend((items.len() as u64).to_le_bytes());
                for (key, value) in items {
                    write_bytes(key, out);
                    write_bytes(value, out);
                }
            }
            Self::CancelWait => out.push(12),
            Self::Ping(nonce) => out.extend([13].into_iter().chain(nonce.to_le_bytes())),
            Self::QueuePush(key, value) => blobs(14, &[key, value], out),
            Self::QueuePop(key) => blobs(15, &[key], out),
            Self::QueueLength(key) => blobs(16, &[key], out),
            Self::ListKeys => out.push(17),
            Self::Barrier(key, world) => {
                blobs(18, &[key], out);
                out.extend(world.to_le_bytes());
            }
        }
    }
}

pub(super) fn write_bytes(bytes: &[u8], out: &mut Vec<u8>) {
    out.extend((bytes.len() as u64).to_le_bytes());
    out.extend_from_slice(bytes);
}
