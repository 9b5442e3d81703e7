//! The `weightsync-dev` program. Commands live in [`weightsync_dev::command`], one file each.

use std::process::ExitCode;

fn main() -> ExitCode {
    weightsync_dev::command::main()
}
