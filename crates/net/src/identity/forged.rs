//! Certificates that no correct program presents, for tests of refusals.
//!
//! Built for tests only (feature `testing`). Nothing here checks anything.

use std::time::Duration;

use time::OffsetDateTime;

use super::{Ca, Identity, IdentityError, PeerIdentity, read_certificates};

/// What helm makes for a server that is no member: an authority of its own, and a chain and key for one name. All PEM.
#[allow(missing_docs)]
pub struct Made {
    pub authority: String,
    pub chain: String,
    pub key: String,
}

impl Made {
    /// Valid from now for `lifetime`.
    pub fn new(name: &str, lifetime: Duration) -> Result<Self, IdentityError> {
        let ca = Ca::generate()?;
        let key = rcgen::KeyPair::generate()?;
        let mut params = rcgen::CertificateParams::new(vec![name.to_owned()])?;
        params.not_before = OffsetDateTime::now_utc();
        params.not_after = params.not_before + lifetime;
        params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ServerAuth];
        let issuer = rcgen::Issuer::from_ca_cert_pem(ca.certificate_pem(), rcgen::KeyPair::from_pem(&ca.key_pem())?)?;
        let chain = params.signed_by(&key, &issuer)?.pem();
        Ok(Self { authority: ca.certificate_pem().to_owned(), chain, key: key.serialize_pem() })
    }
}

impl Ca {
    /// An identity with an expired certificate of this authority: only a forger or a broken program presents it.
    pub fn issue_ended(&self, who: &PeerIdentity) -> Result<Identity, IdentityError> {
        let hour = Duration::from_secs(3600);
        self.issue_anyhow(self.certificate_pem(), who, OffsetDateTime::now_utc() - 2 * hour, hour)
    }

    /// An identity with a certificate of this authority that trusts another one, like a stranger that read the other one's certificate.
    pub fn issue_trusting(&self, other: &Self, who: &PeerIdentity) -> Result<Identity, IdentityError> {
        self.issue_anyhow(other.certificate_pem(), who, OffsetDateTime::now_utc(), Duration::from_secs(3600))
    }

    fn issue_anyhow(&self, trusted: &str, who: &PeerIdentity, from: OffsetDateTime, lifetime: Duration) -> Result<Identity, IdentityError> {
        let identity = Identity::new(trusted)?;
        let pem = self.sign_at(&identity.csr_pem()?, who, from, lifetime)?;
        let chain = read_certificates("certificate", &pem)?;
        identity.show(who.clone(), chain, std::time::SystemTime::now() + 24 * lifetime)?;
        Ok(identity)
    }
}
