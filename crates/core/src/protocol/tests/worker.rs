//! Frames between agent and worker: written frames can be read again, and invalid ones are refused.

use proptest::prelude::*;

use crate::protocol::worker::*;

fn call(id: u64, request: WorkerRequest) -> WorkerCall {
    WorkerCall { id, within_ms: 1500, request }
}

fn places() -> impl Strategy<Value = Place> {
    prop_oneof![
        (any::<u64>(), any::<u32>(), any::<u64>()).prop_map(|(ring, slot, offset)| Place::Slot { ring, slot, offset }),
        (any::<u64>(), any::<u64>()).prop_map(|(host, offset)| Place::Host { host, offset }),
        (any::<u64>(), any::<u64>()).prop_map(|(memory, offset)| Place::Memory { memory, offset }),
    ]
}

fn parts() -> impl Strategy<Value = Vec<Part>> {
    let part = (any::<u64>(), any::<u64>(), any::<u64>()).prop_map(|(offset, bytes, first_word)| Part { offset, bytes, first_word });
    prop::collection::vec(part, 0..5)
}

fn requests() -> impl Strategy<Value = WorkerRequest> {
    let number = any::<u64>();
    prop_oneof![
        Just(WorkerRequest::UniqueId),
        Just(WorkerRequest::NewEvent),
        Just(WorkerRequest::Stats),
        prop::option::of("GPU-[0-9a-f]{8}").prop_map(|gpu| WorkerRequest::Open { gpu, nccl: None }),
        prop::option::of("/[a-z/ ]{1,20}").prop_map(|nccl| WorkerRequest::Devices { nccl: nccl.map(Into::into) }),
        (any::<u32>(), number).prop_map(|(slots, slot_bytes)| WorkerRequest::Ring { slots, slot_bytes }),
        number.prop_map(|bytes| WorkerRequest::MapHost { bytes }),
        (any::<u8>(), number).prop_map(|(byte, bytes)| WorkerRequest::Import { handle: Opaque([byte; 64]), bytes }),
        any::<u8>().prop_map(|byte| WorkerRequest::ImportEvent { handle: Opaque([byte; 64]) }),
        number.prop_map(|number| WorkerRequest::Release { what: WorkerResource::Memory(number) }),
        (number, any::<u8>(), any::<u32>(), any::<u32>()).prop_map(|(group, byte, rank, world)| WorkerRequest::Join {
            group,
            id: Opaque([byte; 128]),
            rank,
            world,
            proof: if rank % 2 == 0 { Proof::AllReduce } else { Proof::Nothing },
        }),
        (number, any::<u32>(), places(), number, parts(), prop::option::of(number))
            .prop_map(|(group, root, at, bytes, parts, after)| WorkerRequest::Broadcast { group, root, at, bytes, parts, after }),
        (places(), parts(), prop::option::of(number)).prop_map(|(at, parts, after)| WorkerRequest::Digest { at, parts, after }),
        (places(), places(), number, prop::option::of(number), prop::option::of(number))
            .prop_map(|(from, to, bytes, after, then)| WorkerRequest::Copy { from, to, bytes, after, then }),
        number.prop_map(|group| WorkerRequest::Abort { group }),
        ("[a-z0-9-]{1,9}", prop::collection::vec("[a-z_]{1,5}", 0..3)).prop_map(|(name, tls)| WorkerRequest::OpenFabric {
            library: None,
            name,
            ucx: UcxSettings { tls, devices: Vec::new() },
        }),
        number.prop_map(|ring| WorkerRequest::Register { what: FabricMemory::Ring(ring) }),
        (number, prop::collection::vec(any::<u8>(), 1..400))
            .prop_map(|(region, bytes)| WorkerRequest::AddPeer { region, metadata: FabricMetadata::new(bytes).unwrap() }),
        (number, number, prop::option::of(any::<u32>()), places(), number).prop_map(|(peer, address, device, to, bytes)| {
            WorkerRequest::Read { peer, from: RemotePlace { address, device }, to, bytes }
        }),
        (number, number, prop::collection::vec(any::<u32>(), 0..4), any::<bool>())
            .prop_map(|(group, into, without, revoke)| WorkerRequest::Shrink { group, into, without, revoke }),
    ]
}

