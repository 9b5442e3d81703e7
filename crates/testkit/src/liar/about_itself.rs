//! Lies of a member about itself, in its events. Sends no message to others.

use weightsync_core::protocol::{HeldVersion, MemberState, RefusedVersion, Role};

use super::{Lie, Others, STANDS, invented};
use crate::fake_agent::FakeAgent;

/// An epoch beyond every bound.
const FAR: u64 = (1 << 62) - 1;

/// Changes what is true into a lie.
pub(super) type Change = fn(&mut MemberState, &Others);

/// The change of a lie about itself; none for lies of other kinds.
pub(super) fn of(lie: Lie) -> Option<Change> {
    Some(match lie {
        Lie::Role => |state, _| state.role = Role::Source,
        Lie::InventedVersion => |state, _| (state.installed, state.retained) = (Some(invented()), Some(invented())),
        Lie::CurrentVersion => |state, others| {
            state.installed.clone_from(&others.commit.current);
            state.retained.clone_from(&others.commit.current);
        },
        Lie::Epoch => |state, _| {
            if let Some(epoch) = &mut state.epoch {
                epoch.epoch = FAR;
            }
        },
        Lie::Term => |state, _| {
            if let Some(epoch) = &mut state.epoch {
                epoch.term = FAR;
            }
        },
        Lie::Member => |state, others| state.member = Some(others.member.clone()),
        Lie::Pod => |state, others| state.incarnation = others.incarnation.clone(),
        Lie::RefusedVersion => |state, others| {
            let refuse = |held: &HeldVersion| RefusedVersion { held: held.clone(), measured: "a lie".into() };
            state.refused = others.commit.current.iter().map(refuse).collect();
        },
        Lie::Orders | Lie::Bytes | Lie::Sums | Lie::Layout | Lie::Progress | Lie::Feeding | Lie::Engines => return None,
    })
}

/// Claims it for a while, and then reports the true state again.
pub(super) async fn stand(agent: &FakeAgent, change: Change, others: &Others) {
    let truth = agent.state();
    agent.change(|state| change(state, others));
    tokio::time::sleep(STANDS).await;
    agent.change(|state| {
        (state.role, state.incarnation, state.member) = (truth.role, truth.incarnation, truth.member);
        (state.installed, state.retained, state.refused) = (truth.installed, truth.retained, truth.refused);
        state.statements = truth.statements;
        if let (Some(epoch), Some(was)) = (&mut state.epoch, truth.epoch)
            && (epoch.epoch == FAR || epoch.term == FAR)
        {
            *epoch = was;
        }
    });
}
