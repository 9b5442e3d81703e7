use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::closes;
use crate::tcp::TcpOptions;
use crate::tests::fixture::{Fixture, LONG, Member, PATIENT, Refuse, finish};
use weightsync_core::protocol::{DATA_MAGIC, MAX_HELLO_BYTES};

async fn still_serves(fixture: &Fixture, member: Member) {
    let members = [member];
    let (_leader, sink) = fixture.open(&members, PATIENT).await.unwrap();
    finish(sink).await.unwrap();
}

#[tokio::test]
async fn who_does_not_speak_the_protocol_is_closed_at_once() {
    let fixture = Fixture::tcp();
    let member = fixture.member("actors/0", Refuse::Nothing).await;
    let too_long = [DATA_MAGIC.as_slice(), &(MAX_HELLO_BYTES + 1).to_le_bytes()].concat();
    let no_hello = [DATA_MAGIC.as_slice(), &2u32.to_le_bytes(), b"{}"].concat();
    for words in [b"GET / HTTP/1.1\r\n\r\n".as_slice(), b"WSD2\0\0\0\0", &[0x16, 3, 1, 0, 5], &too_long, &no_hello] {
        let mut stream = TcpStream::connect(&member.address).await.unwrap();
        stream.write_all(words).await.unwrap();
        // Much earlier than the five seconds of a slow connection.
        assert!(closes(&mut stream, Duration::from_secs(4)).await, "{words:?}");
    }
    still_serves(&fixture, member).await;
}

#[tokio::test]
async fn who_shows_no_hello_in_time_is_closed() {
    let fixture = Fixture::over(TcpOptions { hello_timeout: Duration::from_millis(300), ..TcpOptions::default() });
    let member = fixture.member("actors/0", Refuse::Nothing).await;
    for words in [b"".as_slice(), b"WSD1", b"WSD1\x10\0\0\0half"] {
        let mut stream = TcpStream::connect(&member.address).await.unwrap();
        stream.write_all(words).await.unwrap();
        assert!(closes(&mut stream, LONG).await, "{words:?}");
    }
    still_serves(&fixture, member).await;
}

#[tokio::test]
async fn too_many_strangers_are_closed_and_members_come_in() {
    let long = Duration::from_secs(3600);
    let fixture = Fixture::over(TcpOptions { max_strangers: 4, first_byte: long, hello_timeout: long, ..TcpOptions::default() });
    let member = fixture.member("actors/0", Refuse::Nothing).await;
    let mut held = Vec::new();
    for _ in 0..100 {
        held.push(TcpStream::connect(&member.address).await.unwrap());
    }
    still_serves(&fixture, member).await;
    assert!(closes(&mut held[0], Duration::from_secs(4)).await, "the oldest makes room");
}

#[tokio::test]
async fn more_streams_than_there_is_room_for_are_refused() {
    let fixture = Fixture::over(TcpOptions { max_streams: 1, ..TcpOptions::default() });
    let members = [fixture.member("actors/0", Refuse::Nothing).await];
    let (_leader, first) = fixture.open(&members, PATIENT).await.unwrap();
    let error = fixture.open(&members, PATIENT).await.err().unwrap().to_string();
    assert!(error.contains("too many streams"), "{error}");
    finish(first).await.unwrap();
}
