//! Frames of the TCP data path: a JSON hello, then per bucket a fixed header, the bytes, and their digest behind them.
//!
//! The hello carries the rest of the chain (source routing), so a member forwards without knowing the leader's choice, and an
//! attempt that leaves a member out needs no other message. Integers on the wire are little-endian.

use serde::{Deserialize, Serialize};

use super::{MemberName, UpdateId};

/// First bytes of a data connection, before the u32 length of the hello.
pub const DATA_MAGIC: [u8; 4] = *b"WSD1";

/// Longest hello that is read, in bytes.
pub const MAX_HELLO_BYTES: u32 = 1 << 20;

/// Opens a data connection.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DataHello {
    /// The attempt whose buckets follow; for a probe, version 0 and attempt 0 of the epoch.
    pub update: UpdateId,
    /// Who the sender thinks it talks to; another member refuses.
    pub to: MemberName,
    /// The epoch's secret (base64). Secret.
    pub secret: String,
    /// Members after this one, in order: `(name, data address)`.
    pub rest: Vec<(MemberName, String)>,
    /// True for the one-element operation of the commit phase.
    pub probe: bool,
}

/// Head of one bucket on the wire: 24 bytes, then `bytes` bytes, then 16 bytes of xxh3-128 (little-endian).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BucketHeader {
    /// Position in the order of sending; `u32::MAX` ends the stream.
    pub sequence: u32,
    /// Flags; 0 today, anything else is refused.
    pub flags: u32,
    /// First byte in the stream of the layout.
    pub offset: u64,
    /// Length of the bytes that follow.
    pub bytes: u64,
}

impl BucketHeader {
    /// Length on the wire in bytes.
    pub const LENGTH: usize = 24;
    /// Sequence that ends the stream.
    pub const END: u32 = u32::MAX;

    /// The header as it travels.
    pub fn encode(&self) -> [u8; Self::LENGTH] {
        let mut wire = [0; Self::LENGTH];
        let fields = self.sequence.to_le_bytes().into_iter();
        let fields = fields.chain(self.flags.to_le_bytes()).chain(self.offset.to_le_bytes()).chain(self.bytes.to_le_bytes());
        for (to, from) in wire.iter_mut().zip(fields) {
            *to = from;
        }
        wire
    }

    /// Reads a header; says nothing about whether its numbers make sense.
    pub fn decode(wire: &[u8; Self::LENGTH]) -> Self {
        Self {
            sequence: u32::from_le_bytes(field(wire, 0)),
            flags: u32::from_le_bytes(field(wire, 4)),
            offset: u64::from_le_bytes(field(wire, 8)),
            bytes: u64::from_le_bytes(field(wire, 16)),
        }
    }
}

/// The `N` bytes of a header from `start` on.
fn field<const N: usize>(wire: &[u8; BucketHeader::LENGTH], start: usize) -> [u8; N] {
    let mut field = [0; N];
    for (to, from) in field.iter_mut().zip(wire.iter().skip(start)) {
        *to = *from;
    }
    field
}
