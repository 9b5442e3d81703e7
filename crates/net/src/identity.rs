//! A program's identity: its key, its certificate, and the authority that it trusts.
//!
//! Decides which certificate is presented in the next handshake, and which peers' certificates are trusted. The key is made here and never
//! leaves memory. A renewal swaps the certificate of running servers and clients; open connections continue.

mod ca;
#[cfg(any(test, feature = "testing"))]
mod forged;
mod key;
mod peer;
mod statement;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::RwLock;
use rcgen::{CertificateParams, DistinguishedName, KeyPair};
use rustls::client::danger::ServerCertVerifier;
use rustls::client::{ResolvesClientCert, Resumption, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore, ServerConfig, SignatureScheme};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};

pub use ca::Ca;
#[cfg(any(test, feature = "testing"))]
pub use forged::Made;
pub use key::KeyDigest;
pub(crate) use peer::controller_name;
pub use peer::{PeerIdentity, agent_name};
pub use statement::StatementError;

#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum IdentityError {
    #[error("the certificate cannot be made: {0}")]
    Make(#[from] rcgen::Error),
    #[error("the {what} is no readable PEM: {cause}")]
    Pem { what: &'static str, cause: String },
    #[error("TLS refuses the certificate: {0}")]
    Tls(#[from] rustls::Error),
    #[error("TLS refuses the authority: {0}")]
    Authority(#[from] rustls::server::VerifierBuilderError),
    #[error("{name:?} cannot be part of a certificate's name: 1 to 63 of a-z, 0-9 and '-'")]
    Name { name: String },
    #[error("the certificate names no member of WeightSync: {0}")]
    Unnamed(String),
    #[error("the authority's certificate ended at {0}; delete the Secret to have a new one made")]
    Expired(String),
}

/// Which certificates a server requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientCertificates {
    /// Every client must present one of the authority.
    Required,
    /// A client may present none (enrolment).
    Optional,
}

/// A key, its present certificate, and the trusted authority. Cheap to clone; all clones share the certificate.
#[derive(Clone)]
pub struct Identity(Arc<Shared>);

struct Shared {
    key: KeyPair,
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
    current: RwLock<Option<Current>>,
    foreign: RwLock<Option<Foreign>>,
}

/// A certificate of another authority, for clients that know no member of WeightSync.
struct Foreign {
    /// The name that they ask for.
    name: String,
    certified: Arc<CertifiedKey>,
}

struct Current {
    own: PeerIdentity,
    certified: Arc<CertifiedKey>,
    until: SystemTime,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Identity").field(&self.own()).finish()
    }
}

impl Identity {
    /// Makes a key that trusts the authority (one or more PEM certificates) and has no certificate yet.
    pub fn new(ca_pem: &str) -> Result<Self, IdentityError> {
        let mut roots = RootCertStore::empty();
        for certificate in read_certificates("authority", ca_pem)? {
            roots.add(certificate)?;
        }
        Ok(Self(Arc::new(Shared {
            key: KeyPair::generate()?,
            roots: Arc::new(roots),
            provider: Arc::new(rustls::crypto::ring::default_provider()),
            current: RwLock::new(None),
            foreign: RwLock::new(None),
        })))
    }

    /// A signing request for this key, without names: only the authority decides the names.
    pub fn csr_pem(&self) -> Result<String, IdentityError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        Ok(params.serialize_request(&self.0.key)?.pem()?)
    }

    /// Presents this certificate (PEM) from the next handshake on. It must belong to the key, be signed by the authority, be valid now, and
    /// name a member; otherwise nothing changes.
    pub fn install(&self, certificate_pem: &str) -> Result<PeerIdentity, IdentityError> {
        let chain = read_certificates("certificate", certificate_pem)?;
        let Some((leaf, intermediates)) = chain.split_first() else {
            return Err(IdentityError::Pem { what: "certificate", cause: "it holds no certificate".into() });
        };
        let own = PeerIdentity::of_certificate(leaf)?;
        let name = ServerName::try_from(own.dns_name()).map_err(|_| IdentityError::Name { name: own.dns_name() })?;
        let verifier = WebPkiServerVerifier::builder_with_provider(self.0.roots.clone(), self.0.provider.clone()).build()?;
        verifier.verify_server_cert(leaf, intermediates, &name, &[], UnixTime::now())?;
        let until = peer::end_of(leaf)?;
        self.show(own.clone(), chain, until)?;
        Ok(own)
    }

    fn show(&self, own: PeerIdentity, chain: Vec<CertificateDer<'static>>, until: SystemTime) -> Result<(), IdentityError> {
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.0.key.serialize_der()));
        let certified = Arc::new(CertifiedKey::from_der(chain, key, &self.0.provider)?);
        let mut current = self.0.current.write();
        *current = Some(Current { own, certified, until });
        Ok(())
    }

    /// As a server, presents this chain and key (PEM), of an authority that this program does not know, to clients that ask for `name`. A key
    /// of another certificate changes nothing.
    pub fn serve_as(&self, name: &str, chain_pem: &str, key_pem: &str) -> Result<(), IdentityError> {
        let chain = read_certificates("certificate", chain_pem)?;
        let key = PrivateKeyDer::from_pem_slice(key_pem.as_bytes());
        let key = key.map_err(|cause| IdentityError::Pem { what: "key", cause: cause.to_string() })?;
        let certified = Arc::new(CertifiedKey::from_der(chain, key, &self.0.provider)?);
        *self.0.foreign.write() = Some(Foreign { name: name.to_owned(), certified });
        Ok(())
    }

    /// Whether there is a certificate that has not expired. An expired one is never presented: even a server that requires none would
    /// refuse it, and its owner could not enrol again.
    pub fn is_certified(&self) -> bool {
        self.0.certified().is_some()
    }

    /// This program's identity by its last certificate.
    pub fn own(&self) -> Option<PeerIdentity> {
        let current = self.0.current.read();
        current.as_ref().map(|current| current.own.clone())
    }

    /// TLS settings of a server. Later renewals apply to it.
    pub fn server_config(&self, clients: ClientCertificates) -> Result<Arc<ServerConfig>, IdentityError> {
        let verifier = WebPkiClientVerifier::builder_with_provider(self.0.roots.clone(), self.0.provider.clone());
        let verifier = match clients {
            ClientCertificates::Required => verifier,
            ClientCertificates::Optional => verifier.allow_unauthenticated(),
        };
        let mut config = ServerConfig::builder_with_provider(self.0.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(verifier.build()?)
            .with_cert_resolver(Arc::new(Resolver(self.0.clone())));
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        // A resumed session would keep the identity of its first certificate, even after the peer got another one.
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }

    /// TLS settings of a client; presents the certificate if there is one. Later renewals apply to it.
    pub fn client_config(&self) -> Result<ClientConfig, IdentityError> {
        let mut config = ClientConfig::builder_with_provider(self.0.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_root_certificates(self.0.roots.clone())
            .with_client_cert_resolver(Arc::new(Resolver(self.0.clone())));
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        config.resumption = Resumption::disabled();
        Ok(config)
    }
}

impl Shared {
    fn certified(&self) -> Option<Arc<CertifiedKey>> {
        let current = self.current.read();
        current.as_ref().filter(|current| SystemTime::now() < current.until).map(|current| current.certified.clone())
    }
}

/// Gives the current certificate to each handshake.
struct Resolver(Arc<Shared>);

impl fmt::Debug for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Resolver")
    }
}

