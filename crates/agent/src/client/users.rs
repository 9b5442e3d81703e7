//! Decides which users may publish: whoever speaks on the trainer's socket decides what every engine serves.

use std::str::FromStr;

/// Who may speak on the trainer's socket, beside the agent's own user and root.
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
mod tests {
    use super::*;

    #[test]
    fn users_are_read_as_ids_or_any() {
        assert_eq!("".parse(), Ok(TrainerUsers::These(Vec::new())));
        assert_eq!("1000, 1001".parse(), Ok(TrainerUsers::These(vec![1000, 1001])));
        assert_eq!("any".parse(), Ok(TrainerUsers::Any));
        for nonsense in ["all", "-1", "1000;1001", "4294967296"] {
            assert!(nonsense.parse::<TrainerUsers>().is_err(), "{nonsense}");
        }
    }

    #[test]
    fn the_agents_own_user_and_root_are_always_among_them() {
        assert_eq!(TrainerUsers::These(vec![1000, 5]).with_own(5), Some(vec![0, 5, 1000]));
        assert_eq!(TrainerUsers::Any.with_own(5), None);
    }
}
