//! Signs announcements of a source, and checks the statements that others present.
//!
//! Decides whether a source of the object signed a statement. The certificate is judged at the time from which it is valid: an expired one
//! still proves earlier announcements. The consequences of a statement are decided elsewhere.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls::SignatureScheme;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

use super::{Identity, IdentityError, PeerIdentity};
use weightsync_core::protocol::{HeldVersion, Role, Statement};

/// The signature scheme of every WeightSync key.
const SCHEME: SignatureScheme = SignatureScheme::ECDSA_NISTP256_SHA256;

/// Longest certificate in base64.
const LONGEST: usize = 8 << 10;

/// Why a statement proves nothing.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum StatementError {
    #[error("it is about WeightSync {found}, not about {wanted}")]
    OtherObject { found: String, wanted: String },
    #[error("its {what} cannot be read")]
    Unreadable { what: &'static str },
    #[error("its certificate is none of this authority: {0}")]
    Certificate(#[from] IdentityError),
    #[error("{signer} signed it, which is no source of {weightsync}")]
    NoSource { signer: String, weightsync: String },
    #[error("its signature is not that of its certificate")]
    Signature,
}

impl Identity {
    /// Signs that a version exists, with the key of the certificate that was installed last.
    pub fn state(&self, held: &HeldVersion, layout: &str, epoch: u64) -> Result<Statement, IdentityError> {
        let (own, certified) = {
            let current = self.0.current.read();
            let current = current.as_ref().ok_or_else(|| IdentityError::Unnamed("there is none yet".into()))?;
            (current.own.clone(), current.certified.clone())
        };
        let PeerIdentity::Agent { weightsync, .. } = own else {
            return Err(IdentityError::Unnamed("the controller announces no version".into()));
        };
        let certificate = certified.cert.first().map(|certificate| STANDARD.encode(certificate)).unwrap_or_default();
        let (held, layout) = (held.clone(), layout.to_owned());
        let mut statement = Statement { weightsync, held, layout, epoch, certificate, signature: String::new() };
        let unfit = || rustls::Error::General("the key signs no statement".into());
        let signer = certified.key.choose_scheme(&[SCHEME]).ok_or_else(unfit)?;
        statement.signature = STANDARD.encode(signer.sign(&statement.to_sign())?);
        Ok(statement)
    }

    /// Checks that a source of that object signed the statement.
    pub fn check(&self, statement: &Statement, weightsync: &str) -> Result<(), StatementError> {
        if statement.weightsync != weightsync {
            return Err(StatementError::OtherObject { found: statement.weightsync.clone(), wanted: weightsync.to_owned() });
        }
        let unreadable = |what| StatementError::Unreadable { what };
        let certificate = Some(&statement.certificate).filter(|text| text.len() <= LONGEST).and_then(|text| STANDARD.decode(text).ok());
        let certificate = CertificateDer::from(certificate.ok_or_else(|| unreadable("certificate"))?);
        let signature = STANDARD.decode(&statement.signature).map_err(|_| unreadable("signature"))?;
        let signer = PeerIdentity::of_certificate(&certificate)?;
        let (_, parsed) = x509_parser::parse_x509_certificate(&certificate).map_err(|_| unreadable("certificate"))?;
        let begin = u64::try_from(parsed.validity().not_before.timestamp()).unwrap_or(0);
        let begin = UnixTime::since_unix_epoch(Duration::from_secs(begin));
        let name = ServerName::try_from(signer.dns_name()).map_err(|_| IdentityError::Name { name: signer.dns_name() })?;
        let (roots, provider) = (self.0.roots.clone(), self.0.provider.clone());
        let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider).build().map_err(IdentityError::from)?;
        verifier.verify_server_cert(&certificate, &[], &name, &[], begin).map_err(IdentityError::from)?;
        match &signer {
            PeerIdentity::Agent { weightsync: of, role: Role::Source, .. } if of == weightsync => {}
            _ => return Err(StatementError::NoSource { signer: signer.uri(), weightsync: weightsync.to_owned() }),
        }
        let algorithms = self.0.provider.signature_verification_algorithms.mapping.iter().find(|(scheme, _)| *scheme == SCHEME);
        let algorithm = algorithms.and_then(|(_, algorithms)| algorithms.first()).ok_or(StatementError::Signature)?;
        let key = &parsed.public_key().subject_public_key.data;
        algorithm.verify_signature(key, &statement.to_sign(), &signature).map_err(|_| StatementError::Signature)
    }
}