impl ResolvesServerCert for Resolver {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let asked = hello.server_name();
        let foreign = self.0.foreign.read();
        let foreign = foreign.as_ref().filter(|foreign| asked == Some(foreign.name.as_str()));
        foreign.map_or_else(|| self.0.certified(), |foreign| Some(foreign.certified.clone()))
    }
}

impl ResolvesClientCert for Resolver {
    fn resolve(&self, _hints: &[&[u8]], _schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.0.certified()
    }

    fn has_certs(&self) -> bool {
        self.0.certified().is_some()
    }
}

/// Whether a client that trusts the authorities of `bundle_pem` takes this chain (PEM) for `name` at that time.
pub fn verifies(bundle_pem: &str, chain_pem: &str, name: &str, at: SystemTime) -> Result<(), IdentityError> {
    let mut roots = RootCertStore::empty();
    for certificate in read_certificates("authority", bundle_pem)? {
        roots.add(certificate)?;
    }
    let chain = read_certificates("certificate", chain_pem)?;
    let Some((leaf, intermediates)) = chain.split_first() else {
        return Err(IdentityError::Pem { what: "certificate", cause: "it holds no certificate".into() });
    };
    let name = ServerName::try_from(name).map_err(|_| IdentityError::Name { name: name.to_owned() })?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build()?;
    let at = UnixTime::since_unix_epoch(at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default());
    verifier.verify_server_cert(leaf, intermediates, &name, &[], at)?;
    Ok(())
}

fn read_certificates(what: &'static str, pem: &str) -> Result<Vec<CertificateDer<'static>>, IdentityError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    match found {
        Ok(certificates) if certificates.is_empty() => Err(IdentityError::Pem { what, cause: "it holds no certificate".into() }),
        Ok(certificates) => Ok(certificates),
        Err(cause) => Err(IdentityError::Pem { what, cause: cause.to_string() }),
    }
}
