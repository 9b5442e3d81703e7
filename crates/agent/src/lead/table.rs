//! What each member did in one attempt, and what the leader may do next.
//!
//! Pure: answers and statuses in, a verdict out. Counts against `minReady`; never waits, never sends, and never counts a member as
//! delivered or installed that did not say so itself.

use weightsync_core::protocol::{
    Ballot, EngineChecksum, InstallStep, Judgement, MemberName, MemberProgress, MixedWindow, PublishErrorCode, Refusal, RefusalCode,
    UpdatePhase, UpdateStatus,
};

/// Why an attempt ended without its aim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The closed word that a trainer sees if this was the last attempt.
    pub code: PublishErrorCode,
    pub message: String,
    pub phase: UpdatePhase,
    pub member: Option<MemberName>,
    /// Whether another epoch may do better. False when the version, its source or its trainer is at fault.
    pub again: bool,
    /// Whether the same weights would fail whenever they are published.
    pub lasting: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Some have not answered.
    Wait,
    /// Enough did it; some have not answered.
    Enough,
    /// All that will ever answer did, and they are enough.
    All,
    /// It cannot become enough.
    Fail(Failure),
}

/// What is known of members that were asked to switch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Switching {
    /// Their engines confirmed the version.
    pub installed: Vec<MemberName>,
    /// They reported that they did not install it.
    pub failed: Vec<MemberName>,
    /// No one heard what came of it: they may serve it.
    pub unheard: Vec<MemberName>,
}

/// Most notes of a member, and the characters of each.
const MOST_NOTES: usize = 8;
const LONGEST_NOTE: usize = 1024;

#[derive(Debug, Clone)]
struct Row {
    name: MemberName,
    bytes: u64,
    step: Option<InstallStep>,
    reason: Option<String>,
    refusal: Option<RefusalCode>,
    lost: bool,
    canary: bool,
    repeats: bool,
    fenced: bool,
    mixed: Vec<MixedWindow>,
    notes: Vec<String>,
    checksum: Option<EngineChecksum>,
    reported: bool,
    /// Whether its part is over because it was lost, and not by its own word.
    unheard: bool,
}

/// All members of one attempt, in the order of the chain.
#[derive(Debug, Clone)]
pub struct Table {
    rows: Vec<Row>,
    min_ready: u32,
}

impl Table {
    /// No one answered yet. At least one must succeed, whatever `min_ready` says.
    pub fn new(members: &[MemberName], min_ready: u32) -> Self {
        let row = |name: &MemberName| Row {
            name: name.clone(),
            bytes: 0,
            step: None,
            reason: None,
            refusal: None,
            lost: false,
            canary: false,
            repeats: false,
            fenced: false,
            mixed: Vec::new(),
            notes: Vec::new(),
            checksum: None,
            reported: false,
            unheard: false,
        };
        Self { rows: members.iter().map(row).collect(), min_ready: min_ready.max(1) }
    }

    pub fn observe(&mut self, member: &MemberName, status: &UpdateStatus) {
        let Some(row) = self.row(member) else { return };
        if row.step.is_some_and(InstallStep::is_final) {
            return;
        }
        row.step = Some(status.step);
        row.bytes = row.bytes.max(status.bytes);
        row.reason.clone_from(&status.reason);
        row.canary = status.refused;
        row.repeats = status.repeats;
        row.fenced = status.fenced;
        row.mixed.clone_from(&status.mixed);
        row.notes = status.notes.iter().take(MOST_NOTES).map(|note| note.chars().take(LONGEST_NOTE).collect()).collect();
        row.checksum.clone_from(&status.checksum);
    }

    pub fn refused(&mut self, member: &MemberName, refusal: &Refusal) {
        let Some(row) = self.row(member) else { return };
        if row.step.is_some_and(InstallStep::is_final) {
            return;
        }
        row.step = Some(if row.step.is_none() { InstallStep::Refused } else { InstallStep::Failed });
        row.refusal = Some(refusal.code);
        row.fenced = refusal.code == RefusalCode::StaleEpoch;
        row.reason = Some(refusal.message.clone());
    }

    pub fn lost(&mut self, member: &MemberName, cause: &str) {
        let Some(row) = self.row(member) else { return };
        row.lost = true;
        if !row.step.is_some_and(InstallStep::is_final) {
            row.step = Some(InstallStep::Failed);
            row.unheard = true;
            let reported = if row.reported { "it was asked to switch, and was not heard of since: " } else { "" };
            row.reason = Some(format!("{reported}{cause}"));
        }
    }

    /// These are asked to switch now; whether they did is known only by their own word.
    pub fn reported(&mut self, members: &[MemberName]) {
        for row in self.rows.iter_mut().filter(|row| members.contains(&row.name)) {
            row.reported = true;
        }
    }

