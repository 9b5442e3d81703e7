//! The `weightsync` program. Commands live in [`weightsync::cli`], one file each.

use std::process::ExitCode;

fn main() -> ExitCode {
    weightsync::cli::main()
}
