use std::sync::Arc;

use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::tcp::{DataTls, TcpOptions};
use crate::tests::fixture::{Door, Fixture, LONG, Member, PATIENT, Refuse, buckets, finish, hello, send};
use crate::{BucketSink, TransportError};
use weightsync_core::protocol::DataHello;

/// Mutual TLS for members of one CA, all with `name` in their certificates.
fn tls(name: &str) -> DataTls {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut ca = rcgen::CertificateParams::new(vec![]).unwrap();
    ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca_certificate = ca.self_signed(&key).unwrap();
    let issuer = rcgen::Issuer::new(ca, key);
    let leaf_key = rcgen::KeyPair::generate().unwrap();
    let leaf = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&leaf_key, &issuer).unwrap();
    let chain: Vec<CertificateDer<'static>> = vec![leaf.der().clone()];
    let private = || PrivateKeyDer::from(PrivatePkcs8KeyDer::from(leaf_key.serialize_der()));
    let mut roots = RootCertStore::empty();
    roots.add(ca_certificate.der().clone()).unwrap();
    let roots = Arc::new(roots);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build().unwrap();
    let server = ServerConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions().unwrap();
    let client = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    DataTls {
        server: Arc::new(server.with_client_cert_verifier(verifier).with_single_cert(chain.clone(), private()).unwrap()),
        client: Arc::new(client.with_root_certificates(roots).with_client_auth_cert(chain, private()).unwrap()),
        server_name: Arc::new(|member| ServerName::try_from(format!("{}.agent.test", member.0.replace('/', "-"))).ok()),
    }
}

fn fixture(tls: Option<DataTls>) -> Fixture {
    Fixture::over(TcpOptions { tls, receive_buffer: 4096, lanes: 2, ..TcpOptions::default() })
}

async fn open(fixture: &Fixture, members: &[Member], tls: bool) -> Result<Box<dyn BucketSink>, TransportError> {
    let leader = fixture.transport(Door::new("trainer/0", Refuse::Admission)).await.0;
    let hello = DataHello { tls, ..hello(members, PATIENT) };
    tokio::time::timeout(LONG, leader.open(hello, &members[0].address)).await.unwrap()
}

#[tokio::test]
async fn a_chain_inside_tls_delivers() {
    let fixture = fixture(Some(tls("*.agent.test")));
    let members = fixture.members(&[Refuse::Nothing; 3]).await;
    for is_tls in [true, false] {
        let mut sink = open(&fixture, &members, is_tls).await.unwrap();
        let (stream, buckets) = buckets(&[100_000, 3_300_000]);
        for bucket in &buckets {
            send(&mut sink, bucket).await.unwrap();
        }
        finish(sink).await.unwrap();
        assert!(members.iter().all(|member| member.record().seen.borrow().bytes == stream));
        assert!(members.iter().all(|member| member.door.hellos.lock().last().unwrap().tls == is_tls));
    }
}

#[tokio::test]
async fn a_member_with_another_name_or_ca_is_not_fed() {
    let good = tls("actors-0.agent.test");
    let fixture_with = |tls: &DataTls| fixture(Some(tls.clone()));
    let members = fixture_with(&good).members(&[Refuse::Nothing]).await;
    let other_ca = tls("actors-0.agent.test");
    assert!(matches!(
        open(&fixture_with(&other_ca), &members, true).await,
        Err(TransportError::Unreachable { .. } | TransportError::Lost { .. })
    ));
    let other_name = DataTls { server_name: Arc::new(|_| ServerName::try_from("actors-1.agent.test").ok()), ..good.clone() };
    assert!(matches!(open(&fixture_with(&other_name), &members, true).await, Err(TransportError::Unreachable { .. })));
    let no_name = DataTls { server_name: Arc::new(|_| None), ..good.clone() };
    let error = open(&fixture_with(&no_name), &members, true).await.err().unwrap().to_string();
    assert!(error.contains("TLS name is not known"), "{error}");
    assert!(members[0].door.hellos.lock().is_empty(), "a stranger's hello was read");
}

#[tokio::test]
async fn a_stream_is_never_less_secure_than_its_hello_says() {
    let plain_members = fixture(None).members(&[Refuse::Nothing]).await;
    let error = open(&fixture(None), &plain_members, true).await.err().unwrap().to_string();
    assert!(error.contains("no TLS configuration"), "{error}");
    assert!(open(&fixture(Some(tls("*.agent.test"))), &plain_members, true).await.is_err());
    // A hello that claims TLS on a plain connection.
    let hello = DataHello { tls: true, ..hello(&plain_members, PATIENT) };
    let mut wire = super::Wire::open(&plain_members[0].address, &hello).await;
    assert!(wire.answer().await.unwrap().is_err());
    assert!(plain_members[0].door.hellos.lock().is_empty());
}
