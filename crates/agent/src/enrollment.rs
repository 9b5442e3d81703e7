//! How an agent becomes known: it asks for a certificate, renews it, and announces its endpoints while no coordinator listens to them.
//!
//! Decides when to ask again; never gives up while its object may still be made and its token may still count, and never shows its token to anything but the server
//! whose certificate the given authority signed. The update path does not need any of this: an agent works on while the controller is away.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rand::RngExt as _;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use weightsync_core::protocol::{AnnounceResponse, Announcement, Assignment, EnrollRequest, Incarnation};
use weightsync_net::backoff::Backoff;
use weightsync_net::https::{CallError, ControllerClient};
use weightsync_net::identity::{Identity, IdentityError};

/// Between announcements while no one listens.
const ANNOUNCE_EVERY: Duration = Duration::from_secs(1);
/// The longest time between announcements to a controller that takes them and does not come to listen: it is busy with others.
const ANNOUNCE_BUSY: Duration = Duration::from_secs(4);
/// Between announcements while somebody does: the assignment may have changed, and the word of it may be lost.
const REFRESH_EVERY: Duration = Duration::from_secs(10);
/// How often it is looked whether somebody still listens.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Longest token file that is read, in bytes.
const MAX_TOKEN: u64 = 64 << 10;

/// Where the token comes from.
#[derive(Clone, PartialEq, Eq)]
pub enum TokenSource {
    /// A file that is read again each time: a projected token is rotated.
    File(PathBuf),
    /// A token for this process alone: of no use to another once it was shown.
    Given(String),
}

/// Who this agent is before it has a certificate.
#[derive(Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Applicant {
    pub namespace: String,
    pub pod: String,
    /// UID of the pod and this process.
    pub incarnation: Incarnation,
    pub token: TokenSource,
}

/// Why an agent cannot be enrolled, for good.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum EnrollmentError {
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error("the token cannot be read from {path}: {cause}")]
    Token { path: String, cause: String },
    /// The token that this process was started with counts no more, and there is no other.
    #[error("the controller refuses this agent for good: {0}. Its token works once; the pod needs a new agent with a new token")]
    Refused(String),
    #[error("cancelled")]
    Cancelled,
}