    pub fn switching(&self) -> Switching {
        let open = |row: &Row| row.unheard || !row.step.is_some_and(InstallStep::is_final);
        Switching {
            installed: self.installed(),
            failed: self.with(|row| row.reported && !open(row) && row.step != Some(InstallStep::Installed)),
            unheard: self.with(|row| row.reported && open(row)),
        }
    }

    /// Those that wait for the stream, in the order of the chain.
    pub fn receiving(&self) -> Vec<MemberName> {
        self.with(|row| row.step == Some(InstallStep::Receiving))
    }

    /// Those that hold the version but have not begun to install it.
    pub fn delivered(&self) -> Vec<MemberName> {
        self.with(|row| row.step == Some(InstallStep::Delivered))
    }

    /// The engines' own checksums, of those that hold the version but have not begun to install it.
    pub fn checksums(&self) -> Vec<(MemberName, EngineChecksum)> {
        let rows = self.rows.iter().filter(|row| row.step == Some(InstallStep::Delivered));
        rows.filter_map(|row| Some((row.name.clone(), row.checksum.clone()?))).collect()
    }

    /// Where a member stands; none before it answered.
    pub fn step(&self, member: &MemberName) -> Option<InstallStep> {
        self.rows.iter().find(|row| &row.name == member)?.step
    }

    /// A member that failed got its bytes from that one: either may be at fault.
    pub fn passed_on(&mut self, member: &MemberName, before: &MemberName) {
        let Some(row) = self.row(member) else { return };
        let why = row.reason.take().unwrap_or_else(|| "it gave no reason".into());
        row.reason = Some(format!("{why}; its bytes came by way of {before}"));
    }

    pub fn passed_over(&mut self, member: &MemberName, why: &str) {
        let Some(row) = self.row(member).filter(|row| row.step == Some(InstallStep::Delivered)) else { return };
        row.step = Some(InstallStep::Failed);
        row.reason = Some(why.to_owned());
    }

    pub fn installed(&self) -> Vec<MemberName> {
        self.with(|row| row.step == Some(InstallStep::Installed))
    }

    pub fn behind(&self) -> Vec<(MemberName, String)> {
        let rows = self.rows.iter().filter(|row| row.step != Some(InstallStep::Installed));
        rows.map(|row| (row.name.clone(), row.reason.clone().unwrap_or_else(|| "has not confirmed it yet".into()))).collect()
    }

    /// Members whose engines answered requests while they loaded, and when.
    pub fn mixed(&self) -> Vec<(MemberName, Vec<MixedWindow>)> {
        self.rows.iter().filter(|row| !row.mixed.is_empty()).map(|row| (row.name.clone(), row.mixed.clone())).collect()
    }

    /// Members whose engine's checkpoint does not quite agree with the tensors, and how.
    pub fn notes(&self) -> Vec<(MemberName, Vec<String>)> {
        self.rows.iter().filter(|row| !row.notes.is_empty()).map(|row| (row.name.clone(), row.notes.clone())).collect()
    }

    /// One that refused, failed or is lost, with the reason.
    pub fn behind_for_good(&self) -> Option<(MemberName, String)> {
        let row = self.rows.iter().find(|row| row.out())?;
        Some((row.name.clone(), row.reason.clone().unwrap_or_else(|| "it gave no reason".into())))
    }

    pub fn reason(&self, member: &MemberName) -> Option<String> {
        self.rows.iter().find(|row| &row.name == member)?.reason.clone()
    }

    /// Whether a member's part is over, well or not.
    pub fn is_over(&self, member: &MemberName) -> bool {
        self.rows.iter().any(|row| &row.name == member && row.step.is_some_and(InstallStep::is_final))
    }

    /// Whether a member's part is over because the epoch ended there, which says nothing against the member.
    pub fn is_fenced(&self, member: &MemberName) -> bool {
        self.rows.iter().any(|row| &row.name == member && row.fenced)
    }

    /// Bytes that the slowest member has that still takes part.
    pub fn slowest_bytes(&self) -> u64 {
        self.rows.iter().filter(|row| !row.out()).map(|row| row.bytes).min().unwrap_or(0)
    }

    /// As events show it.
    pub fn progress(&self) -> Vec<MemberProgress> {
        let shown = |row: &Row| MemberProgress {
            member: row.name.clone(),
            bytes: row.bytes,
            step: row.step.unwrap_or(InstallStep::Receiving),
            reason: row.reason.clone(),
        };
        self.rows.iter().filter(|row| row.step.is_some()).map(shown).collect()
    }

    /// After begin: whether enough opened the update.
    pub fn after_begin(&self) -> Verdict {
        // A layout that makes no sense is refused by all of them, so one that says so speaks for itself only.
        self.verdict(UpdatePhase::Begin, |row| row.step.is_some(), |row| row.step.is_some() && !row.out())
    }