proptest! {
    #[test]
    fn requests_are_read_as_they_were_written_however_they_are_cut(requests in prop::collection::vec(requests(), 1..5), cut in any::<prop::sample::Index>()) {
        let calls: Vec<_> = (1..).zip(requests).map(|(id, request)| call(id, request)).collect();
        let wire: Vec<u8> = calls.iter().flat_map(|call| encode_worker_frame(call).unwrap()).collect();
        let (first, second) = wire.split_at(cut.index(wire.len()));
        let (mut received, mut read) = (Vec::new(), Vec::new());
        for piece in [first, second] {
            received.extend_from_slice(piece);
            while let Some(call) = decode_worker_frame::<WorkerCall>(&mut received).unwrap() {
                read.push(call);
            }
        }
        prop_assert_eq!(read, calls);
        prop_assert!(received.is_empty());
    }

    #[test]
    fn bytes_that_are_no_frame_are_refused_and_never_a_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let _ = decode_worker_frame::<WorkerReply>(&mut bytes);
    }
}

#[test]
fn answers_and_faults_are_read_as_they_were_written() {
    let fault = WorkerFault { code: WorkerFaultCode::Late, message: "a broadcast was not done after 0.5 s".into() };
    let gpu = GpuFacts {
        uuid: "GPU-1".into(),
        name: "NVIDIA H200".into(),
        bus: "0000:1a:00.0".into(),
        memory_bytes: u64::MAX,
        free_bytes: 1,
        driver: 13000,
        refused: None,
    };
    let results = [
        Ok(WorkerAnswer::Done),
        Ok(WorkerAnswer::Opened { pid: 7, gpu, nccl: Err("no NCCL".into()) }),
        Ok(WorkerAnswer::Sums { sums: vec![u64::MAX, 0], ms: 0.25 }),
        Ok(WorkerAnswer::Event { event: 3, handle: Some(Opaque([9; 64])) }),
        Err(fault),
    ];
    for (id, result) in (1..).zip(results) {
        let reply = WorkerReply { id, result };
        let mut wire = encode_worker_frame(&reply).unwrap();
        assert_eq!(decode_worker_frame::<WorkerReply>(&mut wire).unwrap(), Some(reply));
    }
}

#[test]
fn absurd_length_is_refused_before_allocation() {
    let mut wire = u32::MAX.to_le_bytes().to_vec();
    assert_eq!(decode_worker_frame::<WorkerCall>(&mut wire), Err(WorkerFrameError::TooLong { bytes: u32::MAX.into() }));
}

#[test]
fn secrets_are_not_shown_and_other_lengths_are_not_taken() {
    let id: NcclId = Opaque([0x41; 128]);
    assert_eq!(format!("{id:?}"), "128 opaque bytes");
    assert_eq!(NcclId::from_base64(&id.to_base64()), Some(id));
    assert_eq!(IpcHandle::from_base64(&id.to_base64()), None);
    assert_eq!(NcclId::from_base64("no base64"), None);
}

#[test]
fn metadata_beyond_its_bound_is_refused() {
    let longest = FabricMetadata::new(vec![7; MAX_FABRIC_METADATA]).unwrap();
    let text = serde_json::to_string(&longest).unwrap();
    assert_eq!(serde_json::from_str::<FabricMetadata>(&text).unwrap(), longest);
    assert_eq!(format!("{longest:?}"), "65536 bytes of metadata");
    assert_eq!(FabricMetadata::new(vec![7; MAX_FABRIC_METADATA + 1]), None);
    assert_eq!(FabricMetadata::new(Vec::new()), None);
    let longer = format!("\"{}AAAA\"", text.trim_matches('"').trim_end_matches('='));
    assert!(serde_json::from_str::<FabricMetadata>(&longer).is_err());
}

#[test]
fn transports_that_are_not_listed_by_name_are_refused() {
    let settings = |tls: &[&str], devices: &[&str]| UcxSettings {
        tls: tls.iter().map(ToString::to_string).collect(),
        devices: devices.iter().map(ToString::to_string).collect(),
    };
    let good = settings(&["rc", "cuda_copy"], &["mlx5_0:1", "eth0.5"]).environment().unwrap();
    let expected = [
        ("UCX_TLS", "rc,cuda_copy"),
        ("UCX_NET_DEVICES", "mlx5_0:1,eth0.5"),
        ("UCX_PROTO_EMULATION_ENABLE", "n"),
        ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on"),
        ("UCX_MEM_EVENTS", "n"),
    ];
    assert_eq!(good, expected.map(|(name, value)| (name, value.to_owned())));
    assert_eq!(settings(&["rc", "tcp"], &[]).environment().unwrap()[2].1, "y");
    assert_eq!(settings(&["tcp"], &[]).environment().unwrap()[1].1, "all");
    assert_eq!(settings(&[], &[]).environment(), Err(UcxSettingsError::NoTransport));
    for name in ["all", "^tcp", "rc,tcp", ""] {
        assert_eq!(settings(&["rc", name], &[]).environment(), Err(UcxSettingsError::Transport { name: name.into() }));
    }
    assert_eq!(settings(&["rc"], &["a,b"]).environment(), Err(UcxSettingsError::Device { name: "a,b".into() }));
}
