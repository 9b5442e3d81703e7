//! The authority that signs the certificates of all members of one operator. Decides their names and lifetime. It takes only the public key
//! from a signing request.

use std::fmt;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, SanType,
};
use rustls::sign::CertifiedKey;
use rustls_pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use time::OffsetDateTime;

use super::{Identity, IdentityError, PeerIdentity, read_certificates};

/// The clocks of two nodes may differ by this much.
const SKEW: Duration = Duration::from_secs(5 * 60);
/// Lifetime of an authority: ten years.
const LIFETIME: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// A certificate authority. Its key has no `Debug`: it is the most valuable secret of an operator.
pub struct Ca {
    issuer: Issuer<'static, KeyPair>,
    certificate_pem: String,
}

impl fmt::Debug for Ca {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ca")
    }
}

impl Ca {
    /// Makes a new authority.
    pub fn generate() -> Result<Self, IdentityError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = named("WeightSync");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        lasting(&mut params, OffsetDateTime::now_utc(), LIFETIME);
        let key = KeyPair::generate()?;
        let certificate = params.self_signed(&key)?;
        Ok(Self { certificate_pem: certificate.pem(), issuer: Issuer::new(params, key) })
    }

    /// Reads an authority. Refuses one whose key and certificate do not belong together, or that has expired.
    pub fn from_pem(certificate_pem: &str, key_pem: &str) -> Result<Self, IdentityError> {
        let key = KeyPair::from_pem(key_pem)?;
        let chain = read_certificates("authority", certificate_pem)?;
        if let Some(first) = chain.first() {
            let parsed = x509_parser::parse_x509_certificate(first);
            let (_, parsed) = parsed.map_err(|cause| IdentityError::Pem { what: "authority", cause: cause.to_string() })?;
            if !parsed.validity().is_valid() {
                return Err(IdentityError::Expired(parsed.validity().not_after.to_string()));
            }
        }
        let der = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        CertifiedKey::from_der(chain, der, &rustls::crypto::ring::default_provider())?;
        let issuer = Issuer::from_ca_cert_pem(certificate_pem, key)?;
        Ok(Self { issuer, certificate_pem: certificate_pem.to_owned() })
    }

    /// PEM of the authority's certificate; public.
    pub fn certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    /// PEM of the authority's key. Secret.
    pub fn key_pem(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Signs the public key of a request (PEM) for `who`, valid from now for `lifetime`. Names in the request are ignored.
    pub fn sign(&self, csr_pem: &str, who: &PeerIdentity, lifetime: Duration) -> Result<String, IdentityError> {
        self.sign_at(csr_pem, who, OffsetDateTime::now_utc(), lifetime)
    }

    pub(super) fn sign_at(
        &self,
        csr_pem: &str,
        who: &PeerIdentity,
        now: OffsetDateTime,
        lifetime: Duration,
    ) -> Result<String, IdentityError> {
        who.check()?;
        let request = CertificateSigningRequestParams::from_pem(csr_pem)?;
        let mut params = CertificateParams::default();
        params.distinguished_name = named("WeightSync member");
        params.subject_alt_names = vec![SanType::DnsName(who.dns_name().try_into()?), SanType::URI(who.uri().try_into()?)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        lasting(&mut params, now, lifetime);
        Ok(params.signed_by(&request.public_key, &self.issuer)?.pem())
    }

    /// Makes an identity of this authority at once, for the authority's own process.
    pub fn issue(&self, who: &PeerIdentity, lifetime: Duration) -> Result<Identity, IdentityError> {
        let identity = Identity::new(&self.certificate_pem)?;
        identity.install(&self.sign(&identity.csr_pem()?, who, lifetime)?)?;
        Ok(identity)
    }
}

fn named(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}

fn lasting(params: &mut CertificateParams, now: OffsetDateTime, lifetime: Duration) {
    params.not_before = now - SKEW;
    params.not_after = now + lifetime;
}
