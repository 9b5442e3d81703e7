//! Decides which users may publish: anyone who speaks on the trainer's socket decides what every engine serves.

use std::str::FromStr;

/// Who may speak on the trainer's socket, next to the agent's own user and root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TrainerUsers {
    /// Everybody. Right within a pod: its network namespace is where its abstract sockets end. Wrong on a host's network.
    Any,
    These(Vec<u32>),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither `any` nor a list of user ids such as 1000,1001")]
pub struct BadUsers(String);

impl TrainerUsers {
    /// Ids that may connect, the agent's own and root's among them; none for everybody.
    pub(super) fn with_own(self, own: u32) -> Option<Vec<u32>> {
        match self {
            Self::Any => None,
            Self::These(mut uids) => {
                uids.extend([own, 0]);
                uids.sort_unstable();
                uids.dedup();
                Some(uids)
            }
        }
    }
}

impl FromStr for TrainerUsers {
    type Err = BadUsers;

    fn from_str(text: &str) -> Result<Self, BadUsers> {
        if text == "any" {
            return Ok(Self::Any);
        }
        let ids = text.split(',').map(str::trim).filter(|id| !id.is_empty()).map(str::parse);
        ids.collect::<Result<_, _>>().map(Self::These).map_err(|_| BadUsers(text.to_owned()))
    }
}

#[cfg(test)]
mod tests;
