//! Frames of the TCP data path, both directions, and a parser that never waits and never copies a bucket's bytes.
//!
//! A frame is u32 kind, u32 length (both little-endian), then so many bytes. Towards the end of the chain: `Head` (24 bytes: a
//! [`BucketHeader`]), `Part`s, `Digest` (16 bytes, little-endian), ..., `End`. Towards the leader: `Admitted`, `Done`. In both directions:
//! `Alive`, `Failure` (JSON: [`StreamFailure`]). The sender may cut a bucket into any parts, so a sign of life or a failure fits anywhere.
//!
//! Payloads in lent memory: towards the end of the chain `Lent` (24 bytes: a [`LentPiece`]) after its head, towards the leader `Taken`
//! (u32: the number of a piece whose slot may be reused).
//!
//! A stream over several connections (lanes): the reply `Lanes` (u32 number of lanes, 16 bytes that name the stream) before all others. A
//! `Cut` follows each block of a bucket ([`weightsync_core::weights::BLOCK_BYTES`]). After it, the frames continue on the next lane, in a
//! ring.

use weightsync_core::protocol::{BucketHeader, LentPiece, StreamFailure};

/// Longest part in bytes; memory is not allocated by it.
const LONGEST_PART: usize = 64 << 20;
/// Longest failure in bytes.
const LONGEST_FAILURE: usize = 64 << 10;

const HEAD: u32 = 1;
const PART: u32 = 2;
const DIGEST: u32 = 3;
const END: u32 = 4;
const ALIVE: u32 = 5;
const FAILURE: u32 = 6;
const ADMITTED: u32 = 7;
const DONE: u32 = 8;
const CUT: u32 = 9;
const LANES: u32 = 10;
const LENT: u32 = 11;
const TAKEN: u32 = 12;

/// Name of one stream on one hop; cannot be guessed.
pub(super) type StreamId = [u8; 16];

/// A frame, or for [`Frame::Part`] the available bytes of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Frame<'a> {
    Head(BucketHeader),
    Part(&'a [u8]),
    Digest(u128),
    End,
    Alive,
    Failure(StreamFailure),
    Admitted,
    Done,
    Cut,
    Lanes(u32, StreamId),
    Lent(LentPiece),
    Taken(u32),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("frame of kind {kind} with {length} bytes makes no sense")]
pub(super) struct BadFrame {
    kind: u32,
    length: usize,
}

impl Frame<'_> {
    pub(super) fn put(&self, wire: &mut Vec<u8>) {
        match self {
            Self::Head(header) => put(wire, HEAD, &header.encode()),
            Self::Part(part) => put(wire, PART, part),
            Self::Digest(digest) => put(wire, DIGEST, &digest.to_le_bytes()),
            Self::End => put(wire, END, &[]),
            Self::Alive => put(wire, ALIVE, &[]),
            Self::Failure(failure) => {
                let json = serde_json::to_vec(failure).ok().filter(|json| json.len() <= LONGEST_FAILURE);
                put(wire, FAILURE, &json.unwrap_or_else(|| br#"{"kind":"cancelled"}"#.to_vec()));
            }
            Self::Admitted => put(wire, ADMITTED, &[]),
            Self::Done => put(wire, DONE, &[]),
            Self::Cut => put(wire, CUT, &[]),
            Self::Lanes(count, id) => put(wire, LANES, &[count.to_le_bytes().as_slice(), id].concat()),
            Self::Lent(piece) => put(wire, LENT, &piece.encode()),
            Self::Taken(number) => put(wire, TAKEN, &number.to_le_bytes()),
        }
    }
}

/// Appends the start of a part of so many bytes; the caller sends the bytes after it.
pub(super) fn put_part_start(wire: &mut Vec<u8>, length: usize) {
    put_start(wire, PART, length);
}

fn put(wire: &mut Vec<u8>, kind: u32, body: &[u8]) {
    put_start(wire, kind, body.len());
    wire.extend_from_slice(body);
}

fn put_start(wire: &mut Vec<u8>, kind: u32, length: usize) {
    wire.extend_from_slice(&kind.to_le_bytes());
    wire.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
}

/// Splits the received bytes into frames, however they were split on the way.
#[derive(Default)]
pub(super) struct Parser {
    /// The received bytes of a frame other than a part.
    small: Vec<u8>,
    /// Missing bytes of the present part.
    part_left: usize,
}

impl Parser {
    /// The next frame of `input`, which is advanced; `None` when it is used up.
    pub(super) fn next<'a>(&mut self, input: &mut &'a [u8]) -> Result<Option<Frame<'a>>, BadFrame> {
        loop {
            if self.part_left > 0 {
                let part = take(input, self.part_left);
                self.part_left -= part.len();
                return Ok((!part.is_empty()).then_some(Frame::Part(part)));
            }
            if !self.fill(input, 8) {
                return Ok(None);
            }
            let (kind, length) = self.start();
            let bad = BadFrame { kind, length };
            let sound = match kind {
                PART => (1..=LONGEST_PART).contains(&length),
                HEAD => length == BucketHeader::LENGTH,
                DIGEST => length == 16,
                FAILURE => length <= LONGEST_FAILURE,
                END | ALIVE | ADMITTED | DONE | CUT => length == 0,
                LANES => length == 20,
                LENT => length == LentPiece::LENGTH,
                TAKEN => length == 4,
                _ => false,
            };
            if !sound {
                return Err(bad);
            }
            if kind == PART {
                self.small.clear();
                self.part_left = length;
                continue;
            }
            if !self.fill(input, 8 + length) {
                return Ok(None);
            }
            let frame = self.decode(kind).ok_or(bad)?;
            self.small.clear();
            return Ok(Some(frame));
        }
    }

    /// Takes missing bytes, and returns whether `small` has `wanted` bytes.
    fn fill(&mut self, input: &mut &[u8], wanted: usize) -> bool {
        let lacking = wanted.saturating_sub(self.small.len());
        self.small.extend_from_slice(take(input, lacking));
        self.small.len() >= wanted
    }

    fn start(&self) -> (u32, usize) {
        let number = |from: usize| {
            let bytes = self.small.get(from..).and_then(|rest| rest.first_chunk::<4>());
            bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes))
        };
        (number(0), usize::try_from(number(4)).unwrap_or(usize::MAX))
    }

    fn decode(&self, kind: u32) -> Option<Frame<'static>> {
        let body = self.small.get(8..)?;
        Some(match kind {
            HEAD => Frame::Head(BucketHeader::decode(body.first_chunk()?)),
            DIGEST => Frame::Digest(u128::from_le_bytes(*body.first_chunk()?)),
            END => Frame::End,
            ALIVE => Frame::Alive,
            FAILURE => Frame::Failure(serde_json::from_slice(body).ok()?),
            ADMITTED => Frame::Admitted,
            DONE => Frame::Done,
            CUT => Frame::Cut,
            LANES => Frame::Lanes(u32::from_le_bytes(*body.first_chunk()?), *body.last_chunk()?),
            LENT => Frame::Lent(LentPiece::decode(body.first_chunk()?)),
            TAKEN => Frame::Taken(u32::from_le_bytes(*body.first_chunk()?)),
            _ => return None,
        })
    }
}

/// The first `wanted` bytes of `input`, or all of them; `input` is advanced.
fn take<'a>(input: &mut &'a [u8], wanted: usize) -> &'a [u8] {
    let (taken, rest) = input.split_at_checked(wanted).unwrap_or((input, &[]));
    *input = rest;
    taken
}
