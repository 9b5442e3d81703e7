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
        let [a, b, c, d, e, f, g, h, o0, o1, o2, o3, o4, o5, o6, o7, l0, l1, l2, l3, l4, l5, l6, l7] = *wire;
        Self {
            sequence: u32::from_le_bytes([a, b, c, d]),
            flags: u32::from_le_bytes([e, f, g, h]),
            offset: u64::from_le_bytes([o0, o1, o2, o3, o4, o5, o6, o7]),
            bytes: u64::from_le_bytes([l0, l1, l2, l3, l4, l5, l6, l7]),
        }
    }
}