    /// After the stream: whether enough verified the version.
    pub fn after_finish(&self) -> Verdict {
        let delivered = |row: &Row| row.step >= Some(InstallStep::Delivered) && !row.out();
        self.verdict(UpdatePhase::Verify, |row| row.out() || delivered(row), delivered)
    }

    /// After activate: whether enough serve the version, and it is not one that most of the pods that were asked refuse.
    pub fn after_activate(&self) -> Verdict {
        let installed = |row: &Row| row.step == Some(InstallStep::Installed);
        let mut ballot = Ballot::default();
        for row in &self.rows {
            match (row.canary, installed(row), row.out()) {
                (true, _, _) => ballot.add(&row.name, Judgement::Refused),
                (false, true, _) => ballot.add(&row.name, Judgement::Taken),
                (false, false, false) => ballot.add(&row.name, Judgement::Undecided),
                (false, false, true) => {}
            }
        }
        if ballot.is_refused() {
            return Verdict::Fail(self.refused_by_canary());
        }
        self.verdict(UpdatePhase::Activate, |row| row.out() || installed(row), installed)
    }

    fn verdict(&self, phase: UpdatePhase, answered: impl Fn(&Row) -> bool, did: impl Fn(&Row) -> bool) -> Verdict {
        let good = self.rows.iter().filter(|row| did(row)).count();
        let open = self.rows.iter().filter(|row| !answered(row)).count();
        let enough = usize::try_from(self.min_ready).unwrap_or(usize::MAX);
        match (good >= enough, open) {
            (true, 0) => Verdict::All,
            (true, _) => Verdict::Enough,
            (false, _) if good + open >= enough => Verdict::Wait,
            (false, _) => Verdict::Fail(self.too_few(phase, good)),
        }
    }

    fn refused_by_canary(&self) -> Failure {
        let refused: Vec<&Row> = self.rows.iter().filter(|row| row.canary).collect();
        let measured: Vec<String> =
            refused.iter().map(|row| format!("{}: {}", row.name, row.reason.as_deref().unwrap_or("no reason given"))).collect();
        Failure {
            code: PublishErrorCode::VersionRefused,
            message: format!("the canary refuses it on {} of {} replicas ({})", refused.len(), self.rows.len(), measured.join("; ")),
            phase: UpdatePhase::Activate,
            member: match refused.as_slice() {
                [only] => Some(only.name.clone()),
                _ => None,
            },
            // The weights are what they are.
            again: false,
            lasting: true,
        }
    }

    fn too_few(&self, phase: UpdatePhase, good: usize) -> Failure {
        let out: Vec<&Row> = self.rows.iter().filter(|row| row.out()).collect();
        let causes: Vec<String> =
            out.iter().map(|row| format!("{}: {}", row.name, row.reason.as_deref().unwrap_or("no reason given"))).collect();
        let member = match out.as_slice() {
            [only] => Some(only.name.clone()),
            _ => None,
        };
        let did = match phase {
            UpdatePhase::Begin => "opened the update",
            UpdatePhase::Verify => "verified it",
            _ => "installed it",
        };
        // Who says no for good says it in the next epoch as well; who is lost or busy may be replaced or ready by then.
        let lasting = match phase {
            UpdatePhase::Begin => out.iter().all(|row| !row.may_change()),
            _ => good == 0 && out.len() == self.rows.len() && out.iter().all(|row| row.repeats || !row.may_change()),
        };
        // The weights are at fault, and not their number or the room for them.
        let unfit = out.iter().any(|row| row.repeats || matches!(row.refusal, Some(RefusalCode::Invalid | RefusalCode::LayoutMismatch)));
        Failure {
            code: if lasting && unfit { PublishErrorCode::Invalid } else { PublishErrorCode::NotEnoughReplicas },
            message: format!("{good} of {} replicas {did}, {} are needed ({})", self.rows.len(), self.min_ready, causes.join("; ")),
            phase,
            member,
            again: !lasting,
            lasting,
        }
    }

    fn row(&mut self, member: &MemberName) -> Option<&mut Row> {
        self.rows.iter_mut().find(|row| &row.name == member)
    }

    fn with(&self, wanted: impl Fn(&Row) -> bool) -> Vec<MemberName> {
        self.rows.iter().filter(|row| wanted(row)).map(|row| row.name.clone()).collect()
    }
}

impl Row {
    fn out(&self) -> bool {
        matches!(self.step, Some(InstallStep::Refused | InstallStep::Failed))
    }

    fn may_change(&self) -> bool {
        use RefusalCode::{Internal, Invalid, LayoutMismatch, OutOfSpace, SizeMismatch, VersionNotHigher};
        self.lost
            || self
                .refusal
                .is_none_or(|code| !matches!(code, OutOfSpace | SizeMismatch | LayoutMismatch | VersionNotHigher | Invalid | Internal))
    }
}
