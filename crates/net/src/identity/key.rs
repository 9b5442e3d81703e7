//! The key of a certificate or a signing request: two certificates of one pod differ by it.

use rcgen::{CertificateSigningRequestParams, PublicKeyData as _};
use rustls_pki_types::CertificateDer;

use super::IdentityError;

/// Digest of a public key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyDigest(blake3::Hash);

impl KeyDigest {
    /// The public key in a signing request (PEM).
    pub fn of_request(csr_pem: &str) -> Result<Self, IdentityError> {
        let request = CertificateSigningRequestParams::from_pem(csr_pem)?;
        Ok(Self(blake3::hash(request.public_key.der_bytes())))
    }

    /// The key of a certificate that TLS verified already.
    pub(crate) fn of_certificate(certificate: &CertificateDer<'_>) -> Result<Self, IdentityError> {
        let parsed = x509_parser::parse_x509_certificate(certificate);
        let (_, parsed) = parsed.map_err(|_| IdentityError::Unnamed("it cannot be parsed".into()))?;
        Ok(Self(blake3::hash(&parsed.public_key().subject_public_key.data)))
    }
}
