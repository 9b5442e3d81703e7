//! The text that an adapter writes into an engine's own "weight version" field, and how it is read.
//!
//! The field ends with the engine's process and outlives the agent's. So it is the one reliable place for the engine's version.
//! `7+DIGEST` means that version 7, whose manifest has that blake3 digest, was installed completely. `installing:7+DIGEST` means that an
//! install began and that its end was not observed. Decides the text only; never trusts it as a proof that the weights are right.

use weightsync_core::protocol::HeldVersion;

/// What both engines report before a version is written (vLLM 0.32 `EngineCore._weight_version`, SGLang 0.5.23 `--weight-version`).
pub(super) const STARTUP: &str = "default";
const INSTALLING: &str = "installing:";

/// The contents that an engine reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holding {
    /// Its start-up weights.
    Startup,
    /// A WeightSync version, installed completely.
    Version(HeldVersion),
    /// Possibly a part of this version: an install began, and its end was not observed.
    HalfAnUpdate(HeldVersion),
    /// Text that another program wrote.
    Foreign(String),
}

impl Holding {
    pub(crate) fn parse(text: &str) -> Self {
        if text == STARTUP {
            return Self::Startup;
        }
        let (version, half) = match text.strip_prefix(INSTALLING) {
            Some(version) => (version, true),
            None => (text, false),
        };
        match (parse_version(version), half) {
            (Some(version), false) => Self::Version(version),
            (Some(version), true) => Self::HalfAnUpdate(version),
            (None, _) => Self::Foreign(text.to_owned()),
        }
    }

    pub(crate) fn text(&self) -> String {
        match self {
            Self::Startup => STARTUP.to_owned(),
            Self::Version(held) => format!("{}+{}", held.version, held.manifest),
            Self::HalfAnUpdate(held) => format!("{INSTALLING}{}+{}", held.version, held.manifest),
            Self::Foreign(text) => text.clone(),
        }
    }
}

impl std::fmt::Display for Holding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Startup => f.write_str("its start-up weights"),
            Self::Version(held) => write!(f, "version {}", held.version),
            Self::HalfAnUpdate(held) => write!(f, "half an update of version {}", held.version),
            Self::Foreign(text) => write!(f, "what another program called {text:?}"),
        }
    }
}

/// `NUMBER+DIGEST`, the digest in the form of [`Holding::text`]: 64 lower-case hex digits.
fn parse_version(text: &str) -> Option<HeldVersion> {
    let (number, manifest) = text.split_once('+')?;
    let is_digest = manifest.len() == 64 && manifest.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let is_number = number.bytes().all(|byte| byte.is_ascii_digit());
    let version = number.parse().ok()?;
    (is_digest && is_number).then(|| HeldVersion { version, manifest: manifest.to_owned() })
}
