//! Certificates that no honest program shows, for tests of who is refused.
//!
//! Built for tests alone (feature `testing`). Nothing here checks anything.

use std::time::Duration;

use time::OffsetDateTime;

use super::{Ca, Identity, IdentityError, PeerIdentity, read_certificates};

impl Ca {
    /// An identity that shows a certificate of this authority that has ended, as nothing but a forger or a broken program would.
    pub fn issue_ended(&self, who: &PeerIdentity) -> Result<Identity, IdentityError> {
        let hour = Duration::from_secs(3600);
        self.issue_anyhow(self.certificate_pem(), who, OffsetDateTime::now_utc() - 2 * hour, hour)
    }

    /// An identity that shows a certificate of this authority and trusts another one, as a stranger would who read that one's.
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
