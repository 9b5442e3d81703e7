//! Certificates that no correct program presents, for tests of refusals.
//!
//! Built for tests only (feature `testing`). Nothing here checks anything.

use std::time::Duration;

use time::OffsetDateTime;

use super::{Ca, Identity, IdentityError, PeerIdentity, read_certificates};

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