/// Why an agent has no certificate yet, and what its user can do.
#[derive(Debug, Clone, thiserror::Error)]
#[allow(missing_docs)]
pub enum NotEnrolled {
    #[error("the controller at {controller} has not answered yet: publish again in a moment")]
    Asking { controller: String },
    #[error("{0}: check that the controller runs and that this pod reaches it (its Service, DNS, network policies), then publish again")]
    Unreachable(#[source] Arc<CallError>),
    #[error("{0}: have a WeightSync select this pod, look at `kubectl weightsync status`, then publish again")]
    Rejected(#[source] Arc<CallError>),
    #[error("{0}: the pod needs the token's volume, which injection adds; create the pod again")]
    NoToken(#[source] Arc<EnrollmentError>),
}

impl From<CallError> for NotEnrolled {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Refused { .. } | CallError::Rejected { .. } => Self::Rejected(Arc::new(error)),
            CallError::Unreachable { .. } | CallError::Timeout { .. } | CallError::BadReply { .. } => Self::Unreachable(Arc::new(error)),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Enrolled {
    /// UID of its object.
    pub weightsync: String,
    pub assignment: Assignment,
    pub renew_at: Instant,
}

/// Asks for a certificate until it gets one; each refusal is logged once per cause, and passed to `tell`. Ends with [`EnrollmentError::Refused`] where the token was
/// given to this process and is refused for good.
pub async fn enroll(
    client: &ControllerClient,
    identity: &Identity,
    applicant: &Applicant,
    tell: impl Fn(NotEnrolled),
    cancel: &CancellationToken,
) -> Result<Enrolled, EnrollmentError> {
    let csr_pem = identity.csr_pem()?;
    let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));
    let mut said = String::new();
    loop {
        // With a certificate no token is needed: a single-use token is used by now. One that ended, because no controller was there to
        // renew it, proves nothing any more, and a projected token does.
        let token = match (identity.is_certified(), &applicant.token) {
            (true, _) => String::new(),
            (false, TokenSource::Given(token)) => token.clone(),
            (false, TokenSource::File(path)) => read_token(path).await?,
        };
        let request = EnrollRequest {
            token,
            namespace: applicant.namespace.clone(),
            pod: applicant.pod.clone(),
            incarnation: applicant.incarnation.clone(),
            csr_pem: csr_pem.clone(),
        };
        let asked = client.ask(&request, EnrollRequest::WITHIN);
        let answer = tokio::select! {
            () = cancel.cancelled() => return Err(EnrollmentError::Cancelled),
            answer = asked => answer,
        };
        match answer {
            Ok(response) => {
                identity.install(&response.certificate_pem)?;
                let renew_at = Instant::now() + Duration::from_millis(response.renew_after_ms);
                tracing::info!(weightsync = %response.weightsync, "enrolled");
                return Ok(Enrolled { weightsync: response.weightsync, assignment: response.assignment, renew_at });
            }
            // Another process with another token may enrol: this one only stands in its way.
            Err(CallError::Rejected { rejection, .. }) if !rejection.retryable && matches!(applicant.token, TokenSource::Given(_)) => {
                return Err(EnrollmentError::Refused(rejection.message));
            }
            Err(error) => {
                let text = error.to_string();
                if text != said {
                    tracing::warn!(error = text, "not enrolled yet, asking again");
                    said = text;
                }
                tell(error.into());
            }
        }
        let wait = backoff.failed();
        if timeout(wait, cancel.cancelled()).await.is_ok() {
            return Err(EnrollmentError::Cancelled);
        }
    }
}

/// Reads the first line of a token file; also used for standard input, which stays open after that line.
pub(crate) async fn read_token(path: &Path) -> Result<String, EnrollmentError> {
    let failed = |cause: String| EnrollmentError::Token { path: path.display().to_string(), cause };
    let read = async {
        let file = tokio::fs::File::open(path).await?;
        let mut line = String::new();
        BufReader::new(file.take(MAX_TOKEN)).read_line(&mut line).await?;
        std::io::Result::Ok(line.trim().to_owned())
    };
    match timeout(Duration::from_secs(10), read).await {
        Ok(Ok(token)) if !token.is_empty() => Ok(token),
        Ok(Ok(_)) => Err(failed("it is empty".into())),
        Ok(Err(error)) => Err(failed(error.to_string())),
        Err(_) => Err(failed("nothing came within 10 s".into())),
    }
}

#[allow(missing_docs)]
pub struct Announcer {
    pub client: ControllerClient,
    pub announcement: Announcement,
    /// Whether a coordinator reads the endpoint's event stream.
    pub attached: Arc<dyn Fn() -> bool + Send + Sync>,
    /// Notified when the controller says that the assignment changed: it is asked for at once.
    pub refresh: Arc<Notify>,
    pub assignment: watch::Sender<Assignment>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum AnnouncingEnded {
    Cancelled,
    /// No object claims the pod, or another one does: release the engine, forget the group, enrol again.
    Unclaimed {
        message: String,
    },
}

impl Announcer {
    /// Announces each second while no one listens (at once when a listener went away; less often to a controller that is busy), every ten
    /// seconds otherwise, and whenever it is asked to.
    pub async fn run(self, cancel: CancellationToken) -> AnnouncingEnded {
        let client = self.client.clone();
        let ask = move |announcement| {
            let client = client.clone();
            async move { client.ask(&announcement, Announcement::WITHIN).await }
        };
        self.run_by(ask, cancel).await
    }

    /// The same, over `ask`.
    pub(crate) async fn run_by<F>(self, ask: impl Fn(Announcement) -> F, cancel: CancellationToken) -> AnnouncingEnded
    where
        F: Future<Output = Result<AnnounceResponse, CallError>>,
    {
        let mut said = String::new();
        let mut patience = ANNOUNCE_EVERY;
        loop {
            let announcement = Announcement { attached: (self.attached)(), ..self.announcement.clone() };
            let answer = tokio::select! {
                () = cancel.cancelled() => return AnnouncingEnded::Cancelled,
                answer = ask(announcement) => answer,
            };
            let taken = answer.is_ok();
            match answer {
                Ok(response) => {
                    self.assignment.send_if_modified(|now| {
                        let differs = *now != response.assignment;
                        *now = response.assignment;
                        differs
                    });
                }
                Err(CallError::Rejected { rejection, .. }) if !rejection.retryable => {
                    return AnnouncingEnded::Unclaimed { message: rejection.message };
                }
                Err(CallError::Rejected { rejection, .. }) => {
                    if rejection.message != said {
                        tracing::warn!(message = rejection.message, "not announced, asking again");
                        said = rejection.message;
                    }
                }
                // The controller is away: the group works on without it.
                Err(error) => tracing::debug!(%error, "not announced"),
            }
            tokio::select! {
                () = cancel.cancelled() => return AnnouncingEnded::Cancelled,
                () = self.refresh.notified() => {}
                listened = self.rest(patience) => {
                    // Thousands of agents that announced themselves each second kept a new controller from listening to any of them.
                    patience = if taken && !listened { ANNOUNCE_BUSY.min(patience * 2) } else { ANNOUNCE_EVERY };
                }
            }
        }
    }

    /// Returns when no coordinator reads the events any more, when the assignment should be requested again, or when none came for as long
    /// as `patience`. Returns whether one was reading.
    async fn rest(&self, patience: Duration) -> bool {
        // Many agents that lost one controller must not all come back in one instant.
        let spread = |time: Duration| time.mul_f64(rand::rng().random_range(0.7..1.0));
        let begun = Instant::now();
        sleep(spread(ANNOUNCE_EVERY)).await;
        let (refresh, patience) = (Instant::now() + REFRESH_EVERY, begun + spread(patience));
        let mut listened = false;
        loop {
            let attached = (self.attached)();
            let until = if attached { refresh } else { patience };
            if Instant::now() >= until || listened && !attached {
                return listened || attached;
            }
            listened |= attached;
            sleep(LOOK_EVERY).await;
        }
    }
}
