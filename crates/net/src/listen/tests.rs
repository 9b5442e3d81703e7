use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use rustix::io::Errno;
use tokio::net::{TcpSocket, TcpStream};

use super::{everywhere, listen, listen_by};

/// Both loopback addresses.
fn loopbacks() -> [SocketAddr; 2] {
    [(Ipv4Addr::LOCALHOST, 0).into(), (Ipv6Addr::LOCALHOST, 0).into()]
}

async fn connects(mut to: SocketAddr, port: u16) -> bool {
    to.set_port(port);
    TcpStream::connect(to).await.is_ok()
}

#[tokio::test]
async fn unspecified_address_answers_both_families() {
    let listener = listen(everywhere(0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    for address in loopbacks() {
        assert!(connects(address, port).await, "{address}");
    }
}

#[tokio::test]
async fn kernel_without_ipv6_listens_on_ipv4() {
    for cause in [Errno::AFNOSUPPORT, Errno::ADDRNOTAVAIL] {
        let listener = listen_by(everywhere(0), || Err(cause.into())).unwrap();
        let address = listener.local_addr().unwrap();
        assert!(address.is_ipv4(), "{address}");
        assert!(connects(loopbacks()[0], address.port()).await);
    }
    let other = listen_by(everywhere(0), || Err(Errno::MFILE.into())).unwrap_err();
    assert_eq!(Errno::from_io_error(&other), Some(Errno::MFILE), "another cause is reported");
    let own = listen_by((Ipv6Addr::LOCALHOST, 0).into(), || Err(Errno::AFNOSUPPORT.into()));
    assert!(own.is_err(), "an address that was asked for is not replaced");
}

#[tokio::test]
async fn one_address_answers_its_own_family_alone() {
    for (address, other) in loopbacks().into_iter().zip(loopbacks().into_iter().rev()) {
        let listener = listen(address).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(connects(address, port).await && !connects(other, port).await, "{address}");
    }
}

#[tokio::test]
async fn held_port_is_an_error_in_either_family() {
    for holder in loopbacks() {
        let socket = if holder.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }.unwrap();
        socket.bind(holder).unwrap();
        let held = socket.listen(1).unwrap();
        let port = held.local_addr().unwrap().port();
        let error = listen(everywhere(port)).unwrap_err();
        assert_eq!(Errno::from_io_error(&error), Some(Errno::ADDRINUSE), "{holder}");
    }
}
