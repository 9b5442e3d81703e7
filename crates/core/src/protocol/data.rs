//! Messages of the data path: a hello, buckets with their heads, and why a stream ended early.
//!
//! The hello carries the rest of the chain (source routing). So a member forwards without knowledge of the leader's choice, and an attempt
//! without some member needs no other message. Integers on the wire are little-endian.

use serde::{Deserialize, Serialize};

use super::{MemberName, OfferedSlots, Refusal, UpdateId};

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
    /// The sender: the leader, or the member before the receiver in the chain. Named when the stream breaks on its side.
    pub from: MemberName,
    /// The intended receiver; another member refuses.
    pub to: MemberName,
    /// The epoch's secret (base64). Secret.
    pub secret: String,
    /// Members after this one, in order: `(name, data address)`.
    pub rest: Vec<(MemberName, String)>,
    /// Whether every connection of the chain uses TLS; a connection that differs from its hello is refused.
    pub tls: bool,
    /// Longest wait without a sign of life from the other side, in ms. Bytes and alive frames are signs of life.
    pub silence_ms: u64,
    /// True for the one-element operation of the commit phase.
    pub probe: bool,
    /// True for a stream that measures the edge: its store keeps nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub preflight: bool,
    /// How payloads travel between GPUs; `None` if they travel in the connections.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub carried: Option<CarriedBy>,
}

/// How the payloads of a stream travel outside of its connections.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CarriedBy {
    /// Rank of the leader in the epoch's communicator.
    pub root: u32,
    /// Members of the chain that take part because the communicator needs every rank, and keep nothing: they refused this attempt, or
    /// hold the version.
    pub passing: Vec<MemberName>,
    /// Whether the payloads lie in memory that the leader lent to the receiver ([`super::LendRequest`]), which has no rank.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lent: bool,
    /// What the receiver needs to read the payloads from the sender's memory, if every member reads from the previous one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<OfferedSlots>,
}

/// Why a stream ended early, as members report it along the chain in both directions; `peer` is the member at fault.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
#[allow(missing_docs)]
pub enum StreamFailure {
    Unreachable {
        peer: MemberName,
        cause: String,
    },
    /// It refused: at the hello, or because its store could not take a part.
    Refused {
        peer: MemberName,
        refusal: Refusal,
    },
    /// Its connection closed before the stream ended.
    Lost {
        peer: MemberName,
        cause: String,
    },
    /// It sent no sign of life.
    Silent {
        peer: MemberName,
        silence_ms: u64,
    },
    /// The digest of what it received differs from the leader's.
    Corrupt {
        peer: MemberName,
        sequence: u32,
    },
    /// The communicator between the GPUs failed, and no member is known to be at fault.
    Communicator {
        cause: String,
    },
    /// The leader cancelled the stream.
    Cancelled,
}

/// Head of one bucket: 24 bytes, integers little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BucketHeader {
    /// Position in the order of sending, from 0; never `u32::MAX`.
    pub sequence: u32,
    /// Flags: 0, or [`CARRIED`](Self::CARRIED); anything else is refused.
    pub flags: u32,
    /// First byte in the stream of the layout.
    pub offset: u64,
    /// Length of the bytes that follow.
    pub bytes: u64,
}

impl BucketHeader {
    /// Length on the wire in bytes.
    pub const LENGTH: usize = 24;

    /// Flag: the bytes do not follow here. They travel between the GPUs of the epoch's communicator, or are in lent memory. Digests
    /// (gsum64) follow in the order of the heads; several heads may come before the first digest.
    pub const CARRIED: u32 = 1;

    /// The header in wire format.
    pub fn encode(&self) -> [u8; Self::LENGTH] {
        let mut wire = [0; Self::LENGTH];
        let fields = self.sequence.to_le_bytes().into_iter();
        let fields = fields.chain(self.flags.to_le_bytes()).chain(self.offset.to_le_bytes()).chain(self.bytes.to_le_bytes());
        for (to, from) in wire.iter_mut().zip(fields) {
            *to = from;
        }
        wire
    }

    /// Reads a header, without a check of its numbers.
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
