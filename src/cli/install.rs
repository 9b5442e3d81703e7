//! `weightsync install DIRECTORY`: copies this program, so that another container of the pod can run it (`agent.launch: Wrap`).
//!
//! The copy is atomic: a container that restarts in between must not start half a program.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;

const NAME: &str = "weightsync";

#[derive(Debug, Args)]
pub struct InstallArgs {
    /// Target directory; the program is called `weightsync` there.
    directory: PathBuf,
}

impl InstallArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let (half, whole) = (self.directory.join(format!(".{NAME}.part")), self.directory.join(NAME));
        let reported = |what: &str| format!("{what} {}", self.directory.display());
        // The link, not the path: it still leads to the program if its file was replaced after the start.
        std::fs::copy("/proc/self/exe", &half).with_context(|| reported("this program cannot be copied to"))?;
        // A user of another container must be able to run it.
        std::fs::set_permissions(&half, std::fs::Permissions::from_mode(0o755))
            .with_context(|| reported("permissions cannot be set in"))?;
        std::fs::rename(&half, &whole).with_context(|| reported("the copy cannot be put in its place in"))?;
        Ok(ExitCode::SUCCESS)
    }
}
