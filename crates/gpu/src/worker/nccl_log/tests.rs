use super::*;

/// On a host with a NIC, as the source of NCCL 2.31 has it.
const IB: &str = "gpu-a:412:430 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.7<0>\n\
                  gpu-a:412:430 [0] NCCL INFO Using network IB\n\
                  gpu-a:412:431 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA\n\
                  gpu-a:412:431 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0(1)/GDRDMA(PCI)/Shared";
/// Without a NIC, then over sockets (P2P and shared memory switched off), then on one host: written by NCCL 2.28.9 on two H100.
const NO_DEVICE: &str = "vm:761:761 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so\n\
                         vm:761:761 [0] NCCL INFO NET/IB : No device found.\n\
                         vm:761:761 [0] NCCL INFO NET/IB : Using [RO]; OOB eth0:192.0.2.2<0>\n\
                         vm:761:761 [0] NCCL INFO Failed to initialize NET plugin IB\n\
                         vm:761:761 [0] NCCL INFO NET/Socket : Using [0]eth0:192.0.2.2<0>\n\
                         vm:761:761 [0] NCCL INFO Initialized NET plugin Socket\n\
                         vm:761:761 [0] NCCL INFO Using network Socket\n\
                         vm:761:761 [0] NCCL INFO NET/Socket : GPU Direct RDMA Disabled for HCA 0 'eth0'";
const SOCKETS: &str = "vm:761:761 [0] NCCL INFO Channel 00/02 : 0 1\n\
                       vm:761:761 [0] NCCL INFO Channel 00/0 : 1[1] -> 0[0] [receive] via NET/Socket/0\n\
                       vm:761:761 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0";
const ONE_HOST: &str = "vm:660:660 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n\
                        vm:861:861 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct";

fn read(lines: &[&str]) -> NcclLog {
    let mut log = NcclLog::default();
    for line in lines.iter().flat_map(|lines| lines.lines()) {
        log.read(line);
    }
    log
}

#[test]
fn only_connections_over_sockets_are_reported() {
    let disabled = "gpu-a:412:430 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.";
    let enabled = "gpu-a:412:430 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 0.";
    let chosen = "gpu-a:412:430 [0] NCCL INFO NCCL_NET set by environment to Socket";
    let library = "gpu-a:412:430 [0] NCCL INFO Failed to open libibverbs.so[.1]";
    let closed = "gpu-a:412:430 [0] transport/net_ib.cc:612 NCCL WARN NET/IB : Unable to open device mlx5_0";
    let hca = "gpu-a:412:430 [0] NCCL INFO NCCL_IB_HCA set to mlx5_9";
    let no_device = "NET/IB : No device found";
    for (lines, expected) in [
        (&[][..], None),
        (&[IB], None),
        // The network is only what would be used between hosts.
        (&[NO_DEVICE], None),
        (&[NO_DEVICE, ONE_HOST], None),
        (&[NO_DEVICE, SOCKETS], Some(no_device.to_owned())),
        (&[hca, NO_DEVICE, SOCKETS], Some(format!("{no_device} (NCCL_IB_HCA set to mlx5_9)"))),
        (&[closed, NO_DEVICE, SOCKETS], Some("NET/IB : Unable to open device mlx5_0".to_owned())),
        (&[disabled, SOCKETS], Some("NCCL_IB_DISABLE set by environment to 1".to_owned())),
        (&[enabled, NO_DEVICE, SOCKETS], Some(no_device.to_owned())),
        (&[chosen, SOCKETS], Some("NCCL_NET set by environment to Socket".to_owned())),
        (&[library, SOCKETS], Some("Failed to open libibverbs.so[.1]".to_owned())),
        (&[SOCKETS], Some(UNKNOWN.to_owned())),
        (&["NET/Socket : Using [0]eth0", "Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0"], None),
    ] {
        assert_eq!(read(lines).over_sockets(), expected, "{lines:?}");
    }
}

#[test]
fn another_group_begins_without_sockets_and_keeps_the_cause() {
    let mut log = read(&[NO_DEVICE, SOCKETS]);
    log.begins();
    assert_eq!(log.over_sockets(), None);
    for line in SOCKETS.lines() {
        log.read(line);
    }
    assert_eq!(log.over_sockets(), Some("NET/IB : No device found".into()));
}

#[test]
fn lines_are_sorted_by_kind() {
    let mut log = NcclLog::default();
    assert_eq!(log.read(&joined(17)), Line::Joined(17));
    assert_eq!(log.read("weightsync worker: joined group x"), Line::Other);
    assert_eq!(log.read("gpu-a:1:2 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.7<0>"), Line::Info);
    assert_eq!(log.read("gpu-a:1:2 [0] misc/socket.cc:1 NCCL WARN socketProgress: Connection closed"), Line::Other);
    assert_eq!(log.read(""), Line::Other);
}

#[test]
fn long_cause_is_cut() {
    let line = format!("gpu-a:1:2 [0] NCCL WARN NET/IB : Unable to open device {}", "x".repeat(5000));
    assert_eq!(read(&[&line, SOCKETS]).over_sockets().unwrap().len(), LONGEST_CAUSE);
}

#[test]
fn settings_of_the_user_stay_where_they_show_enough() {
    for (level, subsystems, [debug, of], quiet) in [
        (None, None, ["INFO", "INIT,NET,ENV"], true),
        (Some("WARN"), None, ["INFO", "INIT,NET,ENV"], true),
        (Some("VERSION"), Some(""), ["INFO", "INIT,NET,ENV"], true),
        (Some("info"), Some("COLL"), ["info", "COLL,INIT,NET,ENV"], false),
        (Some("TRACE"), Some("ALL"), ["TRACE", "ALL"], false),
        (Some("INFO"), Some("^NET"), ["INFO", "^NET"], false),
    ] {
        let environment = [("NCCL_DEBUG", debug.to_owned()), ("NCCL_DEBUG_SUBSYS", of.to_owned())];
        assert_eq!(settings(level, subsystems), Settings { environment, quiet }, "{level:?} {subsystems:?}");
    }
}
